// SPDX-License-Identifier: Apache-2.0
//
// Graph attention, a node at a time, over lanes (kernels/lanes.h).
//
// Threads: see attention_loops.h.   Memory: a few cache lines of state per node.
#include "kernels/attention_loops.h"

#include <algorithm>
#include <limits>
#include <vector>

#include "base/check.h"
#include "kernels/lanes.h"
#include "kernels/shared_rows.h"

namespace plimsoll::kernels {
namespace {

constexpr float kSlope = 0.2F;  // Of LeakyReLU below 0.

// Where a node's rows and weights are: edge k of it has rows[index[k]] and weight[place(k)].
struct EdgeList {
  const std::int32_t* node;   // Whose row.
  const std::int32_t* place;  // Whose weight; null: k itself, from `weights` on.
  std::int64_t count;
};

// y[0 … 8N) = Σ_k weight_k · row_k, over a slice of the rows. Each lane's sum is in edge order.
template <int N>
PLIMSOLL_INLINE void weigh_slice(const EdgeList& edges, const float* weights, std::int64_t heads,
                                 const float* rows, std::int64_t row, Lanes* sum) {
  Lanes total[N] = {};
  for (std::int64_t k = 0; k < edges.count; ++k) {
    const std::int64_t place = edges.place == nullptr ? k : edges.place[k];
    const float weight = weights[place * heads];
    const float* from = rows + edges.node[k] * row;
    for (int n = 0; n < N; ++n) {
      Lanes value;
      load(from + n * kLanes, value);
      total[n] += value * weight;
    }
  }
  for (int n = 0; n < N; ++n) {
    sum[n] = total[n];
  }
}

constexpr int kSlice = 8;  // Lanes of one slice: half of AVX2's registers.

PLIMSOLL_INLINE void weigh_slices(int n, const EdgeList& edges, const float* weights,
                                  std::int64_t heads, const float* rows, std::int64_t row,
                                  Lanes* sum) {
  switch (n) {
    case 1:
      return weigh_slice<1>(edges, weights, heads, rows, row, sum);
    case 2:
      return weigh_slice<2>(edges, weights, heads, rows, row, sum);
    case 3:
      return weigh_slice<3>(edges, weights, heads, rows, row, sum);
    case 4:
      return weigh_slice<4>(edges, weights, heads, rows, row, sum);
    case 5:
      return weigh_slice<5>(edges, weights, heads, rows, row, sum);
    case 6:
      return weigh_slice<6>(edges, weights, heads, rows, row, sum);
    case 7:
      return weigh_slice<7>(edges, weights, heads, rows, row, sum);
    default:
      return weigh_slice<kSlice>(edges, weights, heads, rows, row, sum);
  }
}

// y[0 … out) = factor · Σ_k weight_k · row_k, added to y when `add`.
PLIMSOLL_INLINE void weigh_rows(const EdgeList& edges, const float* weights, std::int64_t heads,
                                const float* rows, std::int64_t row, std::int64_t out, float factor,
                                bool add, float* y) {
  std::int64_t c = 0;
  while (c + kLanes <= out) {
    const int n = static_cast<int>(std::min<std::int64_t>(kSlice, (out - c) / kLanes));
    Lanes sum[kSlice];
    weigh_slices(n, edges, weights, heads, rows + c, row, sum);
    for (int m = 0; m < n; ++m) {
      Lanes before = {};
      if (add) {
        load(y + c + m * kLanes, before);
      }
      store(before + sum[m] * factor, y + c + m * kLanes);
    }
    c += n * kLanes;
  }
  for (; c < out; ++c) {
    float sum = 0.0F;
    for (std::int64_t k = 0; k < edges.count; ++k) {
      const std::int64_t place = edges.place == nullptr ? k : edges.place[k];
      sum += weights[place * heads] * rows[edges.node[k] * row + c];
    }
    y[c] = (add ? y[c] : 0.0F) + sum * factor;
  }
}

// exp of x[0 … n) in place; every element's bits are its own.
PLIMSOLL_INLINE void exp_all(float* x, std::int64_t n) {
  std::int64_t k = 0;
  Lanes lanes;
  for (; k + kLanes <= n; k += kLanes) {
    load(x + k, lanes);
    exp_lanes(lanes);
    store(lanes, x + k);
  }
  if (k < n) {
    float part[kLanes] = {};
    std::copy(x + k, x + n, part);
    load(part, lanes);
    exp_lanes(lanes);
    store(lanes, part);
    std::copy(part, part + (n - k), x + k);
  }
}

// Softmax weights of one node's edges, [count, heads].
PLIMSOLL_INLINE void softmax_edges(const Attention& in, const EdgeList& edges,
                                   const float* score_target, float* w) {
  float top[kHeadsMax];
  float sum[kHeadsMax];
  std::fill(top, top + in.heads, -std::numeric_limits<float>::infinity());
  std::fill(sum, sum + in.heads, 0.0F);
  for (std::int64_t k = 0; k < edges.count; ++k) {
    const float* score_source = in.score_source + edges.node[k] * in.heads;
    for (std::int64_t h = 0; h < in.heads; ++h) {
      const float score = score_source[h] + score_target[h];
      const float bent = score > 0.0F ? score : score * kSlope;
      w[k * in.heads + h] = bent;
      top[h] = bent > top[h] ? bent : top[h];
    }
  }
  for (std::int64_t k = 0; k < edges.count; ++k) {
    for (std::int64_t h = 0; h < in.heads; ++h) {
      w[k * in.heads + h] -= top[h];
    }
  }
  exp_all(w, edges.count * in.heads);
  for (std::int64_t k = 0; k < edges.count; ++k) {
    for (std::int64_t h = 0; h < in.heads; ++h) {
      sum[h] += w[k * in.heads + h];
    }
  }
  for (std::int64_t h = 0; h < in.heads; ++h) {
    sum[h] = 1.0F / sum[h];  // At least one of its terms is 1.
  }
  for (std::int64_t k = 0; k < edges.count; ++k) {
    for (std::int64_t h = 0; h < in.heads; ++h) {
      w[k * in.heads + h] *= sum[h];
    }
  }
}

PLIMSOLL_INLINE EdgeList edges_into(const Edges& e, std::int64_t v) {
  return {e.in_source + e.in_ptr[v], nullptr, e.in_ptr[v + 1] - e.in_ptr[v]};
}

PLIMSOLL_INLINE EdgeList edges_out_of(const Edges& e, std::int64_t v) {
  return {e.out_target + e.out_ptr[v], e.out_edge + e.out_ptr[v], e.out_ptr[v + 1] - e.out_ptr[v]};
}

PLIMSOLL_CLONES void attend_nodes(const Attention& in, const float* bias, float* weights,
                                  float* scratch, float* result, std::int64_t begin,
                                  std::int64_t end) {
  const float factor = in.concat ? 1.0F : 1.0F / static_cast<float>(in.heads);
  for (std::int64_t v = begin; v < end; ++v) {
    const EdgeList edges = edges_into(in.edges, v);
    const std::int64_t first = in.edges.in_ptr[v] * in.heads;
    float* w = weights + first;
    softmax_edges(in, edges, in.score_target + v * in.heads, w);
    const float* used = w;
    if (in.keep != nullptr) {
      for (std::int64_t k = 0; k < edges.count * in.heads; ++k) {
        scratch[k] = w[k] * in.keep[first + k];
      }
      used = scratch;
    }
    float* y = result + v * in.width();
    for (std::int64_t h = 0; h < in.heads; ++h) {
      weigh_rows(edges, used + h, in.heads, in.h + h * in.out, in.row(), in.out, factor,
                 !in.concat && h > 0, in.concat ? y + h * in.out : y);
    }
    for (std::int64_t c = 0; c < in.width(); ++c) {
      y[c] += bias[c];
    }
  }
}

PLIMSOLL_CLONES void score_nodes(const Attention& in, const float* att_source,
                                 const float* att_target, float* score_source, float* score_target,
                                 std::int64_t begin, std::int64_t end) {
  for (std::int64_t v = begin; v < end; ++v) {
    for (std::int64_t h = 0; h < in.heads; ++h) {
      const float* row = in.h + v * in.row() + h * in.out;
      score_source[v * in.heads + h] = dot(row, att_source + h * in.out, in.out);
      score_target[v * in.heads + h] = dot(row, att_target + h * in.out, in.out);
    }
  }
}

// Gradients of scores, edge by edge into each node; also the weights as they were used.
PLIMSOLL_CLONES void score_gradients(const Attention& in, const AttentionGradients& out,
                                     float* grad_score, float* used, float* grad_target,
                                     std::int64_t begin, std::int64_t end) {
  const float factor = in.concat ? 1.0F : 1.0F / static_cast<float>(in.heads);
  const std::int64_t grad_step = in.concat ? in.out : 0;
  for (std::int64_t v = begin; v < end; ++v) {
    const EdgeList edges = edges_into(in.edges, v);
    const std::int64_t first = in.edges.in_ptr[v] * in.heads;
    const float* w = out.weights + first;
    const float* g = out.grad + v * in.width();
    float along[kHeadsMax];
    std::fill(along, along + in.heads, 0.0F);
    float* de = grad_score + first;
    for (std::int64_t k = 0; k < edges.count; ++k) {
      const float* row = in.h + edges.node[k] * in.row();
      for (std::int64_t h = 0; h < in.heads; ++h) {
        const std::int64_t at = k * in.heads + h;
        const float keep = (in.keep == nullptr ? 1.0F : in.keep[first + at]) * factor;
        const float da = dot(g + h * grad_step, row + h * in.out, in.out) * keep;
        de[at] = da;
        along[h] += da * w[at];
        used[first + at] = w[at] * keep;
      }
    }
    float* dt = grad_target + v * in.heads;
    std::fill(dt, dt + in.heads, 0.0F);
    const float* score_target = in.score_target + v * in.heads;
    for (std::int64_t k = 0; k < edges.count; ++k) {
      const float* score_source = in.score_source + edges.node[k] * in.heads;
      for (std::int64_t h = 0; h < in.heads; ++h) {
        const std::int64_t at = k * in.heads + h;
        const float slope = score_source[h] + score_target[h] > 0.0F ? 1.0F : kSlope;
        de[at] = w[at] * (de[at] - along[h]) * slope;
        dt[h] += de[at];
      }
    }
  }
}

// Gradients of rows h, edge by edge out of each node.
PLIMSOLL_CLONES void row_gradients(const Attention& in, const AttentionGradients& out,
                                   const float* grad_score, const float* used,
                                   const float* grad_target, float* grad_source, std::int64_t begin,
                                   std::int64_t end) {
  for (std::int64_t v = begin; v < end; ++v) {
    const EdgeList edges = edges_out_of(in.edges, v);
    float* ds = grad_source + v * in.heads;
    std::fill(ds, ds + in.heads, 0.0F);
    for (std::int64_t k = 0; k < edges.count; ++k) {
      const float* de = grad_score + edges.place[k] * in.heads;
      for (std::int64_t h = 0; h < in.heads; ++h) {
        ds[h] += de[h];
      }
    }
    for (std::int64_t h = 0; h < in.heads; ++h) {
      float* y = out.grad_h + v * in.row() + h * in.out;
      weigh_rows(edges, used + h, in.heads, out.grad + (in.concat ? h * in.out : 0), in.width(),
                 in.out, 1.0F, false, y);
      const float* to_source = out.att_source + h * in.out;
      const float* to_target = out.att_target + h * in.out;
      const float dt = grad_target[v * in.heads + h];
      for (std::int64_t c = 0; c < in.out; ++c) {
        y[c] += ds[h] * to_source[c] + dt * to_target[c];
      }
    }
  }
}

// One block's part of the parameters' gradients: att_source, att_target, bias, one after the other.
PLIMSOLL_CLONES void parameter_gradients(const Attention& in, const float* grad,
                                         const float* grad_source, const float* grad_target,
                                         float* part, std::int64_t begin, std::int64_t end) {
  std::fill(part, part + 2 * in.row() + in.width(), 0.0F);
  float* of_source = part;
  float* of_target = part + in.row();
  float* of_bias = part + 2 * in.row();
  for (std::int64_t v = begin; v < end; ++v) {
    for (std::int64_t h = 0; h < in.heads; ++h) {
      const float ds = grad_source[v * in.heads + h];
      const float dt = grad_target[v * in.heads + h];
      const float* row = in.h + v * in.row() + h * in.out;
      for (std::int64_t c = 0; c < in.out; ++c) {
        of_source[h * in.out + c] += ds * row[c];
        of_target[h * in.out + c] += dt * row[c];
      }
    }
    for (std::int64_t c = 0; c < in.width(); ++c) {
      of_bias[c] += grad[v * in.width() + c];
    }
  }
}

void add_blocks(const float* parts, std::int64_t blocks, std::int64_t step, std::int64_t from,
                std::int64_t count, float* sum) {
  std::fill(sum, sum + count, 0.0F);
  for (std::int64_t block = 0; block < blocks; ++block) {
    const float* part = parts + block * step + from;
    for (std::int64_t c = 0; c < count; ++c) {
      sum[c] += part[c];
    }
  }
}

}  // namespace

void node_scores(const Attention& in, const float* att_source, const float* att_target,
                 float* score_source, float* score_target) {
  share(in.edges.nodes, in.row(), [&](std::int64_t begin, std::int64_t end) {
    score_nodes(in, att_source, att_target, score_source, score_target, begin, end);
  });
}

void attend(const Attention& in, const float* bias, float* weights, float* result) {
  PLIMSOLL_CHECK(in.heads <= kHeadsMax, "a layer has at most 64 heads");
  share(in.edges.nodes, 4 * in.row(), [&](std::int64_t begin, std::int64_t end) {
    std::vector<float> scratch;
    if (in.keep != nullptr) {
      scratch.resize(static_cast<std::size_t>(in.edges.degree_max * in.heads));
    }
    attend_nodes(in, bias, weights, scratch.data(), result, begin, end);
  });
}

void attend_backward(const Attention& in, const AttentionGradients& out) {
  const std::int64_t nodes = in.edges.nodes;
  float* grad_score = out.edge_scratch;
  float* used = out.edge_scratch + in.edges.count * in.heads;
  float* grad_target = out.node_scratch;
  float* grad_source = out.node_scratch + nodes * in.heads;
  share(nodes, 4 * in.row(), [&](std::int64_t begin, std::int64_t end) {
    score_gradients(in, out, grad_score, used, grad_target, begin, end);
  });
  share(nodes, 4 * in.row(), [&](std::int64_t begin, std::int64_t end) {
    row_gradients(in, out, grad_score, used, grad_target, grad_source, begin, end);
  });
  const std::int64_t step = 2 * in.row() + in.width();
  const std::int64_t blocks = node_blocks(nodes);
  share(blocks, kNodeBlock * in.row(), [&](std::int64_t first, std::int64_t last) {
    for (std::int64_t block = first; block < last; ++block) {
      parameter_gradients(in, out.grad, grad_source, grad_target, out.block_scratch + block * step,
                          block * kNodeBlock, std::min(nodes, (block + 1) * kNodeBlock));
    }
  });
  add_blocks(out.block_scratch, blocks, step, 0, in.row(), out.grad_att_source);
  add_blocks(out.block_scratch, blocks, step, in.row(), in.row(), out.grad_att_target);
  add_blocks(out.block_scratch, blocks, step, 2 * in.row(), in.width(), out.grad_bias);
}

}  // namespace plimsoll::kernels
