// SPDX-License-Identifier: Apache-2.0
//
// Goal: under pressure the moves are made in order, each only if needed, and really free memory.
// Method: real mappings. What nobody leased is mapped here; caches hold leased, touched slabs.
#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <chrono>
#include <csignal>
#include <memory>
#include <string>
#include <thread>
#include <tuple>
#include <vector>

#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include "memory/slab.h"
#include "plimsoll/bytes.h"
#include "plimsoll/governor.h"
#include "plimsoll/tree_memory.h"
#include "tests/support/unleased.h"

namespace plimsoll {
namespace {

using namespace literals;
using test::Unleased;

// A leased, resident cache that answers one of the moves.
class Cache : public Reclaimer {
 public:
  Cache(const Governor& governor, PressureMove answers, std::int64_t bytes,
        std::vector<std::string>* calls)
      : slab_(Slab::create(governor, Tag::kFeature, bytes).or_throw()),
        answers_(answers),
        calls_(calls) {}
  std::int64_t reclaim(PressureMove move, std::int64_t wanted_bytes) noexcept override {
    calls_->push_back(std::string(name()) + (move == PressureMove::kPurge ? ":purge" : ":shrink"));
    EXPECT_GT(wanted_bytes, 0);
    return move == answers_ ? slab_.release_pages(0, slab_.bytes()) : 0;
  }
  std::int64_t grow_back(std::int64_t room_bytes) noexcept override {
    const std::int64_t wanted =
        room_bytes < block ? 0 : std::min(room_bytes, slab_.bytes() - slab_.leased_bytes());
    calls_->push_back(std::string(name()) + ":grow");
    return slab_.reacquire_pages(0, wanted) ? wanted : 0;
  }
  [[nodiscard]] const char* name() const noexcept override {
    return answers_ == PressureMove::kPurge ? "arena" : "features";
  }

  std::int64_t block{0};  // Of less room it takes none.

 private:
  Slab slab_;
  PressureMove answers_;
  std::vector<std::string>* calls_;
};

constexpr std::int64_t kRoom = 400_MiB;  // Of the limit above what is resident at the start.
constexpr std::int64_t kArena = 60_MiB;
constexpr std::int64_t kFeatures = 60_MiB;
constexpr std::int64_t kSlack =
    4_MiB;  // For the kernel's batched counters and the test's own heap.

class PressureTest : public testing::Test {
 protected:
  PressureTest() {
    start_ = read_resident().or_throw().total();
    GovernorOptions options;
    options.memory_limit = std::to_string(start_ + kRoom);
    options.foreign_bytes = 8_MiB;
    governor_ = Governor::create(options).or_throw();
    threshold_ = (start_ + kRoom) / 100 * 85;
    arena_ = std::make_unique<Cache>(governor_, PressureMove::kPurge, kArena, &calls_);
    features_ = std::make_unique<Cache>(governor_, PressureMove::kShrink, kFeatures, &calls_);
    arena_handle_ = governor_.add_reclaimer(arena_.get()).or_throw();
    features_handle_ = governor_.add_reclaimer(features_.get()).or_throw();
  }
  ~PressureTest() override { governor_.close(); }
  PressureTest(const PressureTest&) = delete;
  PressureTest& operator=(const PressureTest&) = delete;

  // Bytes that bring resident to `bytes` above the threshold.
  [[nodiscard]] std::int64_t up_to_threshold_plus(std::int64_t bytes) const {
    return threshold_ + bytes - read_resident().or_throw().total();
  }
  static std::int64_t resident() { return read_resident().or_throw().total(); }

