// SPDX-License-Identifier: Apache-2.0
//
// Goal: a segment that a commit or the working state refers to is never handed out, and what is
// handed out is the lowest there is, so that the file stays short. Method: random growth, clearing
// and commits against plain sets.
#include "store/timeline_space.h"

#include <array>
#include <cstdint>
#include <random>
#include <set>
#include <vector>

#include <gtest/gtest.h>

namespace plimsoll {
namespace {

TEST(TimelineSpaceTest, HandsOutTheLowestSegmentThatNothingRefersTo) {
  const TimelineShape shape{.rows = 4000,
                            .dim = 28,
                            .record_bytes = 128,
                            .bucket_rows = 500,
                            .buckets = 8,
                            .segment_bytes = 16 << 10};
  const auto sizes = TimelineSpace::sizes(shape);
  for (const std::uint64_t seed : {1U, 2U, 3U}) {
    SCOPED_TRACE(seed);
    auto governor = Governor::create({.memory_limit = "1GiB"}).or_throw();
    auto slab =
        Slab::create(governor, Tag::kOther, TimelineSpace::memory_bytes(shape, sizes) + 4096)
            .or_throw();
    TimelineSpace space(shape, sizes, slab);
    std::vector<std::set<std::uint32_t>> streams(static_cast<std::size_t>(2 * shape.buckets));
    std::array<std::set<std::uint32_t>, 2> commits;
    std::mt19937_64 random(seed);
    for (int round = 0; round < 20'000; ++round) {
      std::set<std::uint32_t> used(commits[0]);
      used.insert(commits[1].begin(), commits[1].end());
      for (const auto& stream : streams) {
        used.insert(stream.begin(), stream.end());
      }
      const auto place = static_cast<std::size_t>(random() % streams.size());
      auto& stream = space.stream(static_cast<int>(place / 8), static_cast<int>(place % 8));
      const auto roll = random() % 100;
      if (roll < 3) {
        const auto slot = random() % 2;
        space.committed(static_cast<int>(slot));
        commits[slot].clear();
        for (const auto& some : streams) {
          commits[slot].insert(some.begin(), some.end());
        }
      } else if (roll < 4) {
        const auto slot = random() % 2;
        space.forget(static_cast<int>(slot));
        commits[slot].clear();
      } else if (roll < 20 || space.wants_segments() || space.wants_nodes()) {
        space.clear(stream);
        streams[place].clear();
      } else {
        const std::uint32_t segments = stream.segments;
        ASSERT_TRUE(space.append(stream, 1 + static_cast<std::uint32_t>(random() % 120)));
        // What is new are the lowest numbers that were free, one after the other.
        std::uint32_t free = 0;
        for (std::uint32_t more = stream.segments - segments; more > 0; --more) {
          while (used.contains(free)) {
            ++free;
          }
          used.insert(free);
          streams[place].insert(free);
        }
        if (stream.segments > segments) {
          ASSERT_EQ(stream.last_segment, free) << "round " << round;
        }
      }
      std::int64_t in_use = 0;
      for (const auto& some : streams) {
        in_use += static_cast<std::int64_t>(some.size());
      }
      ASSERT_EQ(space.used_segments(), in_use);
    }
  }
}

}  // namespace
}  // namespace plimsoll
