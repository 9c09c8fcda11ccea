// SPDX-License-Identifier: Apache-2.0
//
// Rows before their first update: a pure function of (initialiser, id).
//
// Threads: pure functions.   Memory: none.
#pragma once

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <span>

#include "base/bfloat16.h"
#include "base/philox.h"
#include "plimsoll/embedding_store.h"
#include "store/embedding_format.h"

namespace plimsoll {

/// "zeros", "normal", "uniform".
[[nodiscard]] inline const char* init_name(RowInitKind kind) noexcept {
  return kind == RowInitKind::kZeros    ? "zeros"
         : kind == RowInitKind::kNormal ? "normal"
                                        : "uniform";
}

/// Writes some initial weights of `id`, `first` and on, before they are rounded to what a table
/// stores. Requires: first is a multiple of 4.
inline void init_floats(const RowInit& init, std::int64_t id, std::size_t first,
                        std::span<float> weights) noexcept {
  if (init.kind == RowInitKind::kZeros) {
    for (float& weight : weights) {
      weight = 0.0F;
    }
    return;
  }
  for (std::size_t at = 0; at < weights.size(); at += 4) {
    const PhiloxBlock words = philox(init.seed, static_cast<std::uint64_t>(id), (first + at) / 4);
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

/// Writes the initial weights of `id`, as a table shows them.
inline void init_weights(const TableShape& shape, const RowInit& init, std::int64_t id,
                         float* weights) noexcept {
  const std::span all(weights, static_cast<std::size_t>(shape.dim));
  init_floats(init, id, 0, all);
  if (shape.dtype == RowDType::kBFloat16) {
    for (float& weight : all) {
      weight = widen_bfloat16(nearest_bfloat16(weight));
    }
  }
}

/// Writes the record that a row begins with: no steps, slots of zeros, and the weights of `id`.
/// `key`: what the first field of its header holds in this layout, the id or the ordinal.
inline void init_record(const TableShape& shape, const RowInit& init, std::int64_t key,
                        std::int64_t id, std::byte* record) noexcept {
  const RowHeader header{.id = key, .sequence = 0, .crc = 0};
  std::memset(record, 0, static_cast<std::size_t>(shape.record_bytes));
  std::memcpy(record, &header, sizeof header);
  const auto dim = static_cast<std::size_t>(shape.dim);
  if (shape.dtype == RowDType::kFloat32) {
    init_floats(init, id, 0, {reinterpret_cast<float*>(record + kRowHeaderBytes), dim});
    return;
  }
  auto* const stored = reinterpret_cast<std::uint16_t*>(record + kRowHeaderBytes);
  std::array<float, 64> piece;
  for (std::size_t first = 0; first < dim; first += piece.size()) {
    const auto some = std::span(piece).first(std::min(piece.size(), dim - first));
    init_floats(init, id, first, some);
    for (std::size_t i = 0; i < some.size(); ++i) {
      stored[first + i] = nearest_bfloat16(some[i]);
    }
  }
}

}  // namespace plimsoll