  std::int64_t start_{0};
  std::int64_t threshold_{0};
  std::vector<std::string> calls_;
  Governor governor_;
  std::unique_ptr<Cache> arena_;
  std::unique_ptr<Cache> features_;
  ReclaimerHandle arena_handle_;
  ReclaimerHandle features_handle_;
};

using Calls = std::vector<std::string>;

TEST_F(PressureTest, IsNoneWhileLeasesExplainWhatIsResident) {
  const PressureReport calm = governor_.step_boundary();
  EXPECT_FALSE(calm.pressure);
  EXPECT_LT(calm.unexplained_bytes, kSlack);
  // Nearly the whole limit, but every byte leased.
  const Slab slab =
      Slab::create(governor_, Tag::kEmbedding, governor_.state().free_bytes()).or_throw();
  const PressureReport full = governor_.step_boundary();
  EXPECT_GT(full.resident.total(), threshold_);
  EXPECT_FALSE(full.pressure);
  EXPECT_FALSE(full.stop);
  EXPECT_EQ(calls_, Calls{});
}

TEST_F(PressureTest, IsNoneWhileUnexplainedMemoryFitsBelowTheThreshold) {
  const Unleased array(up_to_threshold_plus(-20_MiB));
  const PressureReport report = governor_.step_boundary();
  EXPECT_GT(report.unexplained_bytes, 100_MiB);
  EXPECT_FALSE(report.pressure);
  EXPECT_EQ(calls_, Calls{});
}

TEST_F(PressureTest, R14SharedMemoryCountsAsAnyOther) {
  const std::int64_t bytes = up_to_threshold_plus(30_MiB);
  void* const memory = ::mmap(nullptr, static_cast<std::size_t>(bytes), PROT_READ | PROT_WRITE,
                              MAP_SHARED | MAP_ANONYMOUS | MAP_POPULATE, -1, 0);
  ASSERT_NE(memory, MAP_FAILED);
  const PressureReport report = governor_.step_boundary();
  EXPECT_GT(report.unexplained_bytes, bytes - kSlack);
  EXPECT_EQ(report.purged_bytes, kArena);
  ::munmap(memory, static_cast<std::size_t>(bytes));
}

TEST_F(PressureTest, R13WhatAChildHoldsCountsAndIsNamed) {
  const std::int64_t bytes = up_to_threshold_plus(kArena + kFeatures + 20_MiB);
  std::array<int, 2> ready{};
  ASSERT_EQ(::pipe(ready.data()), 0);
  const pid_t child = ::fork();
  if (child == 0) {
    const Unleased held(bytes);
    std::ignore = ::write(ready[1], "x", 1);
    ::pause();
  }
  char one = 0;
  ASSERT_EQ(::read(ready[0], &one, 1), 1);
  const auto deadline = std::chrono::steady_clock::now() + std::chrono::minutes(1);
  PressureReport report = governor_.step_boundary();
  while (!report.pressure && std::chrono::steady_clock::now() < deadline) {
    std::this_thread::sleep_for(std::chrono::milliseconds(5));
    report = governor_.step_boundary();
  }
  const Measured seen = last_look();
  ::kill(child, SIGKILL);
  ::waitpid(child, nullptr, 0);
  EXPECT_TRUE(report.pressure);
  EXPECT_EQ(seen.tree.children, 1);
  EXPECT_GE(seen.tree.children_bytes, bytes);
  EXPECT_EQ(report.resident.total(), seen.held_bytes());
  const std::string text = explain_held(governor_.state(), seen);
  EXPECT_NE(text.find("in a child process"), std::string::npos) << text;
  EXPECT_NE(measured_lines(seen).find("children"), std::string::npos);
}

TEST_F(PressureTest, PurgesFirstAndLeavesItAtThatWhenItHelps) {
  const Unleased array(up_to_threshold_plus(kArena - 20_MiB));
  const std::int64_t before = resident();
  const PressureReport report = governor_.step_boundary();
  EXPECT_EQ(calls_, (Calls{"arena:purge"}));
  EXPECT_FALSE(report.pressure);
  EXPECT_FALSE(report.stop);
  EXPECT_EQ(report.purged_bytes, kArena);
  EXPECT_EQ(report.shrunk_bytes, 0);
  EXPECT_LT(resident(), before - kArena + kSlack);  // Bytes really went back.
  EXPECT_EQ(governor_.state().leased_bytes, kFeatures);
}

TEST_F(PressureTest, ShrinksWhenPurgingWasNotEnough) {
  const Unleased array(up_to_threshold_plus(kArena + 20_MiB));
  const std::int64_t before = resident();
  const PressureReport report = governor_.step_boundary();
  EXPECT_EQ(calls_, (Calls{"arena:purge", "features:purge", "arena:shrink", "features:shrink"}));
  EXPECT_FALSE(report.pressure);
  EXPECT_EQ(report.purged_bytes, kArena);
  EXPECT_EQ(report.shrunk_bytes, kFeatures);
  EXPECT_LT(resident(), before - kArena - kFeatures + kSlack);
  EXPECT_EQ(governor_.state().leased_bytes, 0);
}

TEST_F(PressureTest, StopsOnlyWhenNothingIsLeftAndTheLimitIsNear) {
  // Above the threshold after both moves, but with a tenth of the limit still free: goes on.
  const Unleased array(up_to_threshold_plus(kArena + kFeatures + 15_MiB));
  const PressureReport report = governor_.step_boundary();
  EXPECT_EQ(calls_.size(), 4U);
  EXPECT_TRUE(report.pressure);
  EXPECT_FALSE(report.stop);
  // Within three hundredths of the limit: stops.
  const std::int64_t limit = governor_.state().limit_bytes;
  const Unleased more(limit / 100 * 98 - resident());
  const PressureReport last = governor_.step_boundary();
  EXPECT_TRUE(last.pressure);
  EXPECT_TRUE(last.stop);
}

TEST_F(PressureTest, DoesNotRepeatItsMovesUntilMemoryHasGrownAgain) {
  const Unleased array(up_to_threshold_plus(kArena + kFeatures + 5_MiB));
  EXPECT_TRUE(governor_.step_boundary().pressure);
  const std::size_t calls = calls_.size();
  EXPECT_TRUE(governor_.step_boundary().pressure);
  EXPECT_EQ(calls_.size(), calls);
  const Unleased more(20_MiB);
  EXPECT_TRUE(governor_.step_boundary().pressure);
  EXPECT_GT(calls_.size(), calls);
}

TEST_F(PressureTest, LetsWhatItShrankGrowBackOnceThereIsRoom) {
  features_handle_ = ReclaimerHandle{};  // Alone: the arena gives without being asked to shrink.
  arena_handle_ = ReclaimerHandle{};
  features_handle_ = governor_.add_reclaimer(features_.get()).or_throw();
  const std::int64_t leased = governor_.state().leased_bytes;
  {
    const Unleased array(up_to_threshold_plus(kFeatures / 2));
    EXPECT_EQ(governor_.step_boundary().shrunk_bytes, kFeatures);
    EXPECT_EQ(governor_.step_boundary().grown_bytes, 0);  // No pressure, and no room either.
    EXPECT_EQ(governor_.state().leased_bytes, leased - kFeatures);
  }
  calls_.clear();
  EXPECT_EQ(governor_.step_boundary().grown_bytes, kFeatures);
  EXPECT_EQ(governor_.state().leased_bytes, leased);
  EXPECT_EQ(governor_.step_boundary().grown_bytes, 0);  // Asked once more, and then no longer.
  EXPECT_EQ(governor_.step_boundary().grown_bytes, 0);
  EXPECT_EQ(calls_, (Calls{"features:grow", "features:grow"}));
}

TEST_F(PressureTest, LetsACacheGrowBackWhoseBlocksTheFirstRoomWasTooSmallFor) {
  arena_handle_ = ReclaimerHandle{};
  features_->block = kFeatures;
  {
    const Unleased array(up_to_threshold_plus(kFeatures / 2));
    EXPECT_EQ(governor_.step_boundary().shrunk_bytes, kFeatures);
  }
  {
    const Unleased array(up_to_threshold_plus(-(start_ + kRoom) / 10 - kFeatures / 2));
    EXPECT_EQ(governor_.step_boundary().grown_bytes, 0);
    EXPECT_EQ(calls_.back(), "features:grow");  // It was asked.
  }
  EXPECT_EQ(governor_.step_boundary().grown_bytes, kFeatures);
}

TEST_F(PressureTest, TrimsTheHeapOfFreedMemory) {
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
  GTEST_SKIP() << "a sanitizer's heap has nothing to trim";
#endif
  // Small blocks, so that the heap holds them rather than mappings of their own; the last one
  // stays, so that nothing but a trim gives the rest back.
  std::vector<std::unique_ptr<char[]>> blocks;
  for (std::int64_t bytes = 0; bytes < 100_MiB; bytes += 4096) {
    blocks.push_back(std::make_unique<char[]>(4096));
  }
  const auto last = std::move(blocks.back());
  blocks.clear();
  const Unleased array(up_to_threshold_plus(20_MiB));
  const std::int64_t before = resident();
  static_cast<void>(governor_.step_boundary());
  EXPECT_LT(resident(), before - kArena - 80_MiB);
}

}  // namespace
}  // namespace plimsoll
