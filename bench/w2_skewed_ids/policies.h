// SPDX-License-Identifier: Apache-2.0
//
// Misses of three cache policies on a stream of pages: LRU, S3-FIFO and the offline optimum.
//
// Source: Yang et al., "FIFO queues are all you need for cache eviction" (SOSP 2023), section 4;
//         Belady, "A study of replacement algorithms" (IBM Systems Journal 5, 1966).
//
// Threads: pure functions.   Memory: a few words for each page and each use.
#pragma once

#include <cstdint>
#include <vector>

namespace w2 {

/// Uses in order; the first `warm` of them are not counted. `frames`: pages that fit.
struct Stream {
  std::vector<std::uint32_t> pages;
  std::size_t warm{0};
  std::uint32_t page_count{0};
  std::int64_t frames{0};
};

std::int64_t misses_of_lru(const Stream& stream);
std::int64_t misses_of_s3_fifo(const Stream& stream);
std::int64_t misses_at_best(const Stream& stream);

}  // namespace w2
