// SPDX-License-Identifier: Apache-2.0
//
// Threads: see difficulties.h.   Memory: see difficulties.h.
#include "recipes/can_kd/difficulties.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdint>
#include <limits>

#include "base/check.h"
#include "recipes/can_kd/ordered_float.h"

namespace plimsoll::can_kd {
namespace {

constexpr int kDigitBits = 8;
constexpr std::size_t kDigits = std::size_t{1} << kDigitBits;

}  // namespace

float quantile_of(std::span<const float> values, double share) {
  PLIMSOLL_CHECK(share >= 0.0 && share <= 1.0, "a share is in [0, 1]");
  if (values.empty()) {
    return std::numeric_limits<float>::quiet_NaN();
  }
  // A millionth of a place: 0.95 × 20 is 19 although 0.95 is not exact.
  const double place = share * static_cast<double>(values.size() - 1);
  auto rank = static_cast<std::int64_t>(std::ceil(std::max(0.0, place - 1e-6)));
  // Digit by digit from the highest: the digits found so far narrow who is still counted.
  std::uint32_t found = 0;
  std::uint32_t mask = 0;
  for (int shift = 32 - kDigitBits; shift >= 0; shift -= kDigitBits) {
    std::array<std::int64_t, kDigits> counts{};
    for (const float value : values) {
      const std::uint32_t bits = ordered_bits(value, kNanIsHighest);
      if ((bits & mask) == found) {
        ++counts[bits >> shift & (kDigits - 1)];
      }
    }
    std::uint32_t digit = 0;
    while (rank >= counts[digit]) {
      rank -= counts[digit++];
    }
    found |= digit << shift;
    mask |= static_cast<std::uint32_t>(kDigits - 1) << shift;
  }
  return from_ordered_bits(found);
}

}  // namespace plimsoll::can_kd
