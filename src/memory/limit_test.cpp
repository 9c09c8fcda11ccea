// SPDX-License-Identifier: Apache-2.0
//
// Goal: a limit that moves is followed down by what can be given up, and up by what was given up;
//       what is promised for good is never touched, and sums hold throughout.
// Method: ledgers with numbers chosen here; then governors with slabs that are really resident.
#include <gtest/gtest.h>

#include <chrono>
#include <filesystem>
#include <fstream>
#include <memory>
#include <string>
#include <thread>

#include <unistd.h>

#include "memory/admission.h"
#include "memory/ledger.h"
#include "memory/slab.h"
#include "plimsoll/bytes.h"
#include "plimsoll/governor.h"

namespace plimsoll {
namespace {

using namespace literals;

LimitReport limit_of(std::int64_t bytes) {
  LimitReport limit;
  limit.candidates.push_back({"user", "test", bytes});
  limit.limit_bytes = bytes;
  return limit;
}

// 1000 MiB of which 100 are baseline: a cache of 400 (elastic), tensors of 300 (not).
class MovingLedger : public testing::Test {
 protected:
  MovingLedger() {
    Ledger::Terms terms;
    terms.limit = limit_of(1000_MiB);
    terms.pressure_fraction = 0.85;
    terms.baseline = {.total = 100_MiB, .anonymous = 50_MiB};
    ledger = std::make_shared<Ledger>(terms, std::make_shared<OrphanAccount>(0));
    ledger->admit(kCache).or_throw();
    ledger->admit(kTensors).or_throw();
    cache = ledger->grant(Tag::kFeature, 400_MiB).or_throw();
  }
  Ledger::Settled ask(std::int64_t bytes) { return ledger->set_limit(limit_of(bytes)).or_throw(); }
  [[nodiscard]] PoolState pool(Tag tag) const {
    return ledger->state().pools[static_cast<std::size_t>(tag)];
  }

