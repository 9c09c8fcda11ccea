// SPDX-License-Identifier: Apache-2.0
//
// The governor of a process: made, replaced, closed; and its reclaimers when a lease is refused.
#include <gtest/gtest.h>

#include <atomic>
#include <filesystem>
#include <fstream>
#include <semaphore>
#include <string>
#include <thread>
#include <vector>

#include <sys/wait.h>
#include <unistd.h>

#include "plimsoll/bytes.h"
#include "plimsoll/governor.h"

namespace plimsoll {
namespace {

using namespace literals;

GovernorOptions options(const std::string& limit) {
  return {.memory_limit = limit};
}

class GovernorTest : public testing::Test {
 protected:
  ~GovernorTest() override { Governor::current().close(); }
  GovernorTest() = default;
  GovernorTest(const GovernorTest&) = delete;
  GovernorTest& operator=(const GovernorTest&) = delete;
};

TEST_F(GovernorTest, KnowsItsLimitItsBaselineAndItsForeignFloor) {
  const Governor governor = Governor::create(options("800MiB")).or_throw();
  const LedgerState state = governor.state();
  EXPECT_EQ(state.limit_bytes, 800_MiB);
  EXPECT_EQ(governor.limit().explain(), "800.0 MiB (user: --memory-limit)");
  EXPECT_GT(state.baseline_bytes, 0);
  EXPECT_EQ(state.committed_bytes, 64_MiB);
  EXPECT_EQ(state.pools[static_cast<std::size_t>(Tag::kForeign)].floor_bytes, 64_MiB);
  EXPECT_EQ(state.free_bytes(), 800_MiB - 64_MiB - state.baseline_bytes);
  EXPECT_GT(governor.disk_limit_bytes(), 0);
}

TEST_F(GovernorTest, TakesTheSmallerOfADiskLimitAndTheFreeSpace) {
  GovernorOptions wanted = options("800MiB");
  wanted.disk_limit = "1MiB";
  wanted.directory = "/tmp/not/made/yet";
  EXPECT_EQ(Governor::create(wanted).or_throw().disk_limit_bytes(), 1_MiB);
  wanted.disk_limit = "4096TiB";
  EXPECT_LT(Governor::create(wanted).or_throw().disk_limit_bytes(), 4096LL << 40);
}

TEST_F(GovernorTest, RefusesALimitBelowTheBaselineAndNamesOneThatWouldDo) {
  const auto refused = Governor::create(options("1MiB"));
  ASSERT_FALSE(refused);
  const Error& error = refused.error();
  EXPECT_EQ(error.code, ErrorCode::kOverBudget);
  EXPECT_NE(error.to_string().find("this takes a limit of at least "), std::string::npos)
      << error.to_string();
  EXPECT_FALSE(Governor::current().valid());
  // The next process of the program begins with a little more: 226.8 and 227.0 MiB were seen.
  EXPECT_GE(error.smallest_limit_bytes,
            error.baseline_bytes + error.baseline_bytes / 64 + error.requested_bytes);
  // A little room, as the process itself has grown meanwhile.
  const auto enough = std::to_string(error.smallest_limit_bytes + 8_MiB);
  EXPECT_TRUE(Governor::create(options(enough)));
}

// A machine of 8 GiB, of which so much is left, beside what this process holds.
GovernorOptions on_a_machine_with(std::int64_t available_mib, const std::string& limit) {
  const std::filesystem::path proc = std::filesystem::path(testing::TempDir()) / "governor-proc";
  std::filesystem::create_directories(proc);
  std::ofstream(proc / "meminfo") << "MemTotal: 8388608 kB\nMemAvailable: " << available_mib * 1024
                                  << " kB\n";
  GovernorOptions laid_out = options(limit);
  laid_out.proc_root = proc;
  laid_out.cgroup_root = proc;
  return laid_out;
}

TEST_F(GovernorTest, R15WhatTheProcessHoldsIsNoPartOfWhatIsAvailable) {
  const std::vector<char> held(300 << 20, 'x');
  const std::int64_t now = read_resident().or_throw().total() >> 20;
  const auto governor = Governor::create(on_a_machine_with(200, std::to_string(now + 100) + "MiB"));
  ASSERT_TRUE(governor) << governor.error().to_string();
  EXPECT_EQ(governor->state().limit_bytes, (now + 100) << 20);
  EXPECT_EQ(governor->limit().candidates[governor->limit().winner].source, "user");
}

TEST_F(GovernorTest, R15WhereTheMachineIsTheBoundItIsNamedInsteadOfALargerLimit) {
  const auto refused = Governor::create(on_a_machine_with(1, "6GiB"));
  ASSERT_FALSE(refused);
  const std::string text = refused.error().to_string();
  for (const char* part : {"available: ", "below the 6.0 GiB of --memory-limit", "held before",
                           "memory_limit is not what holds here: free memory"}) {
    EXPECT_NE(text.find(part), std::string::npos) << text;
  }
  // The smallest named does, where it is there to be had.
  const std::int64_t mib = (refused.error().smallest_limit_bytes + (1 << 20) - 1) >> 20;
  EXPECT_NE(text.find(std::to_string(mib) + "MiB"), std::string::npos) << text;
  const auto enough = Governor::create(on_a_machine_with(200, std::to_string(mib + 2) + "MiB"));
  EXPECT_TRUE(enough) << enough.error().to_string();
}

TEST_F(GovernorTest, R60ANumberWithoutAUnitIsToldApart) {
  const auto refused = Governor::create(options("2"));
  ASSERT_FALSE(refused);
  const std::string text = refused.error().to_string();
  for (const char* part :
       {"a limit of 2 B (user: --memory-limit) is less than the process needs",
        "this takes a limit of at least ", "a number without a unit counts bytes: write 6GiB"}) {
    EXPECT_NE(text.find(part), std::string::npos) << text;
  }
}

TEST_F(GovernorTest, RefusesBadOptions) {
  EXPECT_EQ(Governor::create(options("much")).error().code, ErrorCode::kInvalidArgument);
  GovernorOptions bad = options("800MiB");
  bad.pressure_fraction = 1.5;
  EXPECT_EQ(Governor::create(bad).error().code, ErrorCode::kInvalidArgument);
  bad = options("800MiB");
  bad.foreign_bytes = -1;
  EXPECT_EQ(Governor::create(bad).error().code, ErrorCode::kInvalidArgument);
  bad = options("800MiB");
  bad.disk_limit = "huge";
  EXPECT_EQ(Governor::create(bad).error().code, ErrorCode::kInvalidArgument);
}

TEST_F(GovernorTest, IsReplacedWhenItHoldsNothing) {
  Governor first = Governor::create(options("800MiB")).or_throw();
  first.reserve(Tag::kTensor, 1_MiB).or_throw() = Lease();
  Governor second = Governor::create(options("700MiB")).or_throw();
  EXPECT_EQ(Governor::current().state().limit_bytes, 700_MiB);
  const auto late = first.reserve(Tag::kTensor, 1);
  ASSERT_FALSE(late);
  EXPECT_EQ(late.error().code, ErrorCode::kInvalidArgument);
  EXPECT_EQ(late.error().to_string(), "this governor was closed or replaced: use the current one");
  EXPECT_TRUE(second.reserve(Tag::kTensor, 1));
  first.close();  // An old handle closes nothing but itself.
  EXPECT_TRUE(Governor::current().valid());
}

TEST_F(GovernorTest, IsReplacedWhenOnlyForeignBytesAreLeased) {
  Governor first = Governor::create(options("800MiB")).or_throw();
  const Lease foreign = first.reserve(Tag::kForeign, 10_MiB).or_throw();
  const Governor second = Governor::create(options("800MiB")).or_throw();
  EXPECT_EQ(second.state().orphan_bytes, 10_MiB);
}

// A cache that nobody uses, held by a lease until it is asked to give it back.
class IdleCache : public Reclaimer {
 public:
  explicit IdleCache(Governor& governor)
      : lease_(governor.reserve(Tag::kTensor, 1_MiB).or_throw()),
        handle_(governor.add_reclaimer(this).or_throw()) {}
  std::int64_t reclaim(PressureMove move, std::int64_t) noexcept override {
    const std::int64_t held = move == PressureMove::kPurge ? lease_.bytes() : 0;
    lease_.shrink(lease_.bytes() - held);
    return held;
  }
  [[nodiscard]] const char* name() const noexcept override { return "idle"; }

