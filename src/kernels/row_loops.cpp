// SPDX-License-Identifier: Apache-2.0
//
// Rows, element by element over lanes (kernels/lanes.h).
//
// Threads: see row_loops.h.   Memory: see row_loops.h.
#include "kernels/row_loops.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <vector>

#include "base/philox.h"
#include "kernels/lanes.h"
#include "kernels/shared_rows.h"

namespace plimsoll::kernels {
namespace {

using Doubles = double __attribute__((vector_size(kLanes * sizeof(double)), aligned(8)));

constexpr std::int64_t kGroup = 64;  // Elements that share eight blocks of random words.
constexpr std::int64_t kSumBlock = 4096;
constexpr float kLowest = -std::numeric_limits<float>::infinity();

// Elements begin … end of n, for each thread a run of whole groups.
template <class F>
void share_groups(std::int64_t n, const F& body) {
  share((n + kGroup - 1) / kGroup, kGroup, [&](std::int64_t first, std::int64_t last) {
    body(first * kGroup, std::min(n, last * kGroup));
  });
}

// As exp_lanes, but what is no number stays so.
PLIMSOLL_INLINE void exp_kept(Lanes& x) {
  const Lanes before = x;
  exp_lanes(x);
  x = before == before ? x : before;
}

PLIMSOLL_INLINE void sigmoid_lanes(Lanes& x) {
  const Lanes zero = {};
  Lanes e = x < zero ? x : -x;
  exp_kept(e);
  const Lanes by = 1.0F / (e + 1.0F);
  x = x < zero ? e * by : by;
}

PLIMSOLL_INLINE void tanh_lanes(Lanes& x) {
  x = x + x;
  sigmoid_lanes(x);
  x = x * 2.0F - 1.0F;
}

// log(1 + u) for 0 <= u <= 1, by the series of 2·artanh(u/(2 + u)).
PLIMSOLL_INLINE void log1p_lanes(Lanes& u) {
  const Lanes s = u / (u + 2.0F);
  const Lanes q = s * s;
  Lanes p = q * (1.0F / 15.0F) + 1.0F / 13.0F;
  p = p * q + 1.0F / 11.0F;
  p = p * q + 1.0F / 9.0F;
  p = p * q + 1.0F / 7.0F;
  p = p * q + 0.2F;
  p = p * q + 1.0F / 3.0F;
  p = p * q + 1.0F;
  u = s * p * 2.0F;
}

// Random words of the 64 elements from 64·group on: element 8q + l has half q % 2 of word[q /
// 2][l].
PLIMSOLL_INLINE void group_words(const Dropout& dropout, std::int64_t group,
                                 std::uint32_t word[4][kLanes]) {
  const std::uint64_t first = static_cast<std::uint64_t>(group) * kLanes;
  for (std::uint64_t l = 0; l < kLanes; ++l) {
    word[0][l] = static_cast<std::uint32_t>(first + l);
    word[1][l] = static_cast<std::uint32_t>((first + l) >> 32);
    word[2][l] = static_cast<std::uint32_t>(dropout.place);
    word[3][l] = static_cast<std::uint32_t>(dropout.place >> 32);
  }
  auto k0 = static_cast<std::uint32_t>(dropout.seed);
  auto k1 = static_cast<std::uint32_t>(dropout.seed >> 32);
  for (int round = 0; round < 10; ++round) {  // base/philox.h, eight blocks side by side.
    for (std::uint64_t l = 0; l < kLanes; ++l) {
      const std::uint64_t p0 = 0xD2511F53ULL * word[0][l];
      const std::uint64_t p1 = 0xCD9E8D57ULL * word[2][l];
      word[0][l] = static_cast<std::uint32_t>(p1 >> 32) ^ word[1][l] ^ k0;
      word[1][l] = static_cast<std::uint32_t>(p1);
      word[2][l] = static_cast<std::uint32_t>(p0 >> 32) ^ word[3][l] ^ k1;
      word[3][l] = static_cast<std::uint32_t>(p0);
    }
    k0 += 0x9E3779B9U;
    k1 += 0xBB67AE85U;
  }
}

// The factor of lanes q of a group: scale where kept, else 0.
PLIMSOLL_INLINE void keep_lanes(const std::uint32_t word[4][kLanes], int q, std::uint32_t threshold,
                                float scale, Lanes& factor) {
  float part[kLanes];
  const int shift = q % 2 * 16;
  for (std::int64_t l = 0; l < kLanes; ++l) {
    part[l] = (word[q / 2][l] >> shift & 0xFFFFU) >= threshold ? scale : 0.0F;
  }
  load(part, factor);
}

PLIMSOLL_CLONES void factors_of(const Dropout& dropout, std::int64_t begin, std::int64_t end,
                                float* keep) {
  const std::uint32_t threshold = dropout.threshold();
  const float scale = dropout.scale();
  for (std::int64_t at = begin; at < end; at += kGroup) {
    std::uint32_t word[4][kLanes];
    group_words(dropout, at / kGroup, word);
    for (int q = 0; q < kGroup / kLanes && at + q * kLanes < end; ++q) {
      Lanes factor;
      keep_lanes(word, q, threshold, scale, factor);
      store_some(factor, end - at - q * kLanes, keep + at + q * kLanes);
    }
  }
}

PLIMSOLL_INLINE void relu_lanes(Lanes& x) {
  x = x <= Lanes{} ? Lanes{} : x;  // What is no number stays so.
}

PLIMSOLL_CLONES void relu_of(const float* x, std::int64_t begin, std::int64_t end, float* y) {
  for (std::int64_t k = begin; k < end; k += kLanes) {
    Lanes value;
    load_some(x + k, end - k, 0.0F, value);
    relu_lanes(value);
    store_some(value, end - k, y + k);
  }
}

PLIMSOLL_CLONES void relu_dropout_of(const float* x, const Dropout& dropout, std::int64_t begin,
                                     std::int64_t end, float* y) {
  const std::uint32_t threshold = dropout.threshold();
  const float scale = dropout.scale();
  for (std::int64_t at = begin; at < end; at += kGroup) {
    std::uint32_t word[4][kLanes];
    group_words(dropout, at / kGroup, word);
    for (int q = 0; q < kGroup / kLanes && at + q * kLanes < end; ++q) {
      const std::int64_t k = at + q * kLanes;
      Lanes factor;
      Lanes value;
      keep_lanes(word, q, threshold, scale, factor);
      load_some(x + k, end - k, 0.0F, value);
      relu_lanes(value);
      store_some(value * factor, end - k, y + k);
    }
  }
}

PLIMSOLL_CLONES void relu_dropout_backward_of(const float* y, const float* grad, std::int64_t begin,
                                              std::int64_t end, float scale, float* grad_x) {
  for (std::int64_t k = begin; k < end; ++k) {
    grad_x[k] = y[k] > 0.0F ? grad[k] * scale : 0.0F;
  }
}

PLIMSOLL_CLONES void scale_rows(const float* x, std::int64_t columns, const float* by,
                                const float* plus, std::int64_t begin, std::int64_t end, float* y) {
  for (std::int64_t r = begin; r < end; ++r) {
    for (std::int64_t c = 0; c < columns; ++c) {
      const float value = x[r * columns + c] * by[c] + plus[c];
      y[r * columns + c] = value <= 0.0F ? 0.0F : value;
    }
  }
}

PLIMSOLL_CLONES void sum_block(const float* x, std::int64_t columns, std::int64_t begin,
                               std::int64_t end, const float* minus, float* sum) {
  std::fill(sum, sum + columns, 0.0F);
  for (std::int64_t r = begin; r < end; ++r) {
    const float* row = x + r * columns;
    if (minus == nullptr) {
      for (std::int64_t c = 0; c < columns; ++c) {
        sum[c] += row[c];
      }
    } else {
      for (std::int64_t c = 0; c < columns; ++c) {
        sum[c] += (row[c] - minus[c]) * (row[c] - minus[c]);
      }
    }
  }
}

// Sums of each column by blocks, then in double over the blocks: of x, or of (x − minus)².
std::vector<double> column_sums(const float* x, Extent shape, const float* minus) {
  const std::int64_t blocks = blocks_of(shape.rows, kRowBlock);
  std::vector<float> parts(static_cast<std::size_t>(blocks * shape.columns));
  share(blocks, kRowBlock * shape.columns, [&](std::int64_t first, std::int64_t last) {
    for (std::int64_t block = first; block < last; ++block) {
      sum_block(x, shape.columns, block * kRowBlock, std::min(shape.rows, (block + 1) * kRowBlock),
                minus, parts.data() + block * shape.columns);
    }
  });
  std::vector<double> sums(static_cast<std::size_t>(shape.columns), 0.0);
  for (std::int64_t block = 0; block < blocks; ++block) {
    for (std::size_t c = 0; c < sums.size(); ++c) {
      sums[c] += static_cast<double>(parts[static_cast<std::size_t>(block) * sums.size() + c]);
    }
  }
  return sums;
}

// One block's Σ g and Σ g·x̂ with g what reaches the norm; g is written to grad_x.
PLIMSOLL_CLONES void norm_block(const NormGradient& in, std::int64_t begin, std::int64_t end,
                                float* sum, float* sum_hat) {
  const std::int64_t columns = in.shape.columns;
  std::fill(sum, sum + columns, 0.0F);
  std::fill(sum_hat, sum_hat + columns, 0.0F);
  for (std::int64_t r = begin; r < end; ++r) {
    const std::int64_t at = r * columns;
    for (std::int64_t c = 0; c < columns; ++c) {
      const float g = in.y[at + c] > 0.0F ? in.grad[at + c] * in.scale : 0.0F;
      in.grad_x[at + c] = g;
      sum[c] += g;
      sum_hat[c] += g * ((in.x[at + c] - in.mean[c]) * in.inverse[c]);
    }
  }
}

PLIMSOLL_CLONES void norm_rows(const NormGradient& in, const float* mean_g, const float* mean_hat,
                               std::int64_t begin, std::int64_t end) {
  const std::int64_t columns = in.shape.columns;
  for (std::int64_t r = begin; r < end; ++r) {
    const std::int64_t at = r * columns;
    for (std::int64_t c = 0; c < columns; ++c) {
      const float hat = (in.x[at + c] - in.mean[c]) * in.inverse[c];
      in.grad_x[at + c] =
          in.weight[c] * in.inverse[c] * (in.grad_x[at + c] - mean_g[c] - hat * mean_hat[c]);
    }
  }
}

PLIMSOLL_CLONES void sigmoid_of(const float* x, std::int64_t begin, std::int64_t end, float* y) {
  for (std::int64_t k = begin; k < end; k += kLanes) {
    Lanes value;
    load_some(x + k, end - k, 0.0F, value);
    sigmoid_lanes(value);
    store_some(value, end - k, y + k);
  }
}

PLIMSOLL_CLONES void exponential_of(const float* x, std::int64_t begin, std::int64_t end,
                                    float* y) {
  for (std::int64_t k = begin; k < end; k += kLanes) {
    Lanes value;
    load_some(x + k, end - k, 0.0F, value);
    exp_kept(value);
    store_some(value, end - k, y + k);
  }
}

PLIMSOLL_INLINE double total(const Doubles& sum) {
  return ((sum[0] + sum[4]) + (sum[2] + sum[6])) + ((sum[1] + sum[5]) + (sum[3] + sum[7]));
}

PLIMSOLL_CLONES double squared_differences(const float* x, const float* y, std::int64_t n) {
  Doubles sum = {};
  for (std::int64_t k = 0; k < n; k += kLanes) {
    Lanes a;
    Lanes b;
    load_some(x + k, n - k, 0.0F, a);
    load_some(y + k, n - k, 0.0F, b);
    const Doubles apart = __builtin_convertvector(a - b, Doubles);
    sum += apart * apart;
  }
  return total(sum);
}

PLIMSOLL_CLONES double divergences(const float* mean, const float* log_variance, std::int64_t n) {
  Doubles sum = {};
  for (std::int64_t k = 0; k < n; k += kLanes) {
    Lanes m;
    Lanes v;
    load_some(mean + k, n - k, 0.0F, m);
    load_some(log_variance + k, n - k, 0.0F, v);
    Lanes e = v;
    exp_kept(e);
    sum += __builtin_convertvector((m * m + e - v - 1.0F) * 0.5F, Doubles);
  }
  return total(sum);
}

// Σ over blocks of kSumBlock elements, in their order.
template <class F>
double sum_blocks(std::int64_t n, const F& sum_of) {
  const std::int64_t blocks = blocks_of(n, kSumBlock);
  std::vector<double> parts(static_cast<std::size_t>(blocks));
  share(blocks, kSumBlock, [&](std::int64_t first, std::int64_t last) {
    for (std::int64_t block = first; block < last; ++block) {
      const std::int64_t begin = block * kSumBlock;
      parts[static_cast<std::size_t>(block)] = sum_of(begin, std::min(kSumBlock, n - begin));
    }
  });
  double sum = 0.0;
  for (const double part : parts) {
    sum += part;
  }
  return sum;
}

PLIMSOLL_CLONES void lstm_rows(float* gates, std::int64_t hidden, const float* before, float* cell,
                               float* result, std::int64_t begin, std::int64_t end) {
  for (std::int64_t r = begin; r < end; ++r) {
    float* gate = gates + r * 4 * hidden;
    for (std::int64_t k = 0; k < hidden; k += kLanes) {
      const std::int64_t left = hidden - k;
      Lanes part[4];
      for (int n = 0; n < 4; ++n) {
        load_some(gate + n * hidden + k, left, 0.0F, part[n]);
        if (n == 2) {
          tanh_lanes(part[n]);
        } else {
          sigmoid_lanes(part[n]);
        }
        store_some(part[n], left, gate + n * hidden + k);
      }
      Lanes state = part[0] * part[2];
      if (before != nullptr) {
        Lanes old;
        load_some(before + r * hidden + k, left, 0.0F, old);
        state += part[1] * old;
      }
      store_some(state, left, cell + r * hidden + k);
      tanh_lanes(state);
      store_some(part[3] * state, left, result + r * hidden + k);
    }
  }
}

PLIMSOLL_CLONES void lstm_rows_backward(const LstmGradient& in, std::int64_t begin,
                                        std::int64_t end) {
  const std::int64_t hidden = in.shape.columns;
  const auto some = [&](const float* from, std::int64_t at, std::int64_t left, Lanes& to)
      __attribute__((always_inline)) {
    if (from == nullptr) {
      to = Lanes{};
    } else {
      load_some(from + at, left, 0.0F, to);
    }
  };
  for (std::int64_t r = begin; r < end; ++r) {
    const float* gate = in.gates + r * 4 * hidden;
    float* grad = in.grad_gates + r * 4 * hidden;
    for (std::int64_t k = 0; k < hidden; k += kLanes) {
      const std::int64_t left = hidden - k;
      const std::int64_t at = r * hidden + k;
      Lanes i, f, g, o, bent, old, grad_cell, grad_hidden;
      load_some(gate + k, left, 0.0F, i);
      load_some(gate + hidden + k, left, 0.0F, f);
      load_some(gate + 2 * hidden + k, left, 0.0F, g);
      load_some(gate + 3 * hidden + k, left, 0.0F, o);
      load_some(in.cell + at, left, 0.0F, bent);
      tanh_lanes(bent);
      some(in.before, at, left, old);
      some(in.grad_cell, at, left, grad_cell);
      some(in.grad_hidden, at, left, grad_hidden);
      const Lanes dc = grad_cell + grad_hidden * o * (1.0F - bent * bent);
      store_some(dc * g * i * (1.0F - i), left, grad + k);
      store_some(dc * old * f * (1.0F - f), left, grad + hidden + k);
      store_some(dc * i * (1.0F - g * g), left, grad + 2 * hidden + k);
      store_some(grad_hidden * bent * o * (1.0F - o), left, grad + 3 * hidden + k);
      if (in.grad_before != nullptr) {
        store_some(dc * f, left, in.grad_before + at);
      }
    }
  }
}

PLIMSOLL_INLINE float largest(const float* x, std::int64_t n) {
  float top = kLowest;
  for (std::int64_t k = 0; k < n; ++k) {
    top = x[k] > top ? x[k] : top;
  }
  return top;
}

// x becomes e^(x − top), whose sum is returned; lanes summed in a fixed tree.
PLIMSOLL_INLINE float exp_row(float* x, std::int64_t n, float top) {
  Lanes sum = {};
  for (std::int64_t k = 0; k < n; k += kLanes) {
    Lanes value;
    load_some(x + k, n - k, kLowest, value);
    value -= top;
    exp_kept(value);
    store_some(value, n - k, x + k);
    sum += value;
  }
  return sum_lanes(sum);
}

PLIMSOLL_CLONES void cross_entropy_of(float* x, std::int64_t columns, const std::int64_t* target,
                                      float factor, float* loss, std::int64_t begin,
                                      std::int64_t end) {
  for (std::int64_t r = begin; r < end; ++r) {
    float* row = x + r * columns;
    const float wanted = row[target[r]];
    const float top = largest(row, columns);
    const float sum = exp_row(row, columns, top);
    loss[r] = std::log(sum) + (top - wanted);
    const float by = factor / sum;
    for (std::int64_t c = 0; c < columns; ++c) {
      row[c] *= by;
    }
    row[target[r]] -= factor;
  }
}

PLIMSOLL_CLONES void softplus_of(float* x, std::int64_t columns, float factor, float* loss,
                                 std::int64_t begin, std::int64_t end) {
  const Lanes zero = {};
  for (std::int64_t r = begin; r < end; ++r) {
    float* row = x + r * columns;
    Lanes sum = {};
    for (std::int64_t k = 0; k < columns; k += kLanes) {
      Lanes value;
      load_some(row + k, columns - k, kLowest, value);
      Lanes e = value < zero ? value : -value;
      exp_kept(e);
      Lanes tail = e;
      log1p_lanes(tail);
      sum += (value < zero ? zero : value) + tail;
      const Lanes by = factor / (e + 1.0F);
      store_some(value < zero ? e * by : by, columns - k, row + k);
    }
    loss[r] = sum_lanes(sum);
  }
}

PLIMSOLL_CLONES void mix_some(std::span<const float* const> x, std::int64_t columns,
                              const float* scores, float* weights, float* y, std::int64_t begin,
                              std::int64_t end) {
  const auto layers = static_cast<std::int64_t>(x.size());
  for (std::int64_t r = begin; r < end; ++r) {
    float* w = weights + r * layers;
    std::copy(scores + r * layers, scores + (r + 1) * layers, w);
    const float by = 1.0F / exp_row(w, layers, largest(w, layers));
    float* row = y + r * columns;
    std::fill(row, row + columns, 0.0F);
    for (std::int64_t l = 0; l < layers; ++l) {
      w[l] *= by;
      const float* from = x[static_cast<std::size_t>(l)] + r * columns;
      for (std::int64_t c = 0; c < columns; ++c) {
        row[c] += w[l] * from[c];
      }
    }
  }
}

PLIMSOLL_CLONES void mix_some_backward(std::span<const float* const> x, std::int64_t columns,
                                       const float* weights, const float* grad,
                                       std::span<float* const> grad_x, float* grad_scores,
                                       std::int64_t begin, std::int64_t end) {
  const auto layers = static_cast<std::int64_t>(x.size());
  for (std::int64_t r = begin; r < end; ++r) {
    const float* g = grad + r * columns;
    const float* w = weights + r * layers;
    float* ds = grad_scores + r * layers;
    float along = 0.0F;
    for (std::int64_t l = 0; l < layers; ++l) {
      ds[l] = dot(g, x[static_cast<std::size_t>(l)] + r * columns, columns);
      along += w[l] * ds[l];
      float* to = grad_x[static_cast<std::size_t>(l)] + r * columns;
      for (std::int64_t c = 0; c < columns; ++c) {
        to[c] = w[l] * g[c];
      }
    }
    for (std::int64_t l = 0; l < layers; ++l) {
      ds[l] = w[l] * (ds[l] - along);
    }
  }
}

}  // namespace

std::uint32_t Dropout::threshold() const noexcept {
  return static_cast<std::uint32_t>(std::clamp(std::lround(rate * 65536.0), 0L, 65535L));
}

float Dropout::scale() const noexcept {
  return static_cast<float>(65536.0 / (65536.0 - static_cast<double>(threshold())));
}

void sum_columns(const float* x, Extent shape, float* sum) {
  const auto sums = column_sums(x, shape, nullptr);
  std::transform(sums.begin(), sums.end(), sum, [](double s) { return static_cast<float>(s); });
}

double sum_of_squared_differences(const float* x, const float* y, std::int64_t n) {
  return sum_blocks(n, [&](std::int64_t begin, std::int64_t count) {
    return squared_differences(x + begin, y + begin, count);
  });
}

double sum_of_divergences(const float* mean, const float* log_variance, std::int64_t n) {
  return sum_blocks(n, [&](std::int64_t begin, std::int64_t count) {
    return divergences(mean + begin, log_variance + begin, count);
  });
}

void dropout_factors(const Dropout& dropout, std::int64_t n, float* keep) {
  share_groups(
      n, [&](std::int64_t begin, std::int64_t end) { factors_of(dropout, begin, end, keep); });
}

void relu_dropout(const float* x, std::int64_t n, const Dropout& dropout, float* y) {
  share_groups(n, [&](std::int64_t begin, std::int64_t end) {
    if (dropout.rate > 0.0) {
      relu_dropout_of(x, dropout, begin, end, y);
    } else {
      relu_of(x, begin, end, y);
    }
  });
}

void relu_dropout_backward(const float* y, const float* grad, std::int64_t n, float scale,
                           float* grad_x) {
  share_groups(n, [&](std::int64_t begin, std::int64_t end) {
    relu_dropout_backward_of(y, grad, begin, end, scale, grad_x);
  });
}

void column_moments(const float* x, Extent shape, float* mean, float* variance) {
  const auto rows = static_cast<double>(shape.rows);
  const auto sums = column_sums(x, shape, nullptr);
  std::transform(sums.begin(), sums.end(), mean,
                 [rows](double s) { return static_cast<float>(s / rows); });
  const auto squares = column_sums(x, shape, mean);
  std::transform(squares.begin(), squares.end(), variance,
                 [rows](double s) { return static_cast<float>(s / rows); });
}

void scale_relu_dropout(const float* x, Extent shape, const float* by, const float* plus,
                        const Dropout& dropout, float* y) {
  share(shape.rows, shape.columns, [&](std::int64_t begin, std::int64_t end) {
    scale_rows(x, shape.columns, by, plus, begin, end, y);
  });
  if (dropout.rate > 0.0) {
    share_groups(shape.size(), [&](std::int64_t begin, std::int64_t end) {
      relu_dropout_of(y, dropout, begin, end, y);
    });
  }
}

void norm_relu_dropout_backward(const NormGradient& in) {
  const std::int64_t columns = in.shape.columns;
  const std::int64_t blocks = blocks_of(in.shape.rows, kRowBlock);
  std::vector<float> parts(static_cast<std::size_t>(blocks * 2 * columns));
  share(blocks, kRowBlock * columns, [&](std::int64_t first, std::int64_t last) {
    for (std::int64_t block = first; block < last; ++block) {
      float* sum = parts.data() + block * 2 * columns;
      norm_block(in, block * kRowBlock, std::min(in.shape.rows, (block + 1) * kRowBlock), sum,
                 sum + columns);
    }
  });
  std::vector<float> means(static_cast<std::size_t>(2 * columns), 0.0F);
  for (std::int64_t c = 0; c < columns; ++c) {
    double sum = 0.0;
    double sum_hat = 0.0;
    for (std::int64_t block = 0; block < blocks; ++block) {
      sum += static_cast<double>(parts[static_cast<std::size_t>(block * 2 * columns + c)]);
      sum_hat +=
          static_cast<double>(parts[static_cast<std::size_t>((block * 2 + 1) * columns + c)]);
    }
    in.grad_bias[c] = static_cast<float>(sum);
    in.grad_weight[c] = static_cast<float>(sum_hat);
    if (in.batch) {
      const auto rows = static_cast<double>(in.shape.rows);
      means[static_cast<std::size_t>(c)] = static_cast<float>(sum / rows);
      means[static_cast<std::size_t>(columns + c)] = static_cast<float>(sum_hat / rows);
    }
  }
  share(in.shape.rows, columns, [&](std::int64_t begin, std::int64_t end) {
    norm_rows(in, means.data(), means.data() + columns, begin, end);
  });
}

void sigmoid(const float* x, std::int64_t n, float* y) {
  share_groups(n, [&](std::int64_t begin, std::int64_t end) { sigmoid_of(x, begin, end, y); });
}

void exponential(const float* x, std::int64_t n, float* y) {
  share_groups(n, [&](std::int64_t begin, std::int64_t end) { exponential_of(x, begin, end, y); });
}

void normals(std::uint64_t seed, std::uint64_t place, std::int64_t n, float* y) {
  share_groups(n, [&](std::int64_t begin, std::int64_t end) {
    for (std::int64_t at = begin; at < end; at += 4) {
      const auto word = philox(seed, place, static_cast<std::uint64_t>(at / 4));
      const auto first = normal2(word[0], word[1]);
      const auto second = normal2(word[2], word[3]);
      const float four[4] = {first[0], first[1], second[0], second[1]};
      std::copy(four, four + std::min<std::int64_t>(4, end - at), y + at);
    }
  });
}

void mean_of_runs(const float* x, std::int64_t columns, std::span<const std::int32_t> ptr,
                  float* y) {
  const auto runs = static_cast<std::int64_t>(ptr.size()) - 1;
  share(runs, 32 * columns, [&](std::int64_t begin, std::int64_t end) {
    for (std::int64_t g = begin; g < end; ++g) {
      const std::int64_t first = ptr[static_cast<std::size_t>(g)];
      const std::int64_t last = ptr[static_cast<std::size_t>(g) + 1];
      float* row = y + g * columns;
      sum_block(x, columns, first, last, nullptr, row);
      const float by = 1.0F / static_cast<float>(std::max<std::int64_t>(1, last - first));
      for (std::int64_t c = 0; c < columns; ++c) {
        row[c] *= by;
      }
    }
  });
}

void mean_of_runs_backward(const float* grad, std::int64_t columns,
                           std::span<const std::int32_t> ptr, float* grad_x) {
  const auto runs = static_cast<std::int64_t>(ptr.size()) - 1;
  share(runs, 32 * columns, [&](std::int64_t begin, std::int64_t end) {
    for (std::int64_t g = begin; g < end; ++g) {
      const std::int64_t first = ptr[static_cast<std::size_t>(g)];
      const std::int64_t last = ptr[static_cast<std::size_t>(g) + 1];
      const float by = 1.0F / static_cast<float>(std::max<std::int64_t>(1, last - first));
      for (std::int64_t v = first; v < last; ++v) {
        for (std::int64_t c = 0; c < columns; ++c) {
          grad_x[v * columns + c] = grad[g * columns + c] * by;
        }
      }
    }
  });
}

void lstm_cell(float* gates, Extent hidden_shape, const float* before, float* cell, float* hidden) {
  share(hidden_shape.rows, 32 * hidden_shape.columns, [&](std::int64_t begin, std::int64_t end) {
    lstm_rows(gates, hidden_shape.columns, before, cell, hidden, begin, end);
  });
}

void lstm_cell_backward(const LstmGradient& in) {
  share(in.shape.rows, 16 * in.shape.columns,
        [&](std::int64_t begin, std::int64_t end) { lstm_rows_backward(in, begin, end); });
}

void cross_entropy_rows(float* x, Extent shape, const std::int64_t* target, float factor,
                        float* loss) {
  share(shape.rows, 4 * shape.columns, [&](std::int64_t begin, std::int64_t end) {
    cross_entropy_of(x, shape.columns, target, factor, loss, begin, end);
  });
}

void softplus_rows(float* x, Extent shape, float factor, float* loss) {
  share(shape.rows, 4 * shape.columns, [&](std::int64_t begin, std::int64_t end) {
    softplus_of(x, shape.columns, factor, loss, begin, end);
  });
}

void mix_rows(std::span<const float* const> x, Extent shape, const float* scores, float* weights,
              float* y) {
  const auto floats = shape.columns * static_cast<std::int64_t>(x.size());
  share(shape.rows, floats, [&](std::int64_t begin, std::int64_t end) {
    mix_some(x, shape.columns, scores, weights, y, begin, end);
  });
}

void mix_rows_backward(std::span<const float* const> x, Extent shape, const float* weights,
                       const float* grad, std::span<float* const> grad_x, float* grad_scores) {
  const auto floats = shape.columns * static_cast<std::int64_t>(x.size());
  share(shape.rows, floats, [&](std::int64_t begin, std::int64_t end) {
    mix_some_backward(x, shape.columns, weights, grad, grad_x, grad_scores, begin, end);
  });
}

}  // namespace plimsoll::kernels
