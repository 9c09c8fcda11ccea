// SPDX-License-Identifier: Apache-2.0
//
// Floats as unsigned integers of the same order, for sorting and selecting by digits.
//
// Threads: pure functions.   Memory: none.
#pragma once

#include <bit>
#include <cmath>
#include <cstdint>
#include <limits>

namespace plimsoll::can_kd {

inline constexpr std::uint32_t kSignBit = 0x80000000U;

inline constexpr std::uint32_t kNanIsHighest = 0xFFFFFFFFU;  // For `nan` below.

/// Rises with the value, from −infinity to +infinity; −0 is 0; a NaN is `nan` (0 is below all
/// others, 0xFFFFFFFF above).
[[nodiscard]] inline std::uint32_t ordered_bits(float value, std::uint32_t nan) noexcept {
  if (std::isnan(value)) {
    return nan;
  }
  const auto bits = std::bit_cast<std::uint32_t>(value == 0.0F ? 0.0F : value);
  return (bits & kSignBit) != 0 ? ~bits : bits | kSignBit;
}

/// The value again; NaN for what no number has.
[[nodiscard]] inline float from_ordered_bits(std::uint32_t ordered) noexcept {
  if (ordered == 0 || ordered == 0xFFFFFFFFU) {
    return std::numeric_limits<float>::quiet_NaN();
  }
  return std::bit_cast<float>((ordered & kSignBit) != 0 ? ordered & ~kSignBit : ~ordered);
}

}  // namespace plimsoll::can_kd