 private:
  Lease lease_;
  ReclaimerHandle handle_;
};

TEST_F(GovernorTest, IsReplacedWhenAllItHoldsIsACacheThatAPurgeGivesBack) {
  Governor first = Governor::create(options("800MiB")).or_throw();
  const IdleCache cache(first);
  EXPECT_EQ(first.state().leased_bytes, 1_MiB);
  EXPECT_TRUE(Governor::create(options("700MiB")));
  EXPECT_FALSE(first.reserve(Tag::kOther, 1));
}

TEST_F(GovernorTest, IsNotReplacedWhileItHoldsAnythingAndSaysWhoHolds) {
  Governor first = Governor::create(options("800MiB")).or_throw();
  const Lease tensors = first.reserve(Tag::kTensor, 64_MiB).or_throw();
  const Lease rows = first.reserve(Tag::kEmbedding, 3_MiB).or_throw();
  const auto second = Governor::create(options("700MiB"));
  ASSERT_FALSE(second);
  EXPECT_EQ(second.error().code, ErrorCode::kInvalidArgument);
  EXPECT_EQ(second.error().to_string(),
            "another governor still holds tensors 64.0 MiB, rows 3.0 MiB: "
            "close it, or free what holds its memory, before making a new one");
  EXPECT_EQ(Governor::current().state().limit_bytes, 800_MiB);
}

TEST_F(GovernorTest, LeavesOrphansThatItsSuccessorCannotGrant) {
  Governor first = Governor::create(options("800MiB")).or_throw();
  Lease kept = first.reserve(Tag::kTensor, 100_MiB).or_throw();
  first.close();
  EXPECT_FALSE(Governor::current().valid());
  const Governor second = Governor::create(options("800MiB")).or_throw();
  const LedgerState with = second.state();
  EXPECT_EQ(with.orphan_bytes, 100_MiB);
  kept = Lease();
  EXPECT_EQ(second.state().orphan_bytes, 0);
  EXPECT_EQ(second.state().free_bytes(), with.free_bytes() + 100_MiB);
}

TEST_F(GovernorTest, AnEmptyHandleRefusesPolitely) {
  Governor none;
  EXPECT_FALSE(none.valid());
  EXPECT_EQ(none.reserve(Tag::kOther, 1).error().code, ErrorCode::kInvalidArgument);
  EXPECT_EQ(none.admit({}).error().code, ErrorCode::kInvalidArgument);
  EXPECT_EQ(none.rebaseline(), 0);
  EXPECT_FALSE(none.step_boundary().pressure);
  EXPECT_EQ(none.state().limit_bytes, 0);
  none.release_admission({});
  none.close();
  EXPECT_THROW(static_cast<void>(none.limit()), Exception);
}

TEST_F(GovernorTest, MeasuresItsBaselineAgainOnlyWhileNothingIsLeased) {
  Governor governor = Governor::create(options("800MiB")).or_throw();
  const std::int64_t before = governor.state().baseline_bytes;
  const std::vector<char> stays(32_MiB, 'x');  // As a library's tables would.
  {
    const Lease lease = governor.reserve(Tag::kOther, 1).or_throw();
    EXPECT_EQ(governor.rebaseline(), before);
  }
  EXPECT_GE(governor.rebaseline(), before + 30_MiB);
  EXPECT_EQ(stays.back(), 'x');
}

// Holds a lease like a cache's, and gives it back when asked.
class Cache : public Reclaimer {
 public:
  explicit Cache(Lease lease) : lease_(std::move(lease)) {}
  std::int64_t reclaim(PressureMove move, std::int64_t wanted_bytes) noexcept override {
    moves.push_back(move);
    wanted = wanted_bytes;
    const std::int64_t held = lease_.bytes();
    lease_.shrink(held - std::min(held, wanted_bytes));
    return held - lease_.bytes();
  }
  [[nodiscard]] const char* name() const noexcept override { return "cache"; }
  [[nodiscard]] std::int64_t held() const { return lease_.bytes(); }

