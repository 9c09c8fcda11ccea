// SPDX-License-Identifier: Apache-2.0
//
// Rows before their first update: a pure function of (initialiser, id).
//
// Threads: pure functions.   Memory: none.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <span>

#include "base/philox.h"
#include "plimsoll/embedding_store.h"

namespace plimsoll {

/// "zeros", "normal", "uniform".
[[nodiscard]] inline const char* init_name(RowInitKind kind) noexcept {
  return kind == RowInitKind::kZeros    ? "zeros"
         : kind == RowInitKind::kNormal ? "normal"
                                        : "uniform";
}

/// Writes the initial weights of `id`.
inline void init_row(const RowInit& init, std::int64_t id, std::span<float> weights) noexcept {
  if (init.kind == RowInitKind::kZeros) {
    for (float& weight : weights) {
      weight = 0.0F;
    }
    return;
  }
  for (std::size_t at = 0; at < weights.size(); at += 4) {
    const PhiloxBlock words = philox(init.seed, static_cast<std::uint64_t>(id), at / 4);
    std::array<float, 4> four{};
    if (init.kind == RowInitKind::kNormal) {
      const auto low = normal2(words[0], words[1]);
      const auto high = normal2(words[2], words[3]);
      four = {low[0], low[1], high[0], high[1]};
    } else {
      for (std::size_t i = 0; i < 4; ++i) {
        four[i] = 2.0F * uniform01(words[i]) - 1.0F;
      }
    }
    for (std::size_t i = 0; i < 4 && at + i < weights.size(); ++i) {
      weights[at + i] = four[i] * init.scale;
    }
  }
}

}  // namespace plimsoll
