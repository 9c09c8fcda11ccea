// SPDX-License-Identifier: Apache-2.0
#include "os/range_locks.h"

#include <csignal>
#include <filesystem>
#include <fstream>
#include <optional>
#include <tuple>

#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

namespace plimsoll {
namespace {

using Kind = RangeLocks::Kind;
using Taken = RangeLocks::Taken;

class RangeLocksTest : public ::testing::Test {
 protected:
  RangeLocksTest()
      : path_(std::filesystem::temp_directory_path() /
              ("plimsoll-range-locks-" + std::to_string(::getpid()))) {
    std::ofstream(path_) << "short";
  }
  ~RangeLocksTest() override { std::filesystem::remove(path_); }
  RangeLocksTest(const RangeLocksTest&) = delete;
  RangeLocksTest& operator=(const RangeLocksTest&) = delete;

  [[nodiscard]] RangeLocks open(bool writable = true) const {
    using Access = RangeLocks::Access;
    return RangeLocks::open(path_, writable ? Access::kReadWrite : Access::kRead).or_throw();
  }

  const std::filesystem::path path_;
};

TEST_F(RangeLocksTest, SharedLocksStandTogetherAndExclusiveOnesAlone) {
  constexpr std::int64_t kByte = 1LL << 40;  // Far behind the end of the file.
  RangeLocks one = open();
  RangeLocks two = open(false);
  EXPECT_EQ(one.try_lock(kByte, Kind::kShared), Taken::kYes);
  EXPECT_EQ(two.try_lock(kByte, Kind::kShared), Taken::kYes);
  EXPECT_EQ(one.try_lock(kByte, Kind::kExclusive), Taken::kHeldByOthers);
  two.unlock(kByte);
  EXPECT_EQ(one.try_lock(kByte, Kind::kExclusive), Taken::kYes);
  EXPECT_EQ(two.try_lock(kByte, Kind::kShared), Taken::kHeldByOthers);
  EXPECT_EQ(two.try_lock(kByte + 1, Kind::kShared), Taken::kYes);
  EXPECT_EQ(std::filesystem::file_size(path_), 5U);
}

TEST_F(RangeLocksTest, OthersAreSeenAndOneselfIsNot) {
  RangeLocks one = open();
  RangeLocks two = open();
  EXPECT_EQ(one.lock(100, Kind::kShared), Taken::kYes);
  EXPECT_FALSE(one.held_by_others(100, 1));
  EXPECT_TRUE(two.held_by_others(100, 1));
  EXPECT_FALSE(two.held_by_others(101, 1));
  EXPECT_TRUE(two.held_by_others(0, 0)) << "0 bytes: all that follow";
  EXPECT_FALSE(two.held_by_others(101, 0));
  EXPECT_FALSE(two.held_by_others(100, 1, Kind::kShared));
  EXPECT_EQ(one.lock(101, Kind::kExclusive), Taken::kYes);
  EXPECT_TRUE(two.held_by_others(101, 1, Kind::kShared));
  RangeLocks moved = std::move(one);
  EXPECT_TRUE(two.held_by_others(100, 1));
  moved = RangeLocks();
  EXPECT_FALSE(two.held_by_others(100, 1)) << "closed";
}

TEST_F(RangeLocksTest, EndWithTheObjectThoughAChildHasItsDescriptorStill) {
  std::optional<RangeLocks> one(open());
  RangeLocks two = open();
  EXPECT_EQ(one->lock(100, Kind::kShared), Taken::kYes);
  const int copy = ::dup(one->descriptor());
  ASSERT_GE(copy, 0);
  one.reset();
  EXPECT_FALSE(two.held_by_others(100, 1));
  ::close(copy);
}

TEST_F(RangeLocksTest, EndWithTheProcessThatHeldThem) {
  int ready[2] = {-1, -1};
  ASSERT_EQ(::pipe(ready), 0);
  const ::pid_t child = ::fork();
  if (child == 0) {
    RangeLocks held = open();
    const char taken = held.try_lock(7, Kind::kShared) == Taken::kYes ? 'y' : 'n';
    std::ignore = ::write(ready[1], &taken, 1);
    ::pause();
    ::_exit(0);
  }
  char taken = 0;
  ASSERT_EQ(::read(ready[0], &taken, 1), 1);
  ASSERT_EQ(taken, 'y');
  RangeLocks here = open();
  EXPECT_TRUE(here.held_by_others(7, 1));
  EXPECT_EQ(here.try_lock(7, Kind::kExclusive), Taken::kHeldByOthers);
  ASSERT_EQ(::kill(child, SIGKILL), 0);
  ASSERT_EQ(::waitpid(child, nullptr, 0), child);
  EXPECT_FALSE(here.held_by_others(7, 1));
  EXPECT_EQ(here.lock(7, Kind::kExclusive), Taken::kYes);
  ::close(ready[0]);
  ::close(ready[1]);
}

TEST_F(RangeLocksTest, AMissingFileIsNamed) {
  const auto missing = RangeLocks::open(path_.string() + ".not", RangeLocks::Access::kRead);
  ASSERT_FALSE(missing);
  EXPECT_EQ(missing.error().code, ErrorCode::kNotFound);
}

}  // namespace
}  // namespace plimsoll
