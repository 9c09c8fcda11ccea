// SPDX-License-Identifier: Apache-2.0
#include "os/power_loss.h"

#include <gtest/gtest.h>

#include <cerrno>

#include "os/directories.h"
#include "os/file.h"
#include "os/file_faults.h"
#include "tests/support/array_files.h"

#include <sys/stat.h>
#include <unistd.h>

namespace plimsoll {
namespace {

namespace fs = std::filesystem;
using test::slurp;
using test::spill;

std::span<const std::byte> bytes_of(const std::string& text) {
  return std::as_bytes(std::span(text));
}

class PowerLossTest : public ::testing::Test {
 protected:
  void SetUp() override {
    fs::create_directories(root_);
    record_unsynced({});
  }
  void TearDown() override {
    stop_recording_unsynced();
    fs::remove_all(root_);
  }
  static void lose_all() {
    strike(
        unsynced_changes(), [](std::size_t, std::int64_t) { return false; }, 512);
  }
  const fs::path root_ =
      fs::temp_directory_path() / ("plimsoll-power-" + std::to_string(::getpid()));
  const fs::path path_ = root_ / "file";
};

TEST_F(PowerLossTest, ASyncedWriteStaysAndAnUnsyncedOneMayGo) {
  spill(path_, std::string(2048, 'a'));
  auto file = File::open(path_, FileMode::kReadWrite).or_throw();
  file.write_at(0, bytes_of(std::string(512, 'b'))).or_throw();
  file.sync().or_throw();
  file.write_at(512, bytes_of(std::string(1024, 'c'))).or_throw();
  ASSERT_EQ(unsynced_changes().size(), 1U);
  lose_all();
  EXPECT_EQ(slurp(path_), std::string(512, 'b') + std::string(1536, 'a'));
}

TEST_F(PowerLossTest, AWriteTearsBetweenSectors) {
  spill(path_, std::string(2048, 'a'));
  auto file = File::open(path_, FileMode::kReadWrite).or_throw();
  file.write_at(256, bytes_of(std::string(1024, 'b'))).or_throw();
  EXPECT_EQ(sectors_of(unsynced_changes().at(0), 512), 3);
  strike(
      unsynced_changes(), [](std::size_t, std::int64_t sector) { return sector == 1; }, 512);
  EXPECT_EQ(slurp(path_), std::string(512, 'a') + std::string(512, 'b') + std::string(1024, 'a'));
}

TEST_F(PowerLossTest, ALaterWriteMaySurviveAnEarlierOne) {
  spill(path_, std::string(512, 'a'));
  auto file = File::open(path_, FileMode::kReadWrite).or_throw();
  file.write_at(0, bytes_of(std::string(512, 'b'))).or_throw();
  file.write_at(0, bytes_of(std::string(512, 'c'))).or_throw();
  strike(
      unsynced_changes(), [](std::size_t change, std::int64_t) { return change == 1; }, 512);
  EXPECT_EQ(slurp(path_), std::string(512, 'c'));
  strike(
      unsynced_changes(), [](std::size_t change, std::int64_t) { return change == 0; }, 512);
  EXPECT_EQ(slurp(path_), std::string(512, 'b'));
}

TEST_F(PowerLossTest, AFileThatGrewMayBeShortAgain) {
  spill(path_, "begin");
  auto file = File::open(path_, FileMode::kReadWrite).or_throw();
  file.write_at(5, bytes_of(" end")).or_throw();
  lose_all();
  EXPECT_EQ(slurp(path_), "begin");
}

TEST_F(PowerLossTest, ANewFileNeedsItsDirectorySynced) {
  File::open(path_, FileMode::kCreate).or_throw().sync().or_throw();
  File::open(root_ / "other", FileMode::kCreate).or_throw().sync().or_throw();
  lose_all();
  EXPECT_FALSE(fs::exists(path_));
  File::open(path_, FileMode::kCreate).or_throw().sync().or_throw();
  sync_directory(root_).or_throw();
  EXPECT_TRUE(unsynced_changes().empty());
}

TEST_F(PowerLossTest, AReplacedFileIsTheOldOrTheNew) {
  spill(path_, "old");
  replace_file(path_, "new").or_throw();
  EXPECT_TRUE(unsynced_changes().empty());
  EXPECT_EQ(slurp(path_), "new");
  spill(root_ / "beside", "newer");
  {
    const auto guard = UnsyncedGuard::of_rename(root_ / "beside", path_);
    fs::rename(root_ / "beside", path_);
  }
  lose_all();
  EXPECT_EQ(slurp(path_), "new");
  EXPECT_EQ(slurp(root_ / "beside"), "newer");
}

TEST_F(PowerLossTest, R05_ADirectoryGoesWithAllThatIsInIt) {
  ASSERT_EQ(::mkdir((root_ / "late").c_str(), 0755), 0);  // By others: nobody knows of it.
  make_directories(root_ / "a" / "b").or_throw();
  EXPECT_TRUE(unsynced_changes().empty());
  {
    const auto guard = UnsyncedGuard::of_make_directory(root_ / "c");
    fs::create_directory(root_ / "c");
  }
  replace_file(root_ / "c" / "file", "text").or_throw();
  replace_file(root_ / "a" / "b" / "file", "text").or_throw();
  lose_all();
  EXPECT_FALSE(fs::exists(root_ / "c"));
  EXPECT_EQ(slurp(root_ / "a" / "b" / "file"), "text");
  EXPECT_TRUE(fs::exists(root_ / "late"));
}

TEST_F(PowerLossTest, R05_WhatWasRemovedMayComeBack) {
  spill(path_, "old");
  remove_file(path_).or_throw();
  EXPECT_FALSE(fs::exists(path_));
  lose_all();
  EXPECT_EQ(slurp(path_), "old");
  remove_file(path_).or_throw();
  sync_directory(root_).or_throw();
  stop_recording_unsynced();
  record_unsynced({});
  lose_all();
  EXPECT_FALSE(fs::exists(path_));
}

TEST_F(PowerLossTest, R05_ATreeComesBackWholeOrInPart) {
  fs::create_directories(root_ / "tree" / "deep");
  spill(root_ / "tree" / "one", "1");
  spill(root_ / "tree" / "deep" / "two", "2");
  remove_tree(root_ / "tree").or_throw();
  ASSERT_EQ(unsynced_changes().size(), 4U);
  lose_all();
  EXPECT_EQ(slurp(root_ / "tree" / "one"), "1");
  EXPECT_EQ(slurp(root_ / "tree" / "deep" / "two"), "2");
}

// The unsynced write is to a file that has gone, and must not be found in the one that came.
TEST_F(PowerLossTest, R05_WhatWasWrittenToAnEarlierFileOfTheNameIsGone) {
  spill(path_, "old");
  auto old = File::open(path_, FileMode::kReadWrite).or_throw();
  old.write_at(0, bytes_of("OLD")).or_throw();
  File::open(path_, FileMode::kCreate).or_throw().write_at(0, bytes_of("new")).or_throw();
  const auto changes = unsynced_changes();
  ASSERT_EQ(changes.size(), 4U);  // Written, removed, made, written.
  strike(
      changes, [](std::size_t at, std::int64_t) { return at == 2 || at == 3; }, 512);
  EXPECT_EQ(slurp(path_), "new");
}

TEST_F(PowerLossTest, R05_AnExchangeIsDoneOrUndone) {
  fs::create_directories(root_ / "one");
  fs::create_directories(root_ / "two");
  spill(root_ / "one" / "file", "1");
  spill(root_ / "two" / "file", "2");
  auto file = File::open(root_ / "one" / "file", FileMode::kReadWrite).or_throw();
  file.write_at(0, bytes_of("I")).or_throw();
  exchange_names(root_ / "one", root_ / "two").or_throw();
  EXPECT_EQ(slurp(root_ / "two" / "file"), "I");
  const auto changes = unsynced_changes();
  ASSERT_EQ(changes.size(), 2U);
  strike(
      changes, [](std::size_t at, std::int64_t) { return at == 1; }, 512);
  EXPECT_EQ(slurp(root_ / "two" / "file"), "1") << "the write is undone where the file is now";
  strike(
      changes, [](std::size_t at, std::int64_t) { return at == 0; }, 512);
  EXPECT_EQ(slurp(root_ / "one" / "file"), "1");
  EXPECT_EQ(slurp(root_ / "two" / "file"), "2");
  sync_directory(root_).or_throw();
  ASSERT_EQ(unsynced_changes().size(), 1U);
  EXPECT_EQ(unsynced_changes().at(0).path, (root_ / "two" / "file").string());
}

TEST_F(PowerLossTest, AFailedSyncIsNotMendedByALaterOne) {
  spill(path_, "old");
  auto file = File::open(path_, FileMode::kReadWrite).or_throw();
  file.write_at(0, bytes_of("new")).or_throw();
  {
    const ScopedFileFault armed({.call = FileCall::kSync, .nth = 1, .os_errno = EIO});
    EXPECT_FALSE(file.sync());
  }
  file.sync().or_throw();
  ASSERT_EQ(unsynced_changes().size(), 1U);
  lose_all();
  EXPECT_EQ(slurp(path_), "old");
}

TEST_F(PowerLossTest, ACopyIsStruckInsteadOfTheFilesThemselves) {
  spill(path_, "old");
  auto file = File::open(path_, FileMode::kReadWrite).or_throw();
  file.write_at(0, bytes_of("new")).or_throw();
  const fs::path copy = root_ / "copy";
  fs::create_directories(copy);
  fs::copy_file(path_, copy / "file");
  strike(unsynced_changes(), [](std::size_t, std::int64_t) { return false; }, 512, {root_, copy});
  EXPECT_EQ(slurp(path_), "new");
  EXPECT_EQ(slurp(copy / "file"), "old");
}

}  // namespace
}  // namespace plimsoll
