// SPDX-License-Identifier: Apache-2.0
//
// A limit that another process asks for reaches the governor within a second, whatever the run
// does.
#include "run/limit_requests.h"

#include <gtest/gtest.h>

#include <chrono>
#include <fstream>
#include <optional>
#include <string>
#include <thread>

#include <fmt/format.h>
#include <unistd.h>

#include "memory/admission.h"
#include "memory/slab.h"
#include "plimsoll/bytes.h"
#include "run/run_folder.h"

namespace plimsoll {
namespace {

namespace fs = std::filesystem;
using namespace literals;
using Clock = std::chrono::steady_clock;

class LimitRequestsTest : public ::testing::Test {
 protected:
  LimitRequestsTest()
      : root_(fs::temp_directory_path() /
              fmt::format("plimsoll-limit-{}-{}", ::getpid(),
                          ::testing::UnitTest::GetInstance()->current_test_info()->name())) {
    folder_.emplace(RunFolder::create(root_, "[cosir]\n").or_throw());
    governor_ = Governor::create({.memory_limit = "900MiB"}).or_throw();
  }
  ~LimitRequestsTest() override {
    governor_.close();
    folder_.reset();
    fs::remove_all(root_);
  }
  LimitRequestsTest(const LimitRequestsTest&) = delete;
  LimitRequestsTest& operator=(const LimitRequestsTest&) = delete;

  // Waits for outcomes until there are `count`; the time is the test's bound, not a sleep.
  static std::vector<LimitOutcome> wait_for(LimitRequests& requests, std::size_t count) {
    std::vector<LimitOutcome> all;
    const auto until = Clock::now() + std::chrono::seconds(20);
    while (all.size() < count && Clock::now() < until) {
      for (LimitOutcome& one : requests.take()) {
        all.push_back(std::move(one));
      }
      std::this_thread::sleep_for(std::chrono::milliseconds(5));
    }
    return all;
  }

  fs::path root_;
  std::optional<RunFolder> folder_;
  Governor governor_;
};

TEST_F(LimitRequestsTest, OfARunOfSeveralProcessesAreForAllOfThem) {
  LimitRequests requests(governor_, root_,
                         [](std::int64_t all) { return all - 400_MiB; });  // Others hold so much.
  for (const char* size : {"1100MiB", "300MiB"}) {
    EXPECT_TRUE(ask_for_limit(root_, size).or_throw());
    const auto outcomes = wait_for(requests, 1);
    ASSERT_EQ(outcomes.size(), 1U);
    EXPECT_EQ(outcomes[0].asked, size);
    EXPECT_EQ(governor_.state().limit_bytes, 700_MiB);
    if (size == std::string("300MiB")) {
      ASSERT_FALSE(outcomes[0].change);
      EXPECT_EQ(outcomes[0].change.error().to_string(),
                "300MiB: the run's other processes hold all of it: ask for more");
    }
  }
}

TEST_F(LimitRequestsTest, AreTakenWithinASecondAndLeaveNoFileBehind) {
  LimitRequests requests(governor_, root_);
  const auto asked = Clock::now();
  EXPECT_TRUE(ask_for_limit(root_, "700MiB").or_throw());
  const auto outcomes = wait_for(requests, 1);
  const auto took = Clock::now() - asked;
  ASSERT_EQ(outcomes.size(), 1U);
  EXPECT_EQ(outcomes[0].asked, "700MiB");
  ASSERT_TRUE(outcomes[0].change);
  EXPECT_EQ(outcomes[0].change->before_bytes, 900_MiB);
  EXPECT_EQ(outcomes[0].change->limit_bytes, 700_MiB);
  EXPECT_LT(took, std::chrono::seconds(1));
  EXPECT_EQ(governor_.state().limit_bytes, 700_MiB);
  EXPECT_EQ(governor_.limit().explain(), "700.0 MiB (user: plimsoll limit)");
  for (const auto& entry : fs::directory_iterator(root_)) {
    EXPECT_EQ(entry.path().filename().string().find(".limit"), std::string::npos) << entry.path();
  }
}

TEST_F(LimitRequestsTest, ShrinkASlabWhileTheTrainerIsBusyElsewhere) {
  Admission admission;
  admission.take(governor_, Tag::kFeature, 300_MiB, "cache_bytes").or_throw();
  Slab slab = Slab::create(governor_, Tag::kFeature, 300_MiB).or_throw();
  admission.make_elastic();
  class Cache : public Reclaimer {
   public:
    explicit Cache(Slab& slab) : slab_(slab) {}
    std::int64_t reclaim(PressureMove move, std::int64_t wanted) noexcept override {
      return move == PressureMove::kShrink ? slab_.release_pages(0, wanted) : 0;
    }
    [[nodiscard]] const char* name() const noexcept override { return "cache"; }

   private:
    Slab& slab_;
  } cache(slab);
  const ReclaimerHandle handle = governor_.add_reclaimer(&cache).or_throw();
  LimitRequests requests(governor_, root_);
  const LedgerState before = governor_.state();
  const std::int64_t limit = before.limit_bytes - before.free_bytes() - 100_MiB;
  EXPECT_TRUE(ask_for_limit(root_, std::to_string(limit)).or_throw());
  const auto outcomes = wait_for(requests, 1);
  ASSERT_EQ(outcomes.size(), 1U);
  ASSERT_TRUE(outcomes[0].change);
  EXPECT_TRUE(outcomes[0].change->settled());
  EXPECT_GE(outcomes[0].change->shrunk_bytes, 100_MiB);
  ASSERT_FALSE(outcomes[0].change->evictions.entries().empty());  // The heap may add its own.
  EXPECT_GT(outcomes[0].change->evictions.entries()[0].freed_bytes(), 96_MiB);
  EXPECT_EQ(governor_.state().limit_bytes, limit);
}

TEST_F(LimitRequestsTest, ThatCannotBeReadChangeNothingAndAreReported) {
  EXPECT_EQ(ask_for_limit(root_, "much").error().code, ErrorCode::kInvalidArgument);
  EXPECT_EQ(ask_for_limit(root_, "").error().code, ErrorCode::kInvalidArgument);
  EXPECT_EQ(ask_for_limit(root_ / "none", "1GiB").error().code, ErrorCode::kNotFound);
  LimitRequests requests(governor_, root_);
  std::ofstream(root_ / ".limit.x") << "rubbish\n";
  fs::rename(root_ / ".limit.x", root_ / ".limit");
  const auto outcomes = wait_for(requests, 1);
  ASSERT_EQ(outcomes.size(), 1U);
  ASSERT_FALSE(outcomes[0].change);
  EXPECT_EQ(outcomes[0].change.error().code, ErrorCode::kInvalidArgument);
  EXPECT_EQ(governor_.state().limit_bytes, 900_MiB);
}

TEST_F(LimitRequestsTest, LeaveNothingWhereNobodyTrainsAndNothingOldIsTakenUp) {
  EXPECT_TRUE(ask_for_limit(root_, "700MiB").or_throw());
  EXPECT_TRUE(fs::exists(root_ / ".limit"));
  folder_.reset();
  EXPECT_FALSE(ask_for_limit(root_, "600MiB").or_throw());
  folder_.emplace(RunFolder::open(root_).or_throw());  // A run that goes on begins with its own.
  EXPECT_FALSE(fs::exists(root_ / ".limit"));
}

}  // namespace
}  // namespace plimsoll
