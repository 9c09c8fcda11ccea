// SPDX-License-Identifier: Apache-2.0
//
// ArenaStats: what the tensor arena holds. Apart from torch.h, so that reports need no LibTorch.
//
// Threads: a value.   Memory: none of its own.
#pragma once

#include <cstdint>

namespace plimsoll {

/// What the arena holds, in bytes. live + cached <= leased; the rest of leased is slack.
struct ArenaStats {
  std::int64_t live_bytes{0};         ///< In tensors, rounded to size classes or pages.
  std::int64_t live_peak_bytes{0};    ///< Highest live_bytes since reset_peak().
  std::int64_t cached_bytes{0};       ///< Free but resident.
  std::int64_t leased_bytes{0};       ///< live + cached + slack of partly used spans.
  std::int64_t leased_peak_bytes{0};  ///< Highest leased_bytes since reset_peak().
  std::int64_t allocations{0};        ///< Blocks handed out; passed-through ones not counted.
  std::int64_t foreign_frees{0};      ///< Blocks of other allocators, given back to their owner.
  std::int64_t purges{0};             ///< Times the whole cache was given back to the system.
  std::int64_t refusals{0};
};

}  // namespace plimsoll
