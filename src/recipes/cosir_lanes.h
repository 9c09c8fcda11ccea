// SPDX-License-Identifier: Apache-2.0
//
// Eight float lanes: loops over them give the same bits on every x86-64 instruction set.
//
// PLIMSOLL_CLONES compiles a function for AVX2 beside the plain one; the loader of the program
// picks. Lanes fix the order of sums, and the build never fuses a multiply with an add.
//
// Threads: pure functions.   Memory: registers.
#pragma once

#include <cstdint>
#include <cstring>

#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__) && \
    !defined(__SANITIZE_ADDRESS__) && !defined(__SANITIZE_THREAD__)
#define PLIMSOLL_CLONES __attribute__((target_clones("avx2", "default")))
#else
#define PLIMSOLL_CLONES
#endif
#define PLIMSOLL_INLINE inline __attribute__((always_inline))

namespace plimsoll::cosir {

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

}  // namespace plimsoll::cosir
