// SPDX-License-Identifier: Apache-2.0
//
// Eight float lanes: loops over them give the same bits on every x86-64 instruction set.
//
// PLIMSOLL_CLONES compiles a function for AVX2 beside the plain one; the loader of the program
// picks. Lanes fix the order of sums, and the build never fuses a multiply with an add.
//
// Threads: pure functions.   Memory: registers.
#pragma once

#include <bit>
#include <cstdint>
#include <cstring>

#include "base/clones.h"

#define PLIMSOLL_INLINE inline __attribute__((always_inline))

namespace plimsoll {

inline constexpr std::int64_t kLanes = 8;
using Lanes = float __attribute__((vector_size(kLanes * sizeof(float)), aligned(4)));
using IntLanes = std::int32_t __attribute__((vector_size(kLanes * sizeof(float)), aligned(4)));

PLIMSOLL_INLINE void load(const float* from, Lanes& to) {
  std::memcpy(&to, from, sizeof(to));
}
PLIMSOLL_INLINE void store(const Lanes& from, float* to) {
  std::memcpy(to, &from, sizeof(from));
}

/// Whether any lane of a comparison's result is set.
PLIMSOLL_INLINE bool any_lane(const IntLanes& lanes) {
  std::uint64_t words[kLanes / 2];
  std::memcpy(words, &lanes, sizeof(words));
  return (words[0] | words[1] | words[2] | words[3]) != 0;
}

/// The lanes' sum in a fixed tree.
PLIMSOLL_INLINE float sum_lanes(const Lanes& lanes) {
  float part[kLanes];
  store(lanes, part);
  return ((part[0] + part[4]) + (part[2] + part[6])) + ((part[1] + part[5]) + (part[3] + part[7]));
}

/// The dot product: two sets of lanes, since an addition takes longer than a multiplication can be
/// started; then the tail in order.
PLIMSOLL_INLINE float dot(const float* x, const float* y, std::int64_t n) {
  Lanes even = {};
  Lanes odd = {};
  Lanes a;
  Lanes b;
  std::int64_t k = 0;
  for (; k + 2 * kLanes <= n; k += 2 * kLanes) {
    load(x + k, a);
    load(y + k, b);
    even += a * b;
    load(x + k + kLanes, a);
    load(y + k + kLanes, b);
    odd += a * b;
  }
  float total = sum_lanes(even + odd);
  for (; k < n; ++k) {
    total += x[k] * y[k];
  }
  return total;
}

/// exp for x <= 88, and exactly 0 below −87.3 (so −∞ gives 0). Relative error below 2e-7.
/// Source: range reduction by ln 2 in two parts (Cody and Waite, 1980) and a Taylor polynomial.
PLIMSOLL_INLINE void exp_lanes(Lanes& x) {
  const auto too_small = x < -87.3F;
  const Lanes inside = too_small ? Lanes{} - 87.3F : x;
  const Lanes shifted =
      inside * 1.44269504F + 12582912.0F;  // Rounds to an integer in the low bits.
  const Lanes n = shifted - 12582912.0F;
  const Lanes r = (inside - n * 0.693359375F) + n * 2.12194440e-4F;
  Lanes p = r * 1.98412698e-4F + 1.38888889e-3F;
  p = p * r + 8.33333333e-3F;
  p = p * r + 4.16666667e-2F;
  p = p * r + 1.66666667e-1F;
  p = p * r + 0.5F;
  p = p * r + 1.0F;
  p = p * r + 1.0F;
  IntLanes exponent;
  std::memcpy(&exponent, &shifted, sizeof(exponent));
  IntLanes bits;
  std::memcpy(&bits, &p, sizeof(bits));
  bits += (exponent - std::bit_cast<std::int32_t>(12582912.0F)) << 23;
  std::memcpy(&p, &bits, sizeof(p));
  x = too_small ? Lanes{} : p;
}

}  // namespace plimsoll