  static constexpr PoolSpec kCache{.tag = Tag::kFeature,
                                   .floor_bytes = 400 << 20,
                                   .cap_bytes = 400 << 20,
                                   .elastic_bytes = 400 << 20};
  static constexpr PoolSpec kTensors{.tag = Tag::kTensor, .floor_bytes = 300 << 20};
  std::shared_ptr<Ledger> ledger;
  Lease cache;
};

TEST_F(MovingLedger, ALimitWithinWhatIsFreeHoldsAtOnceAndTakesNothing) {
  EXPECT_FALSE(ledger->unsettled());
  const auto settled = ask(800_MiB);
  EXPECT_EQ(settled.missing_bytes, 0);
  EXPECT_EQ(settled.restored_bytes, 0);
  EXPECT_EQ(ledger->state().limit_bytes, 800_MiB);
  EXPECT_EQ(ledger->state().free_bytes(), 0);
  EXPECT_EQ(pool(Tag::kFeature).yielded_bytes, 0);
  EXPECT_FALSE(ledger->grant(Tag::kOther, 1));
  EXPECT_EQ(ledger->limit().limit_bytes, 800_MiB);
}

TEST_F(MovingLedger, ALowerOneFollowsTheLeasesDownAndNeverPassesThem) {
  EXPECT_EQ(ask(700_MiB).missing_bytes, 100_MiB);  // All of the cache is leased.
  LedgerState state = ledger->state();
  EXPECT_EQ(state.limit_bytes, 800_MiB);
  EXPECT_EQ(state.asked_bytes, 700_MiB);
  EXPECT_EQ(state.free_bytes(), 0);
  cache.shrink(340_MiB);
  EXPECT_EQ(ledger->settle().missing_bytes, 40_MiB);
  EXPECT_EQ(ledger->state().limit_bytes, 740_MiB);
  EXPECT_EQ(pool(Tag::kFeature).floor_bytes, 340_MiB);
  EXPECT_EQ(pool(Tag::kFeature).yielded_bytes, 60_MiB);
  EXPECT_FALSE(cache.grow(341_MiB));  // A refusal: it stays small.
  cache.shrink(290_MiB);              // More than was wanted: only what is wanted is taken.
  EXPECT_EQ(ledger->settle().missing_bytes, 0);
  EXPECT_EQ(ledger->state().limit_bytes, 700_MiB);
  EXPECT_EQ(pool(Tag::kFeature).floor_bytes, 300_MiB);
  EXPECT_EQ(cache.room(), 10_MiB);
  cache.grow(300_MiB).or_throw();
  EXPECT_EQ(cache.room(), 0);
  EXPECT_TRUE(ledger->unsettled());  // Something is still owed to the cache.
}

TEST_F(MovingLedger, WhatIsNotElasticIsPromisedWhateverIsAsked) {
  cache.shrink(0);
  EXPECT_EQ(ask(1_MiB).missing_bytes, 399_MiB);
  const LedgerState state = ledger->state();
  EXPECT_EQ(state.limit_bytes, 400_MiB);  // Baseline and tensors: the smallest that would do.
  EXPECT_EQ(pool(Tag::kFeature).floor_bytes, 0);
  EXPECT_EQ(pool(Tag::kTensor).floor_bytes, 300_MiB);
  EXPECT_TRUE(ledger->grant(Tag::kTensor, 300_MiB));
  EXPECT_NE(state.to_string().find("yielded"), std::string::npos);
  EXPECT_NE(state.to_string().find("asked"), std::string::npos);
}

TEST_F(MovingLedger, AHigherOnePromisesWhatWasTakenAsFarAsThereIsRoom) {
  cache.shrink(100_MiB);
  EXPECT_EQ(ask(500_MiB).missing_bytes, 0);
  EXPECT_EQ(pool(Tag::kFeature).yielded_bytes, 300_MiB);
  EXPECT_EQ(ask(650_MiB).restored_bytes, 150_MiB);
  EXPECT_EQ(pool(Tag::kFeature).floor_bytes, 250_MiB);
  EXPECT_EQ(ledger->unleased_elastic(), 150_MiB);
  EXPECT_EQ(ledger->state().free_bytes(), 0);
  EXPECT_EQ(ask(1000_MiB).restored_bytes, 150_MiB);
  EXPECT_EQ(pool(Tag::kFeature).floor_bytes, 400_MiB);
  EXPECT_EQ(ledger->state().free_bytes(), 200_MiB);
  EXPECT_FALSE(ledger->unsettled());
  cache.grow(400_MiB).or_throw();
}

TEST_F(MovingLedger, AClosedOwnerTakesWhatItYieldedWithIt) {
  cache.shrink(100_MiB);
  EXPECT_EQ(ask(500_MiB).missing_bytes, 0);
  cache.shrink(0);
  ledger->release_admission(kCache);
  EXPECT_EQ(pool(Tag::kFeature).floor_bytes, 0);
  EXPECT_EQ(pool(Tag::kFeature).yielded_bytes, 0);
  EXPECT_EQ(ledger->state().free_bytes(), 100_MiB);
  EXPECT_FALSE(ledger->unsettled());
}

TEST_F(MovingLedger, RefusesToBeElasticBeyondAFloorAndToMoveWhenClosed) {
  EXPECT_FALSE(ledger->admit({.tag = Tag::kOther, .floor_bytes = 1, .elastic_bytes = 2}));
  EXPECT_FALSE(ledger->admit({.tag = Tag::kOther, .floor_bytes = 1, .elastic_bytes = -1}));
  ledger->close();
  EXPECT_FALSE(ledger->set_limit(limit_of(1_GiB)));
}

// A cache as the stores have: admitted, elastic, resident, in regions of 2 MiB. Of these, `busy`
// bytes are in use and cannot be given back now.
class SlabCache : public Reclaimer {
 public:
  SlabCache(Governor& governor, std::int64_t bytes) {
    admission_.take(governor, Tag::kFeature, bytes, "cache_bytes").or_throw();
    slab_ = Slab::create(governor, Tag::kFeature, bytes).or_throw();
    admission_.make_elastic();
    held_ = bytes;
    handle_ = governor.add_reclaimer(this).or_throw();
  }
  std::int64_t reclaim(PressureMove move, std::int64_t wanted_bytes) noexcept override {
    std::int64_t given = 0;
    while (move == PressureMove::kShrink && given < wanted_bytes && held_ > busy) {
      held_ -= kRegion;
      given += slab_.release_pages(held_, kRegion);
    }
    return given;
  }
  std::int64_t grow_back(std::int64_t room_bytes) noexcept override {
    std::int64_t taken = 0;
    while (taken + kRegion <= room_bytes && held_ < slab_.bytes() &&
           slab_.reacquire_pages(held_, kRegion)) {
      held_ += kRegion;
      taken += kRegion;
    }
    return taken;
  }
  [[nodiscard]] const char* name() const noexcept override { return "cache"; }
  [[nodiscard]] std::int64_t leased() const { return slab_.leased_bytes(); }

