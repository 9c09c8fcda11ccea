// SPDX-License-Identifier: Apache-2.0
//
// Loops over lanes, compiled once for AVX2 and once for any x86-64; both give the same bits,
// since the lanes and the order of their sums are fixed and multiply-add is never fused.
//
// Threads: see contrast_loops.h.   Memory: one cache line of state per row.
#include "kernels/contrast_loops.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>

#include "kernels/lanes.h"
#include "kernels/shared_rows.h"

namespace plimsoll::kernels {
namespace {

// `row_floats` is about what the body touches per row.
template <class F>
void for_row_blocks(std::int64_t rows, std::int64_t row_floats, const F& body) {
  const std::int64_t grain = std::max<std::int64_t>(1, kGrainFloats / (kPairBlock * row_floats));
  at::parallel_for(0, row_blocks(rows), grain, [&](std::int64_t begin, std::int64_t end) {
    for (std::int64_t block = begin; block < end; ++block) {
      body(block, block * kPairBlock, std::min(rows, (block + 1) * kPairBlock));
    }
  });
}

float floored(float length) {
  return std::max(length, kNormFloor);
}

PLIMSOLL_CLONES void unit_row(const float* x, std::int64_t dim, float* unit, float* length) {
  const float norm = std::sqrt(dot(x, x, dim));
  const float by = 1.0F / (norm > kNormFloor ? norm : kNormFloor);
  for (std::int64_t k = 0; k < dim; ++k) {
    unit[k] = x[k] * by;
  }
  *length = norm;
}

// y = (g − u·(u·g)) / ‖x‖, or g / floor below it. Safe when y is g.
PLIMSOLL_INLINE void unit_gradient(const float* g, const float* u, float length, std::int64_t dim,
                                   float* y) {
  const bool inside = length > kNormFloor;
  const float along = inside ? dot(u, g, dim) : 0.0F;
  const float by = 1.0F / (inside ? length : kNormFloor);
  for (std::int64_t k = 0; k < dim; ++k) {
    y[k] = (g[k] - u[k] * along) * by;
  }
}

PLIMSOLL_CLONES void unit_row_backward(const float* g, const float* u, float length,
                                       std::int64_t dim, float* y) {
  unit_gradient(g, u, length, dim, y);
}

// What the forward and the backward of one combined row share.
struct RotateScalars {
  float text_length{0};
  float direction_length{0};
  float cosine{0};
  float sine{0};
  float text_by{0};       // 1 / max(‖t‖, floor)
  float direction_by{0};  // 1 / max(‖d‖, floor)
};

PLIMSOLL_INLINE RotateScalars rotate_scalars(const float* t, const float* d, std::int64_t dim,
                                             float theta) {
  RotateScalars s;
  s.text_length = std::sqrt(dot(t, t, dim));
  s.direction_length = std::sqrt(dot(d, d, dim));
  s.cosine = std::cos(theta);
  s.sine = std::sin(theta);
  s.text_by = 1.0F / (s.text_length > kNormFloor ? s.text_length : kNormFloor);
  s.direction_by = 1.0F / (s.direction_length > kNormFloor ? s.direction_length : kNormFloor);
  return s;
}

PLIMSOLL_CLONES void rotate_row(const float* t, const float* d, std::int64_t dim, float theta,
                                float scale, float* out, float* unit) {
  const RotateScalars s = rotate_scalars(t, d, dim, theta);
  const float a = s.cosine;
  const float b = s.sine * s.direction_by;
  for (std::int64_t k = 0; k < dim; ++k) {
    unit[k] = t[k] * s.text_by;
    out[k] = a * unit[k] + b * d[k];
  }
  const float v_length = std::sqrt(dot(out, out, dim));
  const float u_by = 1.0F / (v_length > kNormFloor ? v_length : kNormFloor);
  const float stretch = scale * s.text_length;
  const float x_length = std::fabs(stretch) * (v_length * u_by);
  const float by = stretch / (x_length > kNormFloor ? x_length : kNormFloor) * u_by;
  for (std::int64_t k = 0; k < dim; ++k) {
    out[k] *= by;
  }
}

struct RotateRowGradient {
  const float* grad_out;
  const float* grad_unit;  // May be null.
  float* grad_x;           // May be null.
  float* grad_direction;
  float* grad_theta;
  float* grad_scale;
};

// Walks the formula of rotate_row backwards: out ← x ← (s, ‖t‖, u) ← v ← (θ, t̂, p) ← (t, d).
// grad_direction doubles as the row's scratch until the end.
PLIMSOLL_CLONES void rotate_row_backward(const float* t, const float* d, std::int64_t dim,
                                         float theta, float scale, const RotateRowGradient& g) {
  const RotateScalars s = rotate_scalars(t, d, dim, theta);
  float* v = g.grad_direction;
  const float a = s.cosine * s.text_by;
  const float b = s.sine * s.direction_by;
  for (std::int64_t k = 0; k < dim; ++k) {
    v[k] = a * t[k] + b * d[k];
  }
  const float v_length = std::sqrt(dot(v, v, dim));
  const bool v_inside = v_length > kNormFloor;
  const float u_by = 1.0F / (v_inside ? v_length : kNormFloor);
  const float stretch = scale * s.text_length;
  const float x_length = std::fabs(stretch) * (v_length * u_by);
  const bool x_inside = x_length > kNormFloor;
  const float x_by = 1.0F / (x_inside ? x_length : kNormFloor);

  // dx = (g − out(out·g))·x_by with out = stretch·x_by·u; then u·dx and dv = (du − u(u·du))·u_by.
  const float u_dot_g = dot(v, g.grad_out, dim) * u_by;
  const float out_by = stretch * x_by;                             // out = out_by · u
  const float keep = x_inside ? out_by * out_by * u_dot_g : 0.0F;  // dx = (g − keep·u)·x_by
  const float u_dot_u = v_inside ? 1.0F : v_length * u_by * (v_length * u_by);
  const float u_dot_dx = (u_dot_g - keep * u_dot_u) * x_by;
  *g.grad_scale = s.text_length * u_dot_dx;
  const float grad_length = scale * u_dot_dx;
  const float along = v_inside ? u_dot_dx : 0.0F;
  const float dv_by = stretch * u_by;                        // dv = (dx − along·u)·dv_by
  const float u_coefficient = (keep * x_by + along) * u_by;  // of v itself
  for (std::int64_t k = 0; k < dim; ++k) {
    v[k] = (g.grad_out[k] * x_by - u_coefficient * v[k]) * dv_by;
  }
  const float t_dot_dv = dot(t, v, dim) * s.text_by;
  const float p_dot_dv = dot(d, v, dim) * s.direction_by;
  *g.grad_theta = s.cosine * p_dot_dv - s.sine * t_dot_dv;
  if (g.grad_x != nullptr) {
    const bool inside = s.text_length > kNormFloor;
    float unit_along = s.cosine * t_dot_dv;
    if (g.grad_unit != nullptr) {
      unit_along += dot(t, g.grad_unit, dim) * s.text_by;
    }
    // d‖t‖/dt = t/‖t‖ (0 at 0), beside the gradient of norm(t).
    const float t_coefficient = inside
                                    ? (grad_length - unit_along * s.text_by) * s.text_by
                                    : (s.text_length > 0.0F ? grad_length / s.text_length : 0.0F);
    for (std::int64_t k = 0; k < dim; ++k) {
      const float unit = s.cosine * v[k] + (g.grad_unit != nullptr ? g.grad_unit[k] : 0);
      g.grad_x[k] = unit * s.text_by + t_coefficient * t[k];
    }
  }
  const bool d_inside = s.direction_length > kNormFloor;
  const float p_along = d_inside ? s.sine * p_dot_dv * s.direction_by * s.direction_by : 0.0F;
  for (std::int64_t k = 0; k < dim; ++k) {
    v[k] = s.sine * s.direction_by * v[k] - p_along * d[k];
  }
}

// One row of exponentials: returns its sum and adds it to the block's column sums.
PLIMSOLL_CLONES float exponentiate_row(float* s, std::int64_t rows, float by, float* columns) {
  Lanes sum = {};
  Lanes x;
  Lanes column;
  std::int64_t j = 0;
  for (; j + kLanes <= rows; j += kLanes) {
    load(s + j, x);
    x = (x - 1.0F) * by;
    exp_lanes(x);
    store(x, s + j);
    sum += x;
    load(columns + j, column);
    column += x;
    store(column, columns + j);
  }
  float total = sum_lanes(sum);
  if (j < rows) {
    float tail[kLanes] = {};
    std::copy(s + j, s + rows, tail);
    load(tail, x);
    x = (x - 1.0F) * by;
    exp_lanes(x);
    store(x, tail);
    for (std::int64_t k = 0; j < rows; ++j, ++k) {
      s[j] = tail[k];
      total += tail[k];
      columns[j] += tail[k];
    }
  }
  return total;
}

PLIMSOLL_CLONES void nce_gradient_row(float* e, std::int64_t rows, float row_factor, float by,
                                      const float* column_sum) {
  for (std::int64_t j = 0; j < rows; ++j) {
    e[j] *= row_factor + by / column_sum[j];
  }
}

PLIMSOLL_CLONES void add_to(const float* from, std::int64_t n, float* to) {
  for (std::int64_t k = 0; k < n; ++k) {
    to[k] += from[k];
  }
}

constexpr std::int64_t kSets = 2;  // Of lanes, for distances and for cosines each:
constexpr std::int64_t kColumnsAtOnce = kSets * kLanes;  // candidates whose sums stay in registers.

// Squared distances and cosines of row i to candidates [j, j + kColumnsAtOnce). True when any is
// better than the bounds given.
PLIMSOLL_INLINE bool compare_columns(const float* ct, const float* unit, std::int64_t stride,
                                     std::int64_t label_dim, std::int64_t i, std::int64_t j,
                                     float nearer_than, float higher_than, float* distance,
                                     float* cosine) {
  Lanes d[kSets] = {};
  Lanes a[kSets] = {};
  Lanes x;
  for (std::int64_t l = 0; l < label_dim; ++l) {
    const float* row = ct + l * stride;
    const float* unit_row = unit + l * stride;
    for (std::int64_t s = 0; s < kSets; ++s) {
      load(row + j + s * kLanes, x);
      x -= row[i];
      d[s] += x * x;
      load(unit_row + j + s * kLanes, x);
      a[s] += x * unit_row[i];
    }
  }
  IntLanes better = {};
  for (std::int64_t s = 0; s < kSets; ++s) {
    better |= (d[s] < nearer_than) | (a[s] > higher_than);
    store(d[s], distance + s * kLanes);
    store(a[s], cosine + s * kLanes);
  }
  return any_lane(better);
}

struct Nearest {
  float distance[kNeighbors];
  std::int64_t index[kNeighbors];
  float cosine;
  std::int64_t angle;
};

PLIMSOLL_CLONES void search_row(const float* ct, const float* unit, std::int64_t stride,
                                std::int64_t rows, std::int64_t label_dim, std::int64_t i,
                                Nearest& best) {
  float distance[kColumnsAtOnce];
  float cosine[kColumnsAtOnce];
  for (std::int64_t j = 0; j < rows; j += kColumnsAtOnce) {
    const bool full = best.index[kNeighbors - 1] >= 0 && best.angle >= 0;
    const bool better =
        compare_columns(ct, unit, stride, label_dim, i, j, best.distance[kNeighbors - 1],
                        best.cosine, distance, cosine);
    if (full && !better) {  // Most blocks hold no better candidate.
      continue;
    }
    const std::int64_t count = std::min(kColumnsAtOnce, rows - j);
    for (std::int64_t k = 0; k < count; ++k) {
      if (j + k == i) {
        continue;
      }
      if (cosine[k] > best.cosine || best.angle < 0) {
        best.cosine = cosine[k];
        best.angle = j + k;
      }
      // Strictly nearer, or an empty place: an earlier index keeps its place on a tie.
      int place = kNeighbors;
      while (place > 0 && (best.index[place - 1] < 0 || distance[k] < best.distance[place - 1])) {
        --place;
      }
      if (place == kNeighbors) {
        continue;
      }
      for (int p = kNeighbors - 1; p > place; --p) {
        best.distance[p] = best.distance[p - 1];
        best.index[p] = best.index[p - 1];
      }
      best.distance[place] = distance[k];
      best.index[place] = j + k;
    }
  }
}

PLIMSOLL_INLINE float displacement_dot(const Displacements& in, std::int64_t i, std::int64_t j) {
  const float* ai = in.a + i * in.dim;
  const float* bi = in.b + i * in.dim;
  const float* aj = in.a + j * in.dim;
  const float* bj = in.b + j * in.dim;
  Lanes sums[2] = {};
  Lanes x;
  Lanes y;
  Lanes z;
  Lanes w;
  std::int64_t k = 0;
  for (; k + 2 * kLanes <= in.dim; k += 2 * kLanes) {
    for (std::int64_t s = 0; s < 2; ++s) {
      load(ai + k + s * kLanes, x);
      load(bi + k + s * kLanes, y);
      load(aj + k + s * kLanes, z);
      load(bj + k + s * kLanes, w);
      sums[s] += (x - y) * (z - w);
    }
  }
  float total = sum_lanes(sums[0] + sums[1]);
  for (; k < in.dim; ++k) {
    total += (ai[k] - bi[k]) * (aj[k] - bj[k]);
  }
  return total;
}

PLIMSOLL_CLONES float displacement_length(const Displacements& in, std::int64_t i) {
  return std::sqrt(displacement_dot(in, i, i));
}

PLIMSOLL_CLONES float displacement_cosine(const Displacements& in, std::int64_t i, std::int64_t j,
                                          const float* length) {
  const float both = length[i] * length[j];
  return displacement_dot(in, i, j) / (both > kNormFloor ? both : kNormFloor);
}

constexpr std::int64_t kColumnChunk = 64;

// Columns [begin, end) of the gradient: every element is summed in the order of the rows.
PLIMSOLL_CLONES void displace_columns_backward(const Displacements& in,
                                               const DisplacementGradients& g, std::int64_t begin,
                                               std::int64_t end) {
  for (std::int64_t i = 0; i < in.rows; ++i) {
    const std::int64_t row = i * in.dim;
    const float self = g.scratch[i];
    for (std::int64_t k = begin; k < end; ++k) {
      g.grad_a[row + k] = self * (in.a[row + k] - in.b[row + k]);
    }
  }
  for (int list = 0; list < 2; ++list) {
    if (in.pair[list] == nullptr) {
      continue;
    }
    const float* coefficient = g.scratch + (list + 1) * in.rows;
    for (std::int64_t i = 0; i < in.rows; ++i) {
      const std::int64_t x = i * in.dim;
      const std::int64_t y = in.pair[list][i] * in.dim;
      const float by = coefficient[i];
      for (std::int64_t k = begin; k < end; ++k) {
        const float dx = in.a[x + k] - in.b[x + k];
        const float dy = in.a[y + k] - in.b[y + k];
        g.grad_a[x + k] += by * dy;
        g.grad_a[y + k] += by * dx;
      }
    }
  }
}

}  // namespace

void unit_rows(const float* x, std::int64_t rows, std::int64_t dim, float* unit, float* length) {
  for_row_blocks(rows, dim, [&](std::int64_t, std::int64_t begin, std::int64_t end) {
    for (std::int64_t i = begin; i < end; ++i) {
      unit_row(x + i * dim, dim, unit + i * dim, length + i);
    }
  });
}

void unit_rows_backward(const float* grad_unit, const float* unit, const float* length,
                        std::int64_t rows, std::int64_t dim, float* grad_x) {
  for_row_blocks(rows, dim, [&](std::int64_t, std::int64_t begin, std::int64_t end) {
    for (std::int64_t i = begin; i < end; ++i) {
      unit_row_backward(grad_unit + i * dim, unit + i * dim, length[i], dim, grad_x + i * dim);
    }
  });
}

void polar_rows(const float* c, std::int64_t rows, std::int64_t label_dim, float* radius,
                float* angle) {
  for (std::int64_t i = 0; i < rows; ++i) {
    const float* x = c + i * label_dim;
    float rest = 0.0F;
    for (std::int64_t l = 1; l < label_dim; ++l) {
      rest += x[l] * x[l];
    }
    radius[i] = std::sqrt(x[0] * x[0] + rest);
    const float q = label_dim == 1 ? 0.0F : std::copysign(std::sqrt(rest), x[1]);
    angle[i] = std::atan2(label_dim == 2 ? x[1] : q, x[0]);
  }
}

void polar_rows_backward(const float* c, const float* grad_radius, const float* grad_angle,
                         std::int64_t rows, std::int64_t label_dim, float* grad_c) {
  for (std::int64_t i = 0; i < rows; ++i) {
    const float* x = c + i * label_dim;
    float* g = grad_c + i * label_dim;
    float rest = 0.0F;
    for (std::int64_t l = 1; l < label_dim; ++l) {
      rest += x[l] * x[l];
    }
    const float square = x[0] * x[0] + rest;
    if (!(square > 0.0F)) {
      std::fill(g, g + label_dim, 0.0F);
      continue;
    }
    const float by_radius = grad_radius[i] / std::sqrt(square);
    const float by_angle = grad_angle[i] / square;
    if (label_dim == 2) {
      g[0] = by_radius * x[0] - by_angle * x[1];
      g[1] = by_radius * x[1] + by_angle * x[0];
      continue;
    }
    const float q = label_dim == 1 ? 0.0F : std::copysign(std::sqrt(rest), x[1]);
    g[0] = by_radius * x[0] - by_angle * q;
    // dφ/dx_l = c₀/‖c‖² · dq/dx_l, and dq/dx_l = x_l / q (0 at q = 0).
    const float along = q == 0.0F ? 0.0F : by_angle * x[0] / q;
    for (std::int64_t l = 1; l < label_dim; ++l) {
      g[l] = (by_radius + along) * x[l];
    }
  }
}

void rotate_rows(const RotateRows& in, float* out, float* unit) {
  for_row_blocks(in.rows, in.dim, [&](std::int64_t, std::int64_t begin, std::int64_t end) {
    for (std::int64_t i = begin; i < end; ++i) {
      const std::int64_t at = i * in.dim;
      rotate_row(in.x + at, in.direction + at, in.dim, in.theta[i], in.scale[i], out + at,
                 unit + at);
    }
  });
}

void rotate_rows_backward(const RotateRows& in, const RotateGradients& grads) {
  for_row_blocks(in.rows, in.dim, [&](std::int64_t, std::int64_t begin, std::int64_t end) {
    for (std::int64_t i = begin; i < end; ++i) {
      const std::int64_t at = i * in.dim;
      const RotateRowGradient row{grads.grad_out + at,
                                  grads.grad_unit == nullptr ? nullptr : grads.grad_unit + at,
                                  grads.grad_x == nullptr ? nullptr : grads.grad_x + at,
                                  grads.grad_direction + at,
                                  grads.grad_theta + i,
                                  grads.grad_scale + i};
      rotate_row_backward(in.x + at, in.direction + at, in.dim, in.theta[i], in.scale[i], row);
    }
  });
}

void exponentiate(float* s, std::int64_t rows, float temperature, float* column_parts,
                  float* row_sum, float* column_sum, double* diagonal) {
  const float by = 1.0F / temperature;
  for_row_blocks(rows, rows, [&](std::int64_t block, std::int64_t begin, std::int64_t end) {
    float* columns = column_parts + block * rows;
    std::fill(columns, columns + rows, 0.0F);
    for (std::int64_t i = begin; i < end; ++i) {
      diagonal[i] = s[i * rows + i];
      row_sum[i] = exponentiate_row(s + i * rows, rows, by, columns);
    }
  });
  std::fill(column_sum, column_sum + rows, 0.0F);
  for (std::int64_t block = 0; block < row_blocks(rows); ++block) {
    add_to(column_parts + block * rows, rows, column_sum);
  }
}

void nce_gradient(float* e, std::int64_t rows, float temperature, const float* row_sum,
                  const float* column_sum) {
  const float by = 0.5F / (static_cast<float>(rows) * temperature);
  for_row_blocks(rows, rows, [&](std::int64_t, std::int64_t begin, std::int64_t end) {
    for (std::int64_t i = begin; i < end; ++i) {
      nce_gradient_row(e + i * rows, rows, by / row_sum[i], by, column_sum);
      e[i * rows + i] -= 2.0F * by;
    }
  });
}

void find_neighbors(const float* c, std::int64_t rows, std::int64_t label_dim, float* transposed,
                    std::int64_t* nearest, std::int64_t* best_angle, float* best_cosine) {
  const std::int64_t stride = padded_rows(rows);
  static_assert(kPairBlock % kColumnsAtOnce == 0);
  float* unit = transposed + label_dim * stride;
  std::fill(transposed, transposed + 2 * label_dim * stride, 0.0F);
  for (std::int64_t i = 0; i < rows; ++i) {
    const float by =
        1.0F / floored(std::sqrt(dot(c + i * label_dim, c + i * label_dim, label_dim)));
    for (std::int64_t l = 0; l < label_dim; ++l) {
      transposed[l * stride + i] = c[i * label_dim + l];
      unit[l * stride + i] = c[i * label_dim + l] * by;
    }
  }
  for_row_blocks(rows, rows * label_dim, [&](std::int64_t, std::int64_t begin, std::int64_t end) {
    for (std::int64_t i = begin; i < end; ++i) {
      Nearest best{};
      std::fill(best.distance, best.distance + kNeighbors, std::numeric_limits<float>::infinity());
      std::fill(best.index, best.index + kNeighbors, -1);
      best.cosine = -std::numeric_limits<float>::infinity();
      best.angle = -1;
      search_row(transposed, unit, stride, rows, label_dim, i, best);
      std::copy(best.index, best.index + kNeighbors, nearest + i * kNeighbors);
      best_angle[i] = best.angle;
      best_cosine[i] = best.cosine;
    }
  });
}

void displace_rows(const Displacements& in, float* length, float* cosine0, float* cosine1) {
  for_row_blocks(in.rows, in.dim, [&](std::int64_t, std::int64_t begin, std::int64_t end) {
    for (std::int64_t i = begin; i < end; ++i) {
      length[i] = displacement_length(in, i);
    }
  });
  float* cosine[2] = {cosine0, cosine1};
  for_row_blocks(in.rows, in.dim, [&](std::int64_t, std::int64_t begin, std::int64_t end) {
    for (int list = 0; list < 2; ++list) {
      for (std::int64_t i = begin; in.pair[list] != nullptr && i < end; ++i) {
        cosine[list][i] = displacement_cosine(in, i, in.pair[list][i], length);
      }
    }
  });
}

void displace_rows_backward(const Displacements& in, const DisplacementGradients& grads) {
  float* self = grads.scratch;
  for (std::int64_t i = 0; i < in.rows; ++i) {
    const bool moves = grads.grad_length != nullptr && grads.length[i] > 0.0F;
    self[i] = moves ? grads.grad_length[i] / grads.length[i] : 0.0F;
  }
  for (int list = 0; list < 2; ++list) {
    float* coefficient = grads.scratch + (list + 1) * in.rows;
    for (std::int64_t i = 0; in.pair[list] != nullptr && i < in.rows; ++i) {
      const std::int64_t j = in.pair[list][i];
      const float g = grads.grad_cosine[list][i];
      const float both = grads.length[i] * grads.length[j];
      coefficient[i] = g / floored(both);
      if (both > kNormFloor) {
        const float pull = g * grads.cosine[list][i];
        self[i] -= pull / (grads.length[i] * grads.length[i]);
        self[j] -= pull / (grads.length[j] * grads.length[j]);
      }
    }
  }
  const std::int64_t chunks = (in.dim + kColumnChunk - 1) / kColumnChunk;
  const std::int64_t grain =
      std::max<std::int64_t>(1, kGrainFloats / std::max<std::int64_t>(1, in.rows * kColumnChunk));
  at::parallel_for(0, chunks, grain, [&](std::int64_t begin, std::int64_t end) {
    for (std::int64_t chunk = begin; chunk < end; ++chunk) {
      displace_columns_backward(in, grads, chunk * kColumnChunk,
                                std::min(in.dim, (chunk + 1) * kColumnChunk));
    }
  });
}

}  // namespace plimsoll::kernels
