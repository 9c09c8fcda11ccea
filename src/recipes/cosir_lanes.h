// SPDX-License-Identifier: Apache-2.0
//
// Sixteen float lanes: loops over them give the same bits on every x86-64 instruction set.
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

inline constexpr std::int64_t kLanes = 16;
using Lanes = float __attribute__((vector_size(kLanes * sizeof(float)), aligned(4)));
using IntLanes = std::int32_t __attribute__((vector_size(kLanes * sizeof(float)), aligned(4)));

PLIMSOLL_INLINE void load(const float* from, Lanes& to) {
  std::memcpy(&to, from, sizeof(to));
}
PLIMSOLL_INLINE void store(const Lanes& from, float* to) {
  std::memcpy(to, &from, sizeof(from));
}

/// The lanes' sum in a fixed tree.
PLIMSOLL_INLINE float sum_lanes(const Lanes& lanes) {
  float part[kLanes];
  store(lanes, part);
  for (std::int64_t width = kLanes / 2; width > 0; width /= 2) {
    for (std::int64_t l = 0; l < width; ++l) {
      part[l] += part[l + width];
    }
  }
  return part[0];
}

/// The dot product: lanes first, then the tail in order.
PLIMSOLL_INLINE float dot(const float* x, const float* y, std::int64_t n) {
  Lanes sum = {};
  Lanes a;
  Lanes b;
  std::int64_t k = 0;
  for (; k + kLanes <= n; k += kLanes) {
    load(x + k, a);
    load(y + k, b);
    sum += a * b;
  }
  float total = sum_lanes(sum);
  for (; k < n; ++k) {
    total += x[k] * y[k];
  }
  return total;
}

}  // namespace plimsoll::cosir