  std::int64_t busy{0};

 private:
  static constexpr std::int64_t kRegion = 2 << 20;
  Admission admission_;
  Slab slab_;
  std::int64_t held_{0};
  ReclaimerHandle handle_;
};

class LimitTest : public testing::Test {
 protected:
  LimitTest() {
    const std::int64_t start = read_resident().or_throw().total();
    first_ = start + 500_MiB;
    GovernorOptions options;
    options.memory_limit = std::to_string(first_);
    options.foreign_bytes = 16_MiB;
    governor_ = Governor::create(options).or_throw();
    governor_.admit({.tag = Tag::kTensor, .floor_bytes = 100_MiB}).or_throw();
  }
  ~LimitTest() override { governor_.close(); }
  LimitTest(const LimitTest&) = delete;
  LimitTest& operator=(const LimitTest&) = delete;

  LimitChange move_to(std::int64_t bytes) {
    return governor_.set_limit(std::to_string(bytes)).or_throw();
  }
  static std::int64_t resident() { return read_resident().or_throw().total(); }

  std::int64_t first_{0};
  Governor governor_;
};

TEST_F(LimitTest, LoweredMakesCachesSmallerBeforeItReturnsAndRaisedMakesThemWhole) {
  SlabCache cache(governor_, 300_MiB);
  const std::int64_t full = resident();
  const LimitChange down = move_to(first_ - 280_MiB);
  EXPECT_TRUE(down.settled());
  EXPECT_EQ(down.before_bytes, first_);
  EXPECT_EQ(governor_.state().limit_bytes, first_ - 280_MiB);
  EXPECT_GE(governor_.state().free_bytes(), 0);
  const std::int64_t given = 300_MiB - cache.leased();
  EXPECT_GT(given, 150_MiB);
  EXPECT_EQ(down.shrunk_bytes, given);
  EXPECT_LT(resident(), full - given + 4_MiB);     // Bytes really went back.
  ASSERT_FALSE(down.evictions.entries().empty());  // The heap may add its own.
  const Eviction& eviction = down.evictions.entries()[0];
  EXPECT_STREQ(eviction.owner, "cache");
  EXPECT_STREQ(move_name(eviction.move), "shrink");
  EXPECT_EQ(eviction.given_bytes, given);
  EXPECT_GT(eviction.freed_bytes(), given - 4_MiB);
  EXPECT_FALSE(governor_.step_boundary().stop);
  EXPECT_EQ(300_MiB - cache.leased(), given);  // It stays small.

  const LimitChange up = move_to(first_);
  EXPECT_TRUE(up.settled());
  EXPECT_EQ(up.grown_bytes, given);
  EXPECT_EQ(cache.leased(), 300_MiB);
  EXPECT_GT(resident(), full - 4_MiB);
  EXPECT_EQ(governor_.limit().explain().find(format_bytes(first_)), 0U);
}

TEST_F(LimitTest, WhatIsInUseFollowsAtTheNextBoundary) {
  SlabCache cache(governor_, 300_MiB);
  cache.busy = 250_MiB;
  const std::int64_t asked = first_ - 280_MiB;
  const LimitChange down = move_to(asked);
  EXPECT_FALSE(down.settled());
  EXPECT_EQ(down.asked_bytes, asked);
  EXPECT_GT(down.limit_bytes, asked);
  EXPECT_EQ(cache.leased(), 250_MiB);
  EXPECT_EQ(governor_.state().limit_bytes, down.limit_bytes);
  // The step's own memory is promised all the while.
  EXPECT_TRUE(governor_.try_reserve(Tag::kTensor, 100_MiB));
  cache.busy = 0;
  const PressureReport report = governor_.step_boundary();
  EXPECT_FALSE(report.stop);
  EXPECT_GT(report.shrunk_bytes, 0);
  EXPECT_EQ(governor_.state().limit_bytes, asked);
}

TEST_F(LimitTest, BelowWhatIsPromisedStopsTheRunASecondLaterAndNamesALimitThatWouldDo) {
  SlabCache cache(governor_, 300_MiB);
  const Lease kept = governor_.reserve(Tag::kOther, 50_MiB).or_throw();
  EXPECT_FALSE(move_to(first_ - 490_MiB).settled());
  PressureReport report;
  for (int i = 0; i < 3; ++i) {
    EXPECT_FALSE(report.stop);
    report = governor_.step_boundary();
  }
  std::this_thread::sleep_for(std::chrono::milliseconds(1100));
  report = governor_.step_boundary();
  ASSERT_TRUE(report.stop);
  const LedgerState state = governor_.state();
  EXPECT_EQ(report.needed_bytes, state.baseline_bytes + 16_MiB + 100_MiB + 50_MiB);
  EXPECT_EQ(cache.leased(), 0);
  // That limit would do, and what the run holds meanwhile is still within the one in force.
  EXPECT_TRUE(move_to(report.needed_bytes).settled());
  EXPECT_FALSE(governor_.step_boundary().stop);
}

TEST_F(LimitTest, GivesBackWhatItTookWhenAnotherOwnerCloses) {
  SlabCache cache(governor_, 200_MiB);
  const PoolSpec other{.tag = Tag::kOther, .floor_bytes = 40_MiB};
  governor_.admit(other).or_throw();
  EXPECT_TRUE(move_to(first_ - 250_MiB).settled());
  const std::int64_t small = cache.leased();
  EXPECT_EQ(governor_.step_boundary().grown_bytes, 0);
  governor_.release_admission(other);
  EXPECT_EQ(governor_.step_boundary().grown_bytes, 40_MiB);
  EXPECT_EQ(cache.leased(), small + 40_MiB);
}

TEST_F(LimitTest, LeavesTheRoomThatOthersHaveWorkedIn) {
  SlabCache cache(governor_, 200_MiB);
  const auto gather = [&] { return governor_.try_reserve(Tag::kOther, 30_MiB).has_value(); };
  ASSERT_TRUE(gather());
  const std::int64_t full = first_ - governor_.state().free_bytes();
  const LimitChange change = move_to(full - 50_MiB);
  EXPECT_TRUE(change.settled());
  EXPECT_EQ(change.shrunk_bytes, 80_MiB);
  EXPECT_EQ(governor_.state().free_bytes(), 30_MiB);
  EXPECT_TRUE(gather());
  EXPECT_EQ(governor_.step_boundary().grown_bytes, 0);
  // Where caches have no more to give, the limit counts and not the room.
  EXPECT_TRUE(move_to(full - 190_MiB).settled());
  EXPECT_EQ(cache.leased(), 0);
  EXPECT_FALSE(gather());
  EXPECT_EQ(move_to(first_).grown_bytes, 200_MiB);
}

TEST_F(LimitTest, S40CachesThatYieldedToOneLargeStepAreWholeAgainLater) {
  SlabCache cache(governor_, 200_MiB);
  const std::int64_t free = governor_.state().free_bytes();
  ASSERT_TRUE(governor_.reserve(Tag::kOther, free + 150_MiB));
  EXPECT_EQ(cache.leased(), 50_MiB);
  const auto boundaries_until_whole = [&](std::int64_t step_bytes) {
    int boundaries = 0;
    for (; cache.leased() < 200_MiB && boundaries < 1000; ++boundaries) {
      EXPECT_TRUE(governor_.reserve(Tag::kOther, step_bytes));
      governor_.step_boundary();
    }
    return boundaries;
  };
  EXPECT_EQ(boundaries_until_whole(free + 150_MiB), 1000);  // Others like it go on finding room.
  EXPECT_EQ(cache.leased(), 50_MiB);
  const int boundaries = boundaries_until_whole(free);
  EXPECT_GE(boundaries, 64);
  EXPECT_LE(boundaries, 128);
}

TEST_F(LimitTest, DoesNotGrowBackIntoForeignMemory) {
  SlabCache cache(governor_, 300_MiB);
  EXPECT_TRUE(move_to(first_ - 250_MiB).settled());
  const std::int64_t small = cache.leased();
  // Memory that nobody leased, more than was declared, and close to the limit that comes.
  auto foreign = std::make_unique<std::vector<char>>(
      static_cast<std::size_t>(first_ * 84 / 100 - resident()), 'x');
  EXPECT_EQ(move_to(first_).grown_bytes, 0);
  EXPECT_EQ(governor_.step_boundary().grown_bytes, 0);
  EXPECT_EQ(foreign->back(), 'x');
  foreign.reset();
  governor_.step_boundary();
  EXPECT_GT(cache.leased(), small);
  EXPECT_EQ(cache.leased(), 300_MiB);
}

TEST_F(LimitTest, RefusesWhatItCannotReadAndChangesNothing) {
  EXPECT_EQ(governor_.set_limit("much").error().code, ErrorCode::kInvalidArgument);
  EXPECT_EQ(governor_.set_limit("0").error().code, ErrorCode::kInvalidArgument);
  EXPECT_EQ(governor_.state().limit_bytes, first_);
  EXPECT_EQ(Governor().set_limit("1GiB").error().code, ErrorCode::kInvalidArgument);
  Governor old = governor_;
  governor_.close();
  EXPECT_EQ(old.set_limit("1GiB").error().code, ErrorCode::kInvalidArgument);
}

TEST_F(LimitTest, NeverPassesTheOtherBounds) {
  const LimitChange change = governor_.set_limit("4096TiB", "plimsoll limit").or_throw();
  EXPECT_LT(change.asked_bytes, 4096LL << 40);
  EXPECT_NE(governor_.limit().explain().find("plimsoll limit"), std::string::npos);
}

// The kernel's word, from files laid out here: proc's own but for the cgroup.
class KernelPressureTest : public LimitTest {
 protected:
  KernelPressureTest()
      : root_(std::filesystem::temp_directory_path() /
              ("plimsoll-kernel-" + std::to_string(::getpid()))) {
    governor_.close();
    write("proc/meminfo", "MemTotal: 67108864 kB\nMemAvailable: 33554432 kB\n");
    write("proc/self/cgroup", "0::/box\n");
    write("cgroup/box/memory.events", "high 0\nmax 0\noom 0\n");
    write("cgroup/box/memory.pressure", "full avg10=0.00 avg60=0.00 avg300=0.00 total=0\n");
    GovernorOptions options;
    options.memory_limit = std::to_string(first_);
    options.proc_root = root_ / "proc";
    options.cgroup_root = root_ / "cgroup";
    governor_ = Governor::create(options).or_throw();
  }
  ~KernelPressureTest() override { std::filesystem::remove_all(root_); }
  KernelPressureTest(const KernelPressureTest&) = delete;
  KernelPressureTest& operator=(const KernelPressureTest&) = delete;
  void write(const std::string& path, const std::string& text) const {
    std::filesystem::create_directories((root_ / path).parent_path());
    std::ofstream(root_ / path) << text;
  }
  std::filesystem::path root_;
};

TEST_F(KernelPressureTest, AStallShrinksOnceInAWhileAndNeverStops) {
  SlabCache cache(governor_, 200_MiB);
  EXPECT_EQ(governor_.step_boundary().kernel, KernelPressure::kNone);
  EXPECT_EQ(cache.leased(), 200_MiB);
  write("cgroup/box/memory.pressure", "full avg10=35.00 avg60=0.00 avg300=0.00 total=9\n");
  std::this_thread::sleep_for(std::chrono::milliseconds(120));
  const PressureReport report = governor_.step_boundary();
  EXPECT_EQ(report.kernel, KernelPressure::kStalled);
  EXPECT_GT(report.shrunk_bytes, 20_MiB);
  EXPECT_FALSE(report.stop);
  EXPECT_FALSE(report.pressure);
  const std::int64_t small = cache.leased();
  EXPECT_EQ(small, 200_MiB - report.shrunk_bytes);
  std::this_thread::sleep_for(std::chrono::milliseconds(120));
  EXPECT_EQ(governor_.step_boundary().kernel, KernelPressure::kStalled);
  EXPECT_EQ(cache.leased(), small);  // Neither smaller nor back so soon.
}

TEST_F(KernelPressureTest, ABoundThatWasMetPurgesAndShrinksNothing) {
  SlabCache cache(governor_, 200_MiB);
  write("cgroup/box/memory.events", "high 0\nmax 3\noom 0\n");
  EXPECT_EQ(governor_.step_boundary().kernel, KernelPressure::kTight);
  EXPECT_EQ(cache.leased(), 200_MiB);
}

}  // namespace
}  // namespace plimsoll
