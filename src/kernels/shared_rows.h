// SPDX-License-Identifier: Apache-2.0
//
// What the loops over rows have alike: sharing them among threads, and the last lanes of a row.
//
// For sources of this folder alone. Reading order: kernels/lanes.h, this file.
//
// Threads: work is shared among torch's.   Memory: registers.
#pragma once

#include <ATen/Parallel.h>

#include <algorithm>
#include <cstdint>

#include "kernels/lanes.h"

namespace plimsoll::kernels {

/// Floats touched below which waking another thread costs more than it saves.
inline constexpr std::int64_t kGrainFloats = 32'768;

/// body(begin, end) over parts of 0 … count. What it computes must not depend on the parts.
template <class F>
void share(std::int64_t count, std::int64_t floats_each, const F& body) {
  const std::int64_t grain =
      std::max<std::int64_t>(1, kGrainFloats / std::max<std::int64_t>(1, floats_each));
  at::parallel_for(0, count, grain, body);
}

[[nodiscard]] constexpr std::int64_t blocks_of(std::int64_t n, std::int64_t block) {
  return (n + block - 1) / block;
}

/// Lanes at the end of a row: what is missing is `pad`.
PLIMSOLL_INLINE void load_some(const float* from, std::int64_t n, float pad, Lanes& to) {
  if (n >= kLanes) {
    load(from, to);
    return;
  }
  float part[kLanes];
  for (std::int64_t k = 0; k < kLanes; ++k) {
    part[k] = k < n ? from[k] : pad;
  }
  load(part, to);
}
PLIMSOLL_INLINE void store_some(const Lanes& from, std::int64_t n, float* to) {
  if (n >= kLanes) {
    store(from, to);
    return;
  }
  float part[kLanes];
  store(from, part);
  std::copy(part, part + n, to);
}

}  // namespace plimsoll::kernels
