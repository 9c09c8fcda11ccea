// SPDX-License-Identifier: Apache-2.0
//
// EmbeddingOracle: what an embedding table should hold, as a plain map and plain loops.
//
// The arithmetic is written out as torch.optim's single-tensor code does it, one scalar operation
// at a time, independently of src/store/row_optimizer.cpp.
//
// Threads: single-owner.   Memory: unbounded; for tests.
#pragma once

#include <bit>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <map>
#include <span>
#include <vector>

#include "base/philox.h"
#include "plimsoll/embedding_store.h"

namespace plimsoll::test {

struct OracleRow {
  std::vector<float> weights;
  std::vector<float> slot1;
  std::vector<float> slot2;
  std::uint32_t sequence{0};
  friend bool operator==(const OracleRow&, const OracleRow&) = default;
};

/// The bfloat16 nearest to a finite value, by its distances: of two as near, that of even bits.
inline float plain_nearest_bfloat16(float value) {
  const std::uint32_t below = std::bit_cast<std::uint32_t>(value) & 0xFFFF0000U;
  const auto low = static_cast<double>(std::bit_cast<float>(below));
  const auto at = std::bit_cast<float>(below + 0x10000U);
  if (std::isinf(at)) {  // Beyond the largest: as if there were one more of its step.
    const double step = low - static_cast<double>(std::bit_cast<float>(below - 0x10000U));
    return std::abs(static_cast<double>(value) - low) < std::abs(step / 2)
               ? std::bit_cast<float>(below)
               : at;
  }
  const double down = std::abs(static_cast<double>(value) - low);
  const double up = std::abs(static_cast<double>(at) - static_cast<double>(value));
  const bool even = (below & 0x10000U) == 0;
  return down < up || (down == up && even) ? std::bit_cast<float>(below) : at;
}

/// Away from zero with the chance that the mean is exact: sixteen random bits of the counter
/// (id, sequence, weight), as src/store/row_bfloat16.h says which.
inline float plain_stochastic_bfloat16(std::uint64_t init_seed, std::int64_t id,
                                       std::uint32_t sequence, std::size_t weight, float value) {
  const PhiloxBlock words =
      philox(mix64(init_seed ^ 0x726F756E64696E67ULL), static_cast<std::uint64_t>(id),
             std::uint64_t{sequence} << 32 | (weight / 64 * 8 + weight % 8));
  const std::uint32_t word = words[weight % 64 / 16];
  const std::uint32_t random = weight % 16 / 8 == 0 ? word % 65536 : word / 65536;
  const auto bits = std::bit_cast<std::uint32_t>(value);
  const std::uint32_t below = bits / 65536 * 65536;
  return std::bit_cast<float>(below + (random + bits % 65536 >= 65536 ? 65536 : 0));
}

class EmbeddingOracle {
 public:
  EmbeddingOracle(std::int64_t dim, RowOptimizerOptions optimizer, RowInit init,
                  RowDType dtype = RowDType::kFloat32)
      : dim_(dim), optimizer_(optimizer), init_(init), dtype_(dtype) {}

  [[nodiscard]] const OracleRow& row(std::int64_t id) {
    auto [at, fresh] = rows_.try_emplace(id);
    if (fresh) {
      const auto dim = static_cast<std::size_t>(dim_);
      at->second = {initial(id), std::vector<float>(dim, 0.0F), std::vector<float>(dim, 0.0F), 0};
    }
    return at->second;
  }

  /// An id that comes back later begins anew.
  void erase(std::span<const std::int64_t> ids) {
    for (const std::int64_t id : ids) {
      rows_.erase(id);
    }
  }

  void update(std::span<const std::int64_t> ids, std::span<const float> values) {
    for (std::size_t i = 0; i < ids.size(); ++i) {
      OracleRow& r = mutable_row(ids[i]);
      for (std::size_t k = 0; k < r.weights.size(); ++k) {
        r.weights[k] = stored(values[i * r.weights.size() + k]);
        r.slot1[k] = 0.0F;
        r.slot2[k] = 0.0F;
      }
      r.sequence = 0;
    }
  }

  void apply(std::span<const std::int64_t> ids, std::span<const float> grads, float scale = 1.0F) {
    std::map<std::int64_t, std::vector<float>> sums;
    const auto dim = static_cast<std::size_t>(dim_);
    for (std::size_t i = 0; i < ids.size(); ++i) {
      auto [at, fresh] =
          sums.try_emplace(ids[i], grads.begin() + static_cast<std::ptrdiff_t>(i * dim),
                           grads.begin() + static_cast<std::ptrdiff_t>((i + 1) * dim));
      for (std::size_t k = 0; !fresh && k < dim; ++k) {
        at->second[k] = at->second[k] + grads[i * dim + k];
      }
    }
    for (const auto& [id, sum] : sums) {
      OracleRow& r = mutable_row(id);
      step(r, sum, static_cast<double>(scale));
      for (std::size_t k = 0; dtype_ == RowDType::kBFloat16 && k < dim; ++k) {
        r.weights[k] = plain_stochastic_bfloat16(init_.seed, id, r.sequence - 1, k, r.weights[k]);
      }
    }
  }

 private:
  OracleRow& mutable_row(std::int64_t id) {
    static_cast<void>(row(id));
    return rows_[id];
  }

  [[nodiscard]] float stored(float value) const {
    return dtype_ == RowDType::kBFloat16 ? plain_nearest_bfloat16(value) : value;
  }

