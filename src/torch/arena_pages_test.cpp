// SPDX-License-Identifier: Apache-2.0
//
// The arena without torch: sums against a plain oracle, leases against the governor's ledger.
#include "torch/arena_pages.h"

#include <gtest/gtest.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <map>
#include <memory>
#include <random>
#include <thread>
#include <vector>

#include "plimsoll/bytes.h"

namespace plimsoll {
namespace {

using namespace literals;

constexpr std::int64_t kRange = 4LL << 30;

class ArenaPagesTest : public testing::Test {
 protected:
  void SetUp() override {
    GovernorOptions options;
    options.memory_limit = "6GiB";
    options.foreign_bytes = 0;
    governor_ = Governor::create(options).or_throw();
    arena_.open(kRange).or_throw();
    arena_.attach(governor_, kUncapped).or_throw();
  }
  void TearDown() override {
    arena_.detach();
    governor_.close();
  }
  std::int64_t ledger_bytes() const { return governor_.state().pools[0].leased_bytes; }

  void* allocate(std::int64_t bytes) { return arena_.allocate(bytes).or_throw().data; }

  Governor governor_;
  ArenaPages arena_;
};

std::int64_t pages_in_core(const void* data, std::int64_t bytes) {
  std::vector<unsigned char> in_core(static_cast<std::size_t>(bytes / kArenaPageBytes));
  EXPECT_EQ(::mincore(const_cast<void*>(data), static_cast<std::size_t>(bytes), in_core.data()), 0);
  return std::count_if(in_core.begin(), in_core.end(), [](auto byte) { return (byte & 1) != 0; });
}

// Sizes as training has them: many small, some large, a few of many pages.
std::int64_t random_size(std::mt19937& random) {
  const auto kind = random() % 10;
  const std::int64_t most = kind < 6 ? 2'000 : kind < 9 ? 100'000 : 3'000'000;
  return 1 + static_cast<std::int64_t>(random()) % most;
}

// Both ends of a block; that blocks lie apart is checked by their addresses.
std::int64_t ends(std::int64_t bytes) {
  return std::min<std::int64_t>(bytes, 512);
}
void paint(std::byte* data, std::int64_t bytes, unsigned char fill) {
  std::memset(data, fill, static_cast<std::size_t>(ends(bytes)));
  std::memset(data + bytes - ends(bytes), fill, static_cast<std::size_t>(ends(bytes)));
}
bool is_painted(const std::byte* data, std::int64_t bytes, unsigned char fill) {
  const auto holds = [fill](std::byte byte) { return byte == static_cast<std::byte>(fill); };
  return std::all_of(data, data + ends(bytes), holds) &&
         std::all_of(data + bytes - ends(bytes), data + bytes, holds);
}

TEST(SizeClassTest, CoversEveryRequestWithinASixteenth) {
  std::int64_t previous = 0;
  for (std::int64_t bytes = 1; bytes <= kSmallMax; ++bytes) {
    const int size_class = size_class_of(bytes);
    const std::int64_t block = size_class_bytes(size_class);
    ASSERT_TRUE(size_class >= 0 && size_class < kSizeClasses) << bytes;
    ASSERT_TRUE(block >= bytes && block >= previous && block % 64 == 0) << bytes;
    ASSERT_LT(block - bytes, std::max<std::int64_t>(64, bytes / 16 + 1)) << bytes;
    ASSERT_EQ(size_class_of(block), size_class) << bytes;
    previous = block;
  }
  EXPECT_EQ(size_class_of(kSmallMax), kSizeClasses - 1);
  EXPECT_EQ(arena_block_bytes(kSmallMax + 1), 9 * kArenaPageBytes);
  EXPECT_EQ(arena_block_bytes(1LL << 45), 1LL << 45);
}

TEST_F(ArenaPagesTest, SumsMatchAPlainOracleAndBlocksNeverOverlap) {
  for (const unsigned seed : {11U, 12U, 13U}) {
    SCOPED_TRACE(testing::Message() << "seed " << seed);
    std::mt19937 random(seed);
    std::map<std::byte*, std::pair<std::int64_t, unsigned char>> blocks;
    std::int64_t live = 0;
    std::int64_t peak = 0;
    arena_.reset_peak();
    for (int i = 0; i < 20'000; ++i) {
      if (blocks.size() < 300 && random() % 5 < 3) {
        const std::int64_t bytes = random_size(random);
        auto* data = static_cast<std::byte*>(allocate(bytes));
        ASSERT_EQ(reinterpret_cast<std::uintptr_t>(data) % 64, 0U);
        const auto after = blocks.lower_bound(data);
        ASSERT_TRUE(after == blocks.end() || data + bytes <= after->first);
        if (after != blocks.begin()) {
          const auto before = std::prev(after);
          ASSERT_LE(before->first + before->second.first, data);
        }
        const auto fill = static_cast<unsigned char>(random());
        paint(data, bytes, fill);
        blocks[data] = {bytes, fill};
        live += arena_block_bytes(bytes);
        peak = std::max(peak, live);
      } else if (!blocks.empty()) {
        auto at = std::next(blocks.begin(), static_cast<std::ptrdiff_t>(random() % blocks.size()));
        const auto [bytes, fill] = at->second;
        ASSERT_TRUE(is_painted(at->first, bytes, fill));
        ASSERT_EQ(arena_.free(at->first), arena_block_bytes(bytes));
        live -= arena_block_bytes(bytes);
        blocks.erase(at);
      }
      if (random() % 500 == 0) {
        arena_.purge();
      }
      const ArenaStats stats = arena_.stats();
      ASSERT_EQ(stats.live_bytes, live);
      ASSERT_EQ(stats.live_peak_bytes, peak);
      ASSERT_GE(stats.leased_bytes, stats.live_bytes + stats.cached_bytes);
      ASSERT_EQ(stats.leased_bytes, ledger_bytes());
    }
    for (const auto& [data, block] : blocks) {
      arena_.free(data);
    }
    EXPECT_EQ(arena_.stats().live_bytes, 0);
    arena_.purge();
    EXPECT_EQ(arena_.stats().cached_bytes, 0);
    EXPECT_EQ(ledger_bytes(), 0);
  }
}

TEST_F(ArenaPagesTest, PurgeGivesFreePagesToTheSystemAndLeavesTheRest) {
  void* kept = allocate(1_MiB);
  void* freed = allocate(64_MiB);
  std::memset(kept, 1, static_cast<std::size_t>(1_MiB));
  std::memset(freed, 1, static_cast<std::size_t>(64_MiB));
  arena_.free(freed);
  EXPECT_EQ(arena_.stats().cached_bytes, 64_MiB);
  EXPECT_EQ(pages_in_core(freed, 64_MiB), 64_MiB / kArenaPageBytes);
  EXPECT_EQ(arena_.purge(), 64_MiB);
  EXPECT_EQ(pages_in_core(freed, 64_MiB), 0);
  EXPECT_EQ(pages_in_core(kept, 1_MiB), 1_MiB / kArenaPageBytes);
  EXPECT_LE(ledger_bytes(), 1_MiB + 512_KiB);  // The block, and the tables' entries.
  EXPECT_EQ(arena_.stats().cached_bytes, 0);
  arena_.free(kept);
}

TEST_F(ArenaPagesTest, HolesBetweenBlocksDoNotRaiseTheLease) {
  // Every other block of 2 MiB is freed; the holes are too small for what comes next.
  std::vector<void*> blocks;
  for (int i = 0; i < 64; ++i) {
    blocks.push_back(allocate(2_MiB));
  }
  for (std::size_t i = 0; i < blocks.size(); i += 2) {
    arena_.free(blocks[i]);
  }
  std::vector<void*> large;
  for (int i = 0; i < 16; ++i) {
    large.push_back(allocate(4_MiB));
  }
  const ArenaStats stats = arena_.stats();
  EXPECT_EQ(stats.live_peak_bytes, 128_MiB);
  EXPECT_LE(stats.leased_peak_bytes, 128_MiB + 8_MiB + 1_MiB);
  for (std::size_t i = 1; i < blocks.size(); i += 2) {
    arena_.free(blocks[i]);
  }
  for (void* block : large) {
    arena_.free(block);
  }
}

TEST_F(ArenaPagesTest, RefusalGivesTheCacheBackFirstAndThenChangesNothing) {
  arena_.attach(governor_, 16_MiB).or_throw();
  arena_.free(allocate(6_MiB));
  void* held = allocate(8_MiB);    // Beside the cached 6 MiB.
  void* second = allocate(7_MiB);  // Fits only once those are given back.
  EXPECT_LE(ledger_bytes(), 16_MiB);
  const ArenaStats before = arena_.stats();
  const auto refused = arena_.allocate(2_MiB);
  ASSERT_FALSE(refused);
  EXPECT_EQ(refused.error().code, ErrorCode::kOverBudget);
  EXPECT_EQ(refused.error().tag, Tag::kTensor);
  const std::string text = refused.error().to_string();
  EXPECT_EQ(text.find("tensors wanted 2.0 MiB, "), 0U) << text;
  EXPECT_NE(
      text.find("free of their 16.0 MiB cap: raise the cap that the tensor arena was attached "
                "with, or lower batch_size"),
      std::string::npos)
      << text;
  EXPECT_EQ(arena_.stats().live_bytes, before.live_bytes);
  EXPECT_EQ(arena_.stats().refusals, before.refusals + 1);
  arena_.free(second);
  void* fits = allocate(2_MiB);
  ASSERT_NE(fits, nullptr);
  arena_.free(fits);
  arena_.free(held);
}

TEST_F(ArenaPagesTest, RefusesASizeBeyondItsRangeWithoutTouchingTheLedger) {
  const std::int64_t before = ledger_bytes();
  for (const std::int64_t bytes : {kRange + 1, kRange, INT64_MAX}) {
    const auto refused = arena_.allocate(bytes);
    ASSERT_FALSE(refused) << bytes;
    EXPECT_EQ(refused.error().code, ErrorCode::kOverBudget);
  }
  EXPECT_EQ(ledger_bytes(), before);
}

TEST_F(ArenaPagesTest, BlocksKeepTheirLeaseAfterDetachAndGiveItBackWhenFreed) {
  void* small = allocate(100);
  void* large = allocate(1_MiB);
  arena_.detach();
  EXPECT_EQ(arena_.allocate(100).or_throw().data, nullptr);  // Pass through.
  EXPECT_EQ(ledger_bytes(), 1_MiB + 64_KiB);  // The block, and the span of the small one.
  std::memset(large, 1, static_cast<std::size_t>(1_MiB));
  arena_.free(large);
  EXPECT_EQ(pages_in_core(large, 1_MiB), 0);
  EXPECT_EQ(ledger_bytes(), 64_KiB);
  arena_.free(small);
  EXPECT_EQ(ledger_bytes(), 0);
  EXPECT_EQ(arena_.stats().leased_bytes, 0);
}

TEST_F(ArenaPagesTest, BlocksOutliveTheirGovernorAndNewOnesAreLeasedFromTheNext) {
  void* old_small = allocate(5'000);
  void* old_large = allocate(3_MiB);
  arena_.detach();
  governor_.close();
  GovernorOptions options;
  options.memory_limit = "6GiB";
  options.foreign_bytes = 0;
  Governor first = governor_;
  governor_ = Governor::create(options).or_throw();
  EXPECT_EQ(governor_.state().orphan_bytes, 3_MiB + 64_KiB);
  arena_.attach(governor_, kUncapped).or_throw();
  void* young = allocate(5'000);
  EXPECT_GE(ledger_bytes(), 64_KiB);
  EXPECT_LE(ledger_bytes(), 64_KiB + kArenaPageBytes);  // Its own span, not the old one's.
  arena_.free(old_large);
  arena_.free(old_small);
  EXPECT_EQ(governor_.state().orphan_bytes, 0);
  EXPECT_EQ(first.state().pools[0].leased_bytes, 0);
  arena_.free(young);
}

TEST_F(ArenaPagesTest, PassesThroughOnceItsGovernorHasEnded) {
  void* before = allocate(1_MiB);
  governor_.close();
  EXPECT_EQ(arena_.allocate(2_MiB).or_throw().data, nullptr);
  EXPECT_FALSE(arena_.attached());
  arena_.free(before);
  EXPECT_EQ(arena_.stats().leased_bytes, 0);
}

TEST_F(ArenaPagesTest, RefusesTheAttachmentAfter255WithLivingBlocks) {
  std::vector<void*> blocks;
  for (int i = 0; i < 255; ++i) {
    arena_.attach(governor_, kUncapped).or_throw();
    blocks.push_back(allocate(64));
  }
  const auto refused = arena_.attach(governor_, kUncapped);
  ASSERT_FALSE(refused);
  EXPECT_EQ(refused.error().code, ErrorCode::kInvalidArgument);
  arena_.free(blocks[7]);
  blocks[7] = nullptr;
  EXPECT_TRUE(arena_.attach(governor_, kUncapped));
  for (void* block : blocks) {
    if (block != nullptr) {
      arena_.free(block);
    }
  }
  EXPECT_EQ(ledger_bytes(), 0);
}

TEST_F(ArenaPagesTest, GovernorPurgesItWhenALeaseIsRefused) {
  arena_.free(allocate(256_MiB));
  const LedgerState state = governor_.state();
  auto other = governor_.reserve(Tag::kOther, state.free_bytes() + 128_MiB);
  ASSERT_TRUE(other) << other.error().to_string();
  EXPECT_EQ(arena_.stats().cached_bytes, 0);
  EXPECT_EQ(ledger_bytes(), 0);
}

TEST_F(ArenaPagesTest, ThreadsShareItAndTheSumsStayExact) {
  constexpr int kThreads = 4;
  // Each thread frees what its left neighbour allocated in the round before.
  std::vector<std::vector<void*>> handed(kThreads);
  for (int round = 0; round < 5; ++round) {
    std::vector<std::vector<void*>> made(kThreads);
    std::vector<std::jthread> threads;
    for (int t = 0; t < kThreads; ++t) {
      threads.emplace_back([&, t] {
        std::mt19937 random(static_cast<unsigned>(round * kThreads + t));
        auto& mine = made[static_cast<std::size_t>(t)];
        for (int i = 0; i < 400; ++i) {
          const std::int64_t bytes = random_size(random);
          void* data = arena_.allocate(bytes).or_throw().data;
          std::memset(data, t, static_cast<std::size_t>(std::min<std::int64_t>(bytes, 4096)));
          if (random() % 3 == 0) {
            arena_.free(data);
          } else {
            mine.push_back(data);
          }
          if (random() % 200 == 0) {
            arena_.purge();
          }
        }
        for (void* data : handed[static_cast<std::size_t>((t + 1) % kThreads)]) {
          arena_.free(data);
        }
      });
    }
    threads.clear();
    handed = std::move(made);
    EXPECT_EQ(arena_.stats().leased_bytes, ledger_bytes());
  }
  for (const auto& blocks : handed) {
    for (void* data : blocks) {
      arena_.free(data);
    }
  }
  EXPECT_EQ(arena_.stats().live_bytes, 0);
  arena_.purge();
  EXPECT_EQ(ledger_bytes(), 0);
}

TEST_F(ArenaPagesTest, AForkedChildFreesSafelyAndPassesThrough) {
  void* small = allocate(100);
  void* large = allocate(1_MiB);
  const std::int64_t before = ledger_bytes();
  arena_.before_fork();
  const pid_t child = ::fork();
  if (child == 0) {
    arena_.after_fork_in_child();
    const auto block = arena_.allocate(100);
    const bool passes = block && block->data == nullptr;
    arena_.free(small);
    arena_.free(large);
    arena_.detach();
    const bool refused = !arena_.attach(governor_, kUncapped);
    ::_exit(passes && refused && arena_.stats().live_bytes == 0 ? 0 : 1);
  }
  arena_.after_fork_in_parent();
  int status = -1;
  ASSERT_EQ(::waitpid(child, &status, 0), child);
  EXPECT_EQ(status, 0);
  EXPECT_EQ(ledger_bytes(), before);
  arena_.free(small);
  arena_.free(large);
}

}  // namespace
}  // namespace plimsoll
