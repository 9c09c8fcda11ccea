// SPDX-License-Identifier: Apache-2.0
//
// EpochOrder: where each row stands in an epoch of a table in sample order.
//
// The rows that the epoch began with stand as SampleOrder has them; rows that came later stand
// behind them, in the order in which they came. So others may come without moving any row.
//
//   positions: 0 … key.rows − 1 by SampleOrder | key.rows, key.rows + 1, … the newcomers
//
// Threads: immutable value.   Memory: a SampleOrder.
#pragma once

#include <cstdint>

#include "plimsoll/sample_order.h"

namespace plimsoll {

/// Whose order a set of buckets follows: SampleOrder(rows, seed, epoch), newcomers behind.
struct EpochKey {
  std::uint64_t seed{0};
  std::int64_t epoch{0};
  std::int64_t rows{0};
  friend bool operator==(const EpochKey&, const EpochKey&) = default;
};

class EpochOrder {
 public:
  explicit EpochOrder(const EpochKey& key) noexcept : order_(key.rows, key.seed, key.epoch) {}

  /// The ordinal of the row at a position, and the position of an ordinal. Requires: >= 0.
  [[nodiscard]] std::int64_t at(std::int64_t position) const noexcept {
    return position < order_.samples() ? order_.at(position) : position;
  }
  [[nodiscard]] std::int64_t position_of(std::int64_t ordinal) const noexcept {
    return ordinal < order_.samples() ? order_.position_of(ordinal) : ordinal;
  }

 private:
  SampleOrder order_;
};

}  // namespace plimsoll