  [[nodiscard]] std::vector<float> initial(std::int64_t id) const {
    std::vector<float> weights(static_cast<std::size_t>(dim_), 0.0F);
    for (std::size_t k = 0; k < weights.size() && init_.kind != RowInitKind::kZeros; ++k) {
      const PhiloxBlock words = philox(init_.seed, static_cast<std::uint64_t>(id), k / 4);
      const std::size_t lane = k % 4;
      const float unit = init_.kind == RowInitKind::kUniform
                             ? 2.0F * uniform01(words[lane]) - 1.0F
                             : normal2(words[lane / 2 * 2], words[lane / 2 * 2 + 1])[lane % 2];
      weights[k] = stored(unit * init_.scale);
    }
    return weights;
  }

  void step(OracleRow& r, const std::vector<float>& grads, double scale) const {
    const RowOptimizerOptions& o = optimizer_;
    const double rate = static_cast<double>(o.learning_rate) * scale;
    const bool fresh = o.kind == RowOptimizer::kAdamWFresh;
    const double t = fresh ? 1.0 : static_cast<double>(r.sequence) + 1.0;
    if (o.kind == RowOptimizer::kRowAdagrad) {
      r.slot1[0] = r.slot1[0] + mean_square(r, grads);
    }
    for (std::size_t k = 0; k < grads.size(); ++k) {
      volatile float w = r.weights[k];  // volatile: every operation rounds, none is reordered.
      volatile float g = grads[k];
      const bool decoupled = o.kind == RowOptimizer::kAdamW || fresh;
      if (!decoupled && o.weight_decay != 0.0F) {
        volatile float decay = o.weight_decay * w;
        g = g + decay;
      }
      if (o.kind == RowOptimizer::kSgd || o.kind == RowOptimizer::kSgdMomentum) {
        if (o.kind == RowOptimizer::kSgdMomentum) {
          volatile float kept = r.slot1[k] * o.momentum;
          g = kept + g;
          r.slot1[k] = g;
        }
        volatile float change = static_cast<float>(-rate) * g;
        r.weights[k] = w + change;
        continue;
      }
      if (o.kind == RowOptimizer::kRowAdagrad) {
        volatile float denominator = std::sqrt(r.slot1[0]) + o.epsilon;  // Raised before the loop.
        volatile float up = static_cast<float>(-rate) * g;
        volatile float change = up / denominator;
        r.weights[k] = w + change;
        continue;
      }
      if (o.kind == RowOptimizer::kAdagrad) {
        volatile float square = g * g;
        r.slot1[k] = r.slot1[k] + square;
        volatile float root = std::sqrt(r.slot1[k]);
        volatile float denominator = root + o.epsilon;
        volatile float up = static_cast<float>(-rate) * g;
        volatile float change = up / denominator;
        r.weights[k] = w + change;
        continue;
      }
      if (decoupled) {
        w = w * static_cast<float>(1.0 - rate * static_cast<double>(o.weight_decay));
      }
      const auto weight1 = static_cast<float>(1.0 - static_cast<double>(o.beta1));
      const auto weight2 = static_cast<float>(1.0 - static_cast<double>(o.beta2));
      volatile float m = fresh ? 0.0F : r.slot1[k];
      volatile float v = fresh ? 0.0F : r.slot2[k];
      volatile float gap = g - m;
      if (weight1 < 0.5F) {
        volatile float part = weight1 * gap;
        m = m + part;
      } else {
        volatile float part = gap * (1.0F - weight1);
        m = g - part;
      }
      volatile float kept = v * o.beta2;
      volatile float scaled = weight2 * g;
      volatile float square = scaled * g;
      v = kept + square;
      if (!fresh) {
        r.slot1[k] = m;
        r.slot2[k] = v;
      }
      const double bias1 = 1.0 - std::pow(static_cast<double>(o.beta1), t);
      const double bias2 = 1.0 - std::pow(static_cast<double>(o.beta2), t);
      volatile float root = std::sqrt(v);
      volatile float unbiased = root / static_cast<float>(std::sqrt(bias2));
      volatile float denominator = unbiased + o.epsilon;
      volatile float up = static_cast<float>(-(rate / bias1)) * m;
      volatile float change = up / denominator;
      r.weights[k] = w + change;
    }
    ++r.sequence;
  }

  // Eight sums, element i in sum i mod 8, then halves upon halves.
  [[nodiscard]] float mean_square(const OracleRow& r, const std::vector<float>& grads) const {
    std::vector<float> sums(8, 0.0F);
    for (std::size_t k = 0; k < grads.size(); ++k) {
      volatile float g = grads[k];
      if (optimizer_.weight_decay != 0.0F) {
        volatile float decay = optimizer_.weight_decay * r.weights[k];
        g = g + decay;
      }
      volatile float square = g * g;
      sums[k % 8] = sums[k % 8] + square;
    }
    for (; sums.size() > 1; sums.resize(sums.size() / 2)) {
      for (std::size_t k = 0; k < sums.size() / 2; ++k) {
        sums[k] = sums[k] + sums[k + sums.size() / 2];
      }
    }
    return sums[0] / static_cast<float>(dim_);
  }

  std::int64_t dim_;
  RowOptimizerOptions optimizer_;
  RowInit init_;
  RowDType dtype_;
  std::map<std::int64_t, OracleRow> rows_;
};

}  // namespace plimsoll::test
