// SPDX-License-Identifier: Apache-2.0
//
// Goal: a block that a commit or the working state refers to is never handed out, and the blocks
// never run out. Method: random writes and commits against plain sets.
#include "store/embedding_block_map.h"

#include <algorithm>
#include <memory>
#include <random>
#include <set>
#include <vector>

#include <gtest/gtest.h>

namespace plimsoll {
namespace {

// A map, and the governor and the slab it takes its memory from.
struct MapInSlab {
  MapInSlab(std::int64_t pages, std::int64_t spare)
      : slab(Slab::create(governor, Tag::kOther, BlockMap::memory_bytes(pages, spare) + 4096)
                 .or_throw()),
        map(std::make_unique<BlockMap>(pages, spare, slab)) {}
  Governor governor = Governor::create({.memory_limit = "1GiB"}).or_throw();
  Slab slab;
  std::unique_ptr<BlockMap> map;
};

TEST(BlockMapTest, NeverHandsOutABlockThatIsReferredTo) {
  for (const std::uint64_t seed : {1U, 2U, 3U}) {
    SCOPED_TRACE(seed);
    constexpr std::int64_t kPages = 150;
    constexpr std::int64_t kSpare = 16;
    const MapInSlab made(kPages, kSpare);
    BlockMap& map = *made.map;
    std::vector<std::uint32_t> working(kPages, 0);
    std::vector<std::vector<std::uint32_t>> commits(2, working);
    std::mt19937_64 random(seed);
    for (int round = 0; round < 3000; ++round) {
      if (random() % 20 == 0) {
        const auto slot = random() % 2;
        map.committed(static_cast<int>(slot));
        commits[slot] = working;
      } else if (random() % 200 == 0) {
        const auto slot = random() % 2;
        map.forget(static_cast<int>(slot));
        commits[slot].assign(kPages, 0);
      }
      std::set<std::uint32_t> used(working.begin(), working.end());
      for (const auto& commit : commits) {
        used.insert(commit.begin(), commit.end());
      }
      const auto run = map.allocate(1 + static_cast<std::int64_t>(random() % 8));
      ASSERT_GE(run.count, 1);
      for (std::int64_t i = 0; i < run.count; ++i) {
        const auto block = run.first + static_cast<std::uint32_t>(i);
        ASSERT_GE(block, 1U);
        ASSERT_LE(block, map.blocks());
        ASSERT_FALSE(used.contains(block)) << "block " << block << " in round " << round;
        if (random() % 10 == 0) {
          map.release(block);  // The write failed.
          continue;
        }
        const auto page = static_cast<std::int64_t>(random() % kPages);
        map.set(page, block, static_cast<std::uint32_t>(round));
        working[static_cast<std::size_t>(page)] = block;
        ASSERT_EQ(map.entry(page).block, block);
      }
      ASSERT_EQ(map.used_blocks(), kPages - std::count(working.begin(), working.end(), 0U));
    }
  }
}

// Two files that are only ever given the stale units, as a commit does.
TEST(BlockMapTest, StaleUnitsAreAllThatACommitHasToWrite) {
  const std::uint64_t seed = 7;
  SCOPED_TRACE(seed);
  constexpr std::int64_t kPages = 100 * 512 + 77;
  constexpr std::int64_t kSpare = 16;
  const MapInSlab made(kPages, kSpare);
  BlockMap& map = *made.map;
  const auto bytes = map.bytes();
  std::vector<std::vector<std::byte>> files(2, std::vector<std::byte>(bytes.size()));
  std::mt19937_64 random(seed);
  std::int64_t written = 0;
  for (int commit = 0; commit < 60; ++commit) {
    const int slot = commit % 2;
    for (std::uint64_t i = random() % 5; i > 0; --i) {
      const auto run = map.allocate(1);
      map.set(static_cast<std::int64_t>(random() % kPages), run.first,
              static_cast<std::uint32_t>(random()));
    }
    auto& file = files[static_cast<std::size_t>(slot)];
    for (auto units = map.stale_units(slot, 0); units.count > 0;
         units = map.stale_units(slot, units.first + units.count)) {
      const auto begin = units.first * kBlockUnit;
      std::copy_n(bytes.begin() + begin, units.count * kBlockUnit, file.begin() + begin);
      written += commit < 2 ? 0 : units.count;
    }
    ASSERT_TRUE(std::equal(file.begin(), file.end(), bytes.begin())) << "commit " << commit;
    ASSERT_EQ(map.root(slot), chain_root(0, file)) << "commit " << commit;
    map.committed(slot);
    map.mark_same(slot);
    EXPECT_EQ(map.stale_units(slot, 0).count, 0);
  }
  EXPECT_LT(written, 58 * 30) << "a commit of four pages wrote most of the page table";
}

// What is pinned is handed out only once nothing else is left, and then all of it at once.
TEST(BlockMapTest, KeepsPinnedBlocksUntilNoOthersAreLeft) {
  for (const std::uint64_t seed : {4U, 5U, 6U}) {
    SCOPED_TRACE(seed);
    constexpr std::int64_t kPages = 150;
    constexpr std::int64_t kSpare = 16;
    const MapInSlab made(kPages, kSpare);
    BlockMap& map = *made.map;
    std::vector<std::uint32_t> working(kPages, 0);
    std::vector<std::vector<std::uint32_t>> commits(2, working);
    std::set<std::uint32_t> pinned;
    std::mt19937_64 random(seed);
    int given_up = 0;
    std::size_t slot = 0;
    for (int round = 0; round < 6000; ++round) {
      if (random() % 300 == 0) {
        slot = 1 - slot;
        if (const auto what = random() % 4; what == 0 && pinned.empty()) {
          map.keep_pinned(static_cast<int>(slot));
          pinned.insert(commits[slot].begin(), commits[slot].end());
        } else if (what == 1) {
          map.release_pinned();
          pinned.clear();
        }
        map.committed(static_cast<int>(slot));
        commits[slot] = working;
      }
      std::set<std::uint32_t> used(working.begin(), working.end());
      for (const auto& commit : commits) {
        used.insert(commit.begin(), commit.end());
      }
      std::set<std::uint32_t> all = used;
      all.insert(pinned.begin(), pinned.end());
      all.erase(0);
      const auto block = map.allocate(1).first;
      ASSERT_FALSE(used.contains(block)) << "round " << round;
      if (static_cast<std::int64_t>(all.size()) < map.blocks()) {
        ASSERT_FALSE(pinned.contains(block)) << "round " << round;
      } else {
        ++given_up;
        pinned.clear();
      }
      ASSERT_EQ(map.any_pinned(), !pinned.empty()) << "round " << round;
      // Mostly the same few pages, so that a pinned commit may last.
      const auto page = random() % (round / 1000 % 2 == 0 ? kPages / 3 : kPages);
      map.set(static_cast<std::int64_t>(page), block, 0);
      working[page] = block;
    }
    EXPECT_GT(given_up, 0);
  }
}

TEST(BlockMapTest, RefusesAPageTableThatUsesABlockTwice) {
  const MapInSlab made(10, 4);
  BlockMap& map = *made.map;
  const std::vector<BlockEntry> twice{{3, 0}, {0, 0}, {3, 0}};
  EXPECT_FALSE(map.keep(0, twice));
  const std::vector<BlockEntry> beyond{{35, 0}};
  EXPECT_FALSE(map.keep(1, beyond));
}

}  // namespace
}  // namespace plimsoll