  std::vector<PressureMove> moves;
  std::int64_t wanted{0};

 private:
  Lease lease_;
};

TEST_F(GovernorTest, PurgesOnceBeforeItRefuses) {
  Governor governor = Governor::create(options("800MiB")).or_throw();
  Cache cache(governor.reserve(Tag::kTensor, 200_MiB).or_throw());
  const ReclaimerHandle handle = governor.add_reclaimer(&cache).or_throw();
  const std::int64_t free = governor.state().free_bytes();
  EXPECT_FALSE(governor.try_reserve(Tag::kLoader, free + 50_MiB));
  EXPECT_TRUE(cache.moves.empty());  // try_reserve() never calls out.
  const Lease lease = governor.reserve(Tag::kLoader, free + 50_MiB).or_throw();
  EXPECT_EQ(cache.moves, std::vector{PressureMove::kPurge});
  EXPECT_EQ(cache.wanted, 50_MiB);
  EXPECT_EQ(cache.held(), 150_MiB);
  EXPECT_FALSE(governor.reserve(Tag::kLoader, 151_MiB));
  EXPECT_EQ(cache.moves.size(), 2U);
}

TEST_F(GovernorTest, ForgetsAReclaimerWithItsHandle) {
  Governor governor = Governor::create(options("800MiB")).or_throw();
  Cache cache(governor.reserve(Tag::kTensor, 1_MiB).or_throw());
  {
    ReclaimerHandle handle = governor.add_reclaimer(&cache).or_throw();
    ReclaimerHandle moved = std::move(handle);
    handle = std::move(moved);
  }
  EXPECT_FALSE(governor.reserve(Tag::kLoader, 4_GiB));
  EXPECT_TRUE(cache.moves.empty());
}

TEST_F(GovernorTest, HoldsOnlySoManyReclaimers) {
  Governor governor = Governor::create(options("800MiB")).or_throw();
  Cache cache{Lease()};
  std::vector<ReclaimerHandle> handles;
  for (int i = 0; i < kMaxReclaimers; ++i) {
    handles.push_back(governor.add_reclaimer(&cache).or_throw());
  }
  EXPECT_EQ(governor.add_reclaimer(&cache).error().code, ErrorCode::kInternal);
  handles.pop_back();
  EXPECT_TRUE(governor.add_reclaimer(&cache));
}

// Asks the governor for memory from within reclaim(): unwise, but it must not hang.
class Greedy : public Reclaimer {
 public:
  explicit Greedy(Governor governor) : governor_(std::move(governor)) {}
  std::int64_t reclaim(PressureMove, std::int64_t wanted) noexcept override {
    ++calls;
    refused += governor_.reserve(Tag::kOther, wanted + 4_GiB) ? 0 : 1;
    return 0;
  }
  [[nodiscard]] const char* name() const noexcept override { return "greedy"; }
  int calls{0};
  int refused{0};

