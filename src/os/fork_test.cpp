// SPDX-License-Identifier: Apache-2.0
#include "os/fork.h"

#include <filesystem>
#include <fstream>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include <fcntl.h>
#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

#include "os/range_locks.h"

namespace plimsoll {
namespace {

class ForkTest : public ::testing::Test {
 protected:
  ForkTest()
      : path_(std::filesystem::temp_directory_path() /
              ("plimsoll-fork-" + std::to_string(::getpid()))) {
    std::ofstream(path_) << "short";
  }
  ~ForkTest() override { std::filesystem::remove(path_); }
  ForkTest(const ForkTest&) = delete;
  ForkTest& operator=(const ForkTest&) = delete;

  // What a forked child answers.
  template <class Asked>
  static int in_child(Asked asked) {
    const ::pid_t child = ::fork();
    if (child == 0) {
      ::_exit(asked());
    }
    int status = -1;
    EXPECT_EQ(::waitpid(child, &status, 0), child);
    return WIFEXITED(status) ? WEXITSTATUS(status) : -1;
  }
  static bool is_open(int descriptor) { return ::fcntl(descriptor, F_GETFD) >= 0; }

  const std::filesystem::path path_;
};

TEST_F(ForkTest, AMarkKnowsTheProcessThatMadeIt) {
  const ForkMark mark;
  EXPECT_FALSE(mark.forked());
  EXPECT_EQ(in_child([&] {
              const bool child = mark.forked() && !ForkMark().forked();
              const ForkMark own;
              return child && in_child([&] { return mark.forked() && own.forked() ? 1 : 0; }) == 1;
            }),
            1);
  EXPECT_FALSE(mark.forked());
}

TEST_F(ForkTest, AChildHasNoneOfTheDescriptors) {
  OwnDescriptor first = OwnDescriptor::open(path_, O_RDONLY);
  OwnDescriptor second = OwnDescriptor::open(path_, O_RDONLY);
  OwnDescriptor third = OwnDescriptor::open(path_, O_RDONLY);
  const OwnDescriptor moved = std::move(second);  // From the middle of the list,
  first = OwnDescriptor();                        // and its end.
  const int there = moved.get();
  const int kept = third.get();
  ASSERT_TRUE(is_open(there) && is_open(kept));
  EXPECT_EQ(in_child([&] {
              return moved.get() == -1 && third.get() == -1 && !is_open(there) && !is_open(kept);
            }),
            1);
  EXPECT_TRUE(is_open(there) && is_open(kept));
  third = OwnDescriptor();
  EXPECT_FALSE(is_open(kept));
  EXPECT_EQ(OwnDescriptor::open(path_ / "none", O_RDONLY).get(), -1);
}

// A worker that outlives its killed parent must not keep the parent's lock.
TEST_F(ForkTest, ALockEndsWithItsOwnerThoughAChildLives) {
  RangeLocks other = RangeLocks::open(path_, RangeLocks::Access::kReadWrite).or_throw();
  int hold[2];
  ASSERT_EQ(::pipe(hold), 0);
  ::pid_t child = -1;
  {
    RangeLocks owner = RangeLocks::open(path_, RangeLocks::Access::kReadWrite).or_throw();
    ASSERT_EQ(owner.try_lock(0, RangeLocks::Kind::kExclusive), RangeLocks::Taken::kYes);
    child = ::fork();
    if (child == 0) {
      ::close(hold[1]);
      char end = 0;
      ::_exit(::read(hold[0], &end, 1) == 0 ? 0 : 1);  // Until the parent lets go.
    }
    EXPECT_EQ(other.try_lock(0, RangeLocks::Kind::kShared), RangeLocks::Taken::kHeldByOthers);
  }
  EXPECT_EQ(other.try_lock(0, RangeLocks::Kind::kShared), RangeLocks::Taken::kYes);
  ::close(hold[1]);
  ::close(hold[0]);
  EXPECT_EQ(::waitpid(child, nullptr, 0), child);
}

TEST_F(ForkTest, ForksWhileOtherThreadsOpenAndClose) {
  std::vector<std::jthread> threads;
  for (int i = 0; i < 2; ++i) {
    threads.emplace_back([&](const std::stop_token& stop) {
      while (!stop.stop_requested()) {
        OwnDescriptor own = OwnDescriptor::open(path_, O_RDONLY);
        const OwnDescriptor moved = std::move(own);
      }
    });
  }
  for (int round = 0; round < 50; ++round) {
    EXPECT_EQ(in_child([&] {
                const OwnDescriptor mine = OwnDescriptor::open(path_, O_RDONLY);
                return mine.get() >= 0;
              }),
              1);
  }
}

}  // namespace
}  // namespace plimsoll
