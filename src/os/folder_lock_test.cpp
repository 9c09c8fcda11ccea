// SPDX-License-Identifier: Apache-2.0
#include "os/folder_lock.h"

#include <cerrno>
#include <chrono>
#include <csignal>
#include <filesystem>
#include <fstream>
#include <optional>
#include <string>
#include <thread>
#include <tuple>

#include <fmt/format.h>
#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

#include "os/file_faults.h"

namespace plimsoll {
namespace {

namespace fs = std::filesystem;
using namespace std::chrono_literals;

constexpr FolderLock::Words kWords{.doing = "writes there", .advice = "wait for it"};

class FolderLockTest : public ::testing::Test {
 protected:
  FolderLockTest() { fs::create_directories(root_); }
  ~FolderLockTest() override { fs::remove_all(root_); }
  FolderLockTest(const FolderLockTest&) = delete;
  FolderLockTest& operator=(const FolderLockTest&) = delete;

  [[nodiscard]] std::string refusal() const {
    const auto refused = FolderLock::take(folder_, kWords);
    EXPECT_FALSE(refused);
    EXPECT_TRUE(refused || refused.error().code == ErrorCode::kInvalidArgument);
    return refused ? "" : refused.error().to_string();
  }

  const fs::path root_ = fs::temp_directory_path() / fmt::format("plimsoll-lock-{}", ::getpid());
  const fs::path folder_ = root_ / "folder";
};

TEST_F(FolderLockTest, IsOneObjectsUntilItIsGone) {
  EXPECT_FALSE(FolderLock::held(folder_));
  std::optional<FolderLock> first(FolderLock::take(folder_, kWords).or_throw());
  EXPECT_TRUE(FolderLock::held(folder_));
  EXPECT_EQ(refusal(), fmt::format("{}: this process ({}) writes there: wait for it",
                                   folder_.string(), ::getpid()));
  FolderLock second = std::move(*first);
  first.reset();
  EXPECT_TRUE(FolderLock::held(folder_));
  second = FolderLock();
  EXPECT_FALSE(FolderLock::held(folder_));
  EXPECT_TRUE(FolderLock::take(folder_, kWords));
  EXPECT_FALSE(FolderLock::held(folder_));
}

TEST_F(FolderLockTest, WaitsForWhoHoldsItAndNoLonger) {
  std::optional<FolderLock> first(FolderLock::take(folder_, kWords).or_throw());
  EXPECT_FALSE(FolderLock::take(folder_, kWords, 20ms));
  std::thread other([&first] {
    std::this_thread::sleep_for(50ms);
    first.reset();
  });
  EXPECT_TRUE(FolderLock::take(folder_, kWords, 60s));
  other.join();
}

TEST_F(FolderLockTest, NamesTheProcessThatHoldsItAndEndsWithIt) {
  int ready[2];
  ASSERT_EQ(::pipe(ready), 0);
  const ::pid_t child = ::fork();
  if (child == 0) {
    const auto lock = FolderLock::take(folder_, kWords);
    std::ignore = ::write(ready[1], "y", 1);
    ::pause();
    ::_exit(lock ? 0 : 1);
  }
  char there = 0;
  ASSERT_EQ(::read(ready[0], &there, 1), 1);
  EXPECT_EQ(refusal(),
            fmt::format("{}: process {} writes there: wait for it", folder_.string(), child));
  ASSERT_EQ(::kill(child, SIGKILL), 0);
  ASSERT_EQ(::waitpid(child, nullptr, 0), child);
  EXPECT_TRUE(FolderLock::take(folder_, kWords));
  ::close(ready[0]);
  ::close(ready[1]);
}

TEST_F(FolderLockTest, AnotherMachineIsNamed) {
  const FolderLock lock = FolderLock::take(folder_, kWords).or_throw();
  std::ofstream(folder_ / ".lock") << "17 elsewhere\n";
  EXPECT_EQ(refusal(),
            fmt::format("{}: process 17 on elsewhere writes there: wait for it", folder_.string()));
  std::ofstream(folder_ / ".lock") << "";  // As on a full disk.
  EXPECT_EQ(refusal(),
            fmt::format("{}: another process writes there: wait for it", folder_.string()));
}

TEST_F(FolderLockTest, WhoIsDeadIsNotNamed) {
  const FolderLock lock = FolderLock::take(folder_, kWords).or_throw();
  std::string mine;
  std::getline(std::ifstream(folder_ / ".lock"), mine);
  const ::pid_t dead = ::fork();
  if (dead == 0) {
    ::_exit(0);
  }
  ASSERT_EQ(::waitpid(dead, nullptr, 0), dead);
  // As where one was killed, and the next has the lock and has not signed yet.
  std::ofstream(folder_ / ".lock") << dead << mine.substr(mine.find(' ')) << "\n";
  EXPECT_EQ(refusal(),
            fmt::format("{}: another process writes there: wait for it", folder_.string()));
}

TEST_F(FolderLockTest, AFolderMadeAnewHasALockOfItsOwn) {
  const FolderLock old = FolderLock::take(folder_, kWords).or_throw();
  fs::rename(folder_, root_ / "old");
  EXPECT_FALSE(FolderLock::held(folder_));
  const auto anew = FolderLock::take(folder_, kWords);
  EXPECT_TRUE(anew) << anew.error().to_string();
  EXPECT_TRUE(FolderLock::held(root_ / "old"));
}

TEST_F(FolderLockTest, WhoGivesUpLeavesNothing) {
  FolderLock::take(folder_, kWords).or_throw().abandon();
  EXPECT_FALSE(fs::exists(folder_));
  fs::create_directories(folder_);
  FolderLock::take(folder_, kWords).or_throw().abandon();  // Not its own: it stays.
  EXPECT_TRUE(fs::is_empty(folder_));
}

TEST_F(FolderLockTest, SaysSoWhereThereAreNoLocks) {
  const ScopedFileFault none({.call = FileCall::kLock, .os_errno = ENOLCK, .keeps_failing = true});
  EXPECT_EQ(refusal(),
            folder_.string() +
                ": its file system has no locks (No locks available), so that two processes could "
                "change it at once: choose a directory on a local disk, or mount this one with "
                "locks");
}

TEST_F(FolderLockTest, SaysSoWhereNothingCanBeWritten) {
  fs::create_directories(folder_);
  const ScopedFileFault read_only(
      {.call = FileCall::kOpenToWrite, .os_errno = EROFS, .keeps_failing = true});
  const auto refused = FolderLock::take(folder_, kWords);
  ASSERT_FALSE(refused);
  EXPECT_EQ(refused.error().code, ErrorCode::kIo);
  EXPECT_EQ(refused.error().os_errno, EROFS);
}

}  // namespace
}  // namespace plimsoll
