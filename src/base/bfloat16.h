// SPDX-License-Identifier: Apache-2.0
//
// bfloat16, as the bits it has: the upper half of a float32, and the ways to round to it.
//
// Source: stochastic rounding: Gupta et al., "Deep Learning with Limited Numerical Precision"
//         (ICML 2015), section 3.
//
// Threads: pure functions.   Memory: none.
#pragma once

#include <bit>
#include <cstdint>

namespace plimsoll {

/// The float32 of the same value; every bfloat16 has one.
[[nodiscard]] constexpr float widen_bfloat16(std::uint16_t value) noexcept {
  return std::bit_cast<float>(static_cast<std::uint32_t>(value) << 16);
}

/// `value` plus `extra` units of its 16 lowest bits, cut off behind its upper half. What is not
/// finite stays what it is: NaN a quiet one. A finite number may become infinite, as in any format.
[[nodiscard]] constexpr std::uint16_t cut_bfloat16(float value, std::uint32_t extra) noexcept {
  const auto bits = std::bit_cast<std::uint32_t>(value);
  const bool nan = (bits & 0x7FFFFFFFU) > 0x7F800000U;
  const std::uint32_t kept = nan ? bits | 0x00400000U : bits + extra;
  return static_cast<std::uint16_t>(kept >> 16);
}

/// Rounds to the nearest, and of two equally near to the even one (IEEE 754, as torch does).
[[nodiscard]] constexpr std::uint16_t nearest_bfloat16(float value) noexcept {
  return cut_bfloat16(value, 0x7FFFU + (std::bit_cast<std::uint32_t>(value) >> 16 & 1U));
}

/// Rounds up or down, each with the probability that makes the mean exact; what bfloat16 can hold
/// stays as it is.   `random`: uniform in [0, 65536).
[[nodiscard]] constexpr std::uint16_t stochastic_bfloat16(float value,
                                                          std::uint32_t random) noexcept {
  return cut_bfloat16(value, random);
}

}  // namespace plimsoll