 private:
  Governor governor_;
};

TEST_F(GovernorTest, DoesNotCallAReclaimerFromWithinItself) {
  Governor governor = Governor::create(options("800MiB")).or_throw();
  Greedy greedy(governor);
  const ReclaimerHandle handle = governor.add_reclaimer(&greedy).or_throw();
  EXPECT_FALSE(governor.reserve(Tag::kOther, 4_GiB));
  EXPECT_EQ(greedy.calls, 1);
  EXPECT_EQ(greedy.refused, 1);
}

// Blocks in reclaim() until released.
class Slow : public Reclaimer {
 public:
  std::int64_t reclaim(PressureMove, std::int64_t) noexcept override {
    entered.release();
    leave.acquire();
    ended = true;
    return 0;
  }
  [[nodiscard]] const char* name() const noexcept override { return "slow"; }
  std::binary_semaphore entered{0};
  std::binary_semaphore leave{0};
  std::atomic<bool> ended{false};
};

TEST_F(GovernorTest, WaitsForARunningReclaimerBeforeForgettingIt) {
  Governor governor = Governor::create(options("800MiB")).or_throw();
  Slow slow;
  auto handle = std::make_unique<ReclaimerHandle>(governor.add_reclaimer(&slow).or_throw());
  std::jthread caller([&] { EXPECT_FALSE(governor.reserve(Tag::kOther, 4_GiB)); });
  slow.entered.acquire();
  std::jthread releaser([&] { slow.leave.release(); });
  handle.reset();  // Returns only when reclaim() has.
  EXPECT_TRUE(slow.ended.load());
}

TEST_F(GovernorTest, AForkedChildHasAGovernorOfItsOwn) {
  Governor governor = Governor::create(options("800MiB")).or_throw();
  const Lease lease = governor.reserve(Tag::kOther, 300_MiB).or_throw();
  const ::pid_t child = ::fork();
  if (child == 0) {
    const bool none = !Governor::current().valid();
    auto own = Governor::create(options("600MiB"));
    const bool granted = own && own->reserve(Tag::kOther, 50_MiB).has_value();
    ::_exit(none && granted && Governor::current().valid() ? 7 : 0);
  }
  int status = 0;
  ASSERT_EQ(::waitpid(child, &status, 0), child);
  EXPECT_EQ(WEXITSTATUS(status), 7);
  EXPECT_TRUE(Governor::current().valid());
  EXPECT_EQ(lease.bytes(), 300_MiB);
}

TEST_F(GovernorTest, GrantsNoMoreThanTheLimitToManyThreadsAtOnce) {
  Governor governor = Governor::create(options("800MiB")).or_throw();
  Cache cache(governor.reserve(Tag::kTensor, 50_MiB).or_throw());
  const ReclaimerHandle handle = governor.add_reclaimer(&cache).or_throw();
  std::atomic<std::int64_t> lowest_free{INT64_MAX};
  {
    std::vector<std::jthread> threads;
    for (int t = 0; t < 4; ++t) {
      threads.emplace_back([&] {
        for (int i = 0; i < 500; ++i) {
          const auto lease = governor.reserve(Tag::kOther, 300_MiB);
          const std::int64_t free = governor.state().free_bytes();
          std::int64_t lowest = lowest_free.load();
          while (free < lowest && !lowest_free.compare_exchange_weak(lowest, free)) {
          }
        }
      });
    }
  }
  EXPECT_GE(lowest_free.load(), 0);
}

// Goal: whatever lock a thread of the parent holds at the fork, a child waits for none of them.
TEST_F(GovernorTest, AForkedChildReadsItAndChangesNothing) {
  Governor governor = Governor::create(options("800MiB")).or_throw();
  auto held = governor.reserve(Tag::kOther, 1_MiB).or_throw();
  std::vector<std::jthread> threads;
  for (int t = 0; t < 2; ++t) {
    threads.emplace_back([&governor](const std::stop_token& stop) {
      while (!stop.stop_requested()) {
        static_cast<void>(governor.reserve(Tag::kOther, 1_MiB));
        static_cast<void>(governor.state());
      }
    });
  }
  for (int i = 0; i < 100; ++i) {
    const ::pid_t child = ::fork();
    if (child == 0) {
      ::alarm(20);
      const auto refused = [](const auto& done) {
        return !done && done.error().to_string().find("forked after") != std::string::npos;
      };
      bool right = governor.state().limit_bytes == 800_MiB && held.room() > 0 &&
                   governor.limit().limit_bytes == 800_MiB && !Governor::current().valid() &&
                   refused(governor.reserve(Tag::kOther, 1)) && refused(held.grow(2_MiB)) &&
                   refused(governor.admit({})) && refused(governor.set_limit("700MiB"));
      held = Lease{};
      governor.close();
      right = right && Governor::create(options("900MiB")).has_value();
      ::_exit(right ? 0 : 1);
    }
    int status = -1;
    ASSERT_EQ(::waitpid(child, &status, 0), child);
    ASSERT_TRUE(WIFEXITED(status) && WEXITSTATUS(status) == 0) << status;
  }
  threads.clear();
  EXPECT_EQ(governor.state().pools[static_cast<std::size_t>(Tag::kOther)].leased_bytes, 1_MiB);
}

}  // namespace
}  // namespace plimsoll
