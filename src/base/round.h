// SPDX-License-Identifier: Apache-2.0
//
// Sizes in whole units.
//
// Threads: pure functions.   Memory: none.
#pragma once

#include <cstdint>

namespace plimsoll {

/// How many units hold `value`. Requires: value >= 0, unit > 0.
[[nodiscard]] constexpr std::int64_t divide_up(std::int64_t value, std::int64_t unit) noexcept {
  return (value + unit - 1) / unit;
}

/// The bytes, or whatever it counts, of those units.
[[nodiscard]] constexpr std::int64_t round_up(std::int64_t value, std::int64_t unit) noexcept {
  return divide_up(value, unit) * unit;
}

}  // namespace plimsoll
