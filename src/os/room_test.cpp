// SPDX-License-Identifier: Apache-2.0
//
// Goal: a write that finds the disk full waits for room and is then made, wherever a RoomWait is;
// it fails where none is, and when the program is asked to end.
//
// Method: every write fails as on a full disk until the test has seen that one waits.
#include "os/room.h"

#include <atomic>
#include <cerrno>
#include <filesystem>
#include <string>
#include <thread>
#include <vector>

#include <gtest/gtest.h>
#include <unistd.h>

#include "base/check.h"
#include "os/directories.h"
#include "os/file.h"
#include "os/file_faults.h"

namespace plimsoll {
namespace {

namespace fs = std::filesystem;

class S04RoomTest : public testing::Test {
 protected:
  void SetUp() override { fs::create_directories(root_); }
  void TearDown() override {
    clear_file_fault();
    fs::remove_all(root_);
  }

  RoomWait wait_below(const fs::path& place) {
    return RoomWait({place}, {.may_wait = [this] { return may_wait_.load(); },
                              .stops = [this] { return stops_.load(); },
                              .tell = [this](const std::string& what) { told_.push_back(what); }});
  }

  static void fill(FileCall call) {
    set_file_fault({.call = call, .os_errno = ENOSPC, .keeps_failing = true});
  }

  const fs::path root_{fs::temp_directory_path() / ("room-" + std::to_string(::getpid()))};
  std::atomic<bool> may_wait_{true};
  std::atomic<bool> stops_{false};
  std::vector<std::string> told_;  // Under the lock of the RoomWait.
};

Result<void> write_file(const fs::path& path) {
  PLIMSOLL_TRY(File file, File::open(path, FileMode::kCreate));
  const std::vector<std::byte> bytes(100'000, std::byte{7});
  return file.write_at(0, bytes);
}

Result<void> make_directory(const fs::path& path) {
  PLIMSOLL_TRY(const bool made, make_directories(path));
  return made ? Result<void>{} : fail(ErrorCode::kInternal, "it was there");
}

void wait_until_it_waits(const RoomWait& room) {
  while (!room.waits()) {
    std::this_thread::yield();
  }
}

TEST_F(S04RoomTest, AWriteWaitsForRoomAndIsMadeWhole) {
  RoomWait room = wait_below(root_);
  fill(FileCall::kWrite);
  Result<void> done = fail(ErrorCode::kInternal, "not yet");
  std::jthread writes([&] { done = write_file(root_ / "file"); });
  wait_until_it_waits(room);
  clear_file_fault();
  writes.join();
  EXPECT_TRUE(done) << done.error().to_string();
  EXPECT_EQ(fs::file_size(root_ / "file"), 100'000);
  EXPECT_FALSE(room.waits());
  ASSERT_EQ(told_.size(), 2);
  EXPECT_NE(told_[0].find((root_ / "file").string()), std::string::npos) << told_[0];
  EXPECT_EQ(told_[1], "");
}

TEST_F(S04RoomTest, NewNamesWaitToo) {
  RoomWait room = wait_below(root_);
  for (const FileCall call : {FileCall::kMakeDirectory, FileCall::kRename}) {
    fs::remove_all(root_ / "made");
    write_file(root_ / "old").or_throw();
    fill(call);
    Result<void> done = fail(ErrorCode::kInternal, "not yet");
    std::jthread makes([&] {
      done = call == FileCall::kRename ? rename_file(root_ / "old", root_ / "made")
                                       : make_directory(root_ / "made");
    });
    wait_until_it_waits(room);
    clear_file_fault();
    makes.join();
    EXPECT_TRUE(done) << done.error().to_string();
    EXPECT_TRUE(fs::exists(root_ / "made"));
  }
}

TEST_F(S04RoomTest, AStopEndsTheWaitAndEveryLaterOne) {
  RoomWait room = wait_below(root_);
  fill(FileCall::kWrite);
  Result<void> done;
  std::jthread writes([&] { done = write_file(root_ / "file"); });
  wait_until_it_waits(room);
  stops_ = true;
  writes.join();
  ASSERT_FALSE(done);
  EXPECT_EQ(done.error().os_errno, ENOSPC);
  EXPECT_FALSE(room.wait_until_written());
  stops_ = false;
  EXPECT_FALSE(write_file(root_ / "another"));
}

TEST_F(S04RoomTest, WhoWaitsForTheOthersWriteHearsOfIt) {
  RoomWait room = wait_below(root_);
  EXPECT_TRUE(room.wait_until_written());
  fill(FileCall::kWrite);
  std::jthread writes([&] { write_file(root_ / "file").or_throw(); });
  wait_until_it_waits(room);
  bool went_on = false;
  std::jthread waits([&] { went_on = room.wait_until_written(); });
  clear_file_fault();
  writes.join();
  waits.join();
  EXPECT_TRUE(went_on);
}

TEST_F(S04RoomTest, ElsewhereAndWhereNobodyCouldEndItAWriteFailsAtOnce) {
  RoomWait room = wait_below(root_ / "here");
  fill(FileCall::kWrite);
  EXPECT_FALSE(write_file(root_ / "there"));
  may_wait_ = false;
  fs::create_directories(root_ / "here");
  EXPECT_FALSE(write_file(root_ / "here" / "file"));
  EXPECT_TRUE(told_.empty());
}

}  // namespace
}  // namespace plimsoll
