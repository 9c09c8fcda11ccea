// SPDX-License-Identifier: Apache-2.0
#include "os/directories.h"

#include <gtest/gtest.h>

#include <array>
#include <cerrno>
#include <optional>
#include <string>

#include <unistd.h>

#include "os/file.h"
#include "os/file_faults.h"
#include "os/power_loss.h"
#include "tests/support/array_files.h"

namespace plimsoll {
namespace {

namespace fs = std::filesystem;
using test::slurp;
using test::spill;
using Target = PartialDirectory::Target;

constexpr std::array kNames{"one", "two"};

class DirectoriesTest : public ::testing::Test {
 protected:
  void SetUp() override { fs::create_directories(root_); }
  void TearDown() override {
    stop_recording_unsynced();
    fs::remove_all(root_);
  }
  Result<PartialDirectory> create(Target kind = Target::kNew) const {
    return PartialDirectory::create(root_ / "set", kind, ".partial", kNames);
  }
  static void lose_power() {
    strike(
        unsynced_changes(), [](std::size_t, std::int64_t) { return false; }, 512);
  }
  const fs::path root_ =
      fs::temp_directory_path() / ("plimsoll-directories-" + std::to_string(::getpid()));
};

TEST_F(DirectoriesTest, R05_AreDurableUpToTheFirstThatWasThere) {
  record_unsynced({});
  EXPECT_TRUE(make_directories(root_ / "a" / "b" / "c").or_throw());
  EXPECT_FALSE(make_directories(root_ / "a" / "b" / "c").or_throw());
  lose_power();
  EXPECT_TRUE(fs::is_directory(root_ / "a" / "b" / "c"));
}

// A process was killed between mkdir and the sync: whoever goes on makes it good.
TEST_F(DirectoriesTest, R05_MakesTheFirstThatIsThereDurableToo) {
  record_unsynced({});
  {
    const auto guard = UnsyncedGuard::of_make_directory(root_ / "a");
    fs::create_directory(root_ / "a");
  }
  EXPECT_TRUE(make_directories(root_ / "a" / "b").or_throw());
  lose_power();
  EXPECT_TRUE(fs::is_directory(root_ / "a" / "b"));
}

TEST_F(DirectoriesTest, AreListedSortedAndWithTheReasonWhereTheyCannotBe) {
  EXPECT_EQ(names_in(root_).or_throw(), std::vector<std::string>{});
  for (const char* name : {"b", "...", "a"}) {
    spill(root_ / name, "text");
  }
  fs::create_directory(root_ / "aa");
  EXPECT_EQ(names_in(root_).or_throw(), (std::vector<std::string>{"...", "a", "aa", "b"}));
  const auto file = names_in(root_ / "a");
  ASSERT_FALSE(file);
  EXPECT_EQ(file.error().os_errno, ENOTDIR);
  const auto none = names_in(root_ / "none");
  ASSERT_FALSE(none);
  EXPECT_EQ(none.error().os_errno, ENOENT);
  EXPECT_NE(none.error().to_string().find((root_ / "none").string() + ": listing it"),
            std::string::npos);
}

TEST_F(DirectoriesTest, SayWhichOneCouldNotBeMade) {
  const ScopedFileFault full({.call = FileCall::kMakeDirectory, .nth = 2, .os_errno = ENOSPC});
  const auto failed = make_directories(root_ / "a" / "b");
  ASSERT_FALSE(failed);
  EXPECT_EQ(failed.error().os_errno, ENOSPC);
  EXPECT_NE(failed.error().to_string().find((root_ / "a" / "b").string()), std::string::npos);
}

TEST_F(DirectoriesTest, AreNotMadeInAFile) {
  spill(root_ / "file", "text");
  const auto failed = make_directories(root_ / "file" / "a");
  ASSERT_FALSE(failed);
  EXPECT_EQ(failed.error().os_errno, ENOTDIR);
}

TEST_F(DirectoriesTest, RemovingATreeFollowsNoLink) {
  fs::create_directories(root_ / "precious");
  spill(root_ / "precious" / "gold", "gold");
  fs::create_directories(root_ / "tree" / "deep");
  fs::create_directory_symlink(root_ / "precious", root_ / "tree" / "deep" / "link");
  remove_tree(root_ / "tree").or_throw();
  EXPECT_FALSE(fs::exists(root_ / "tree"));
  EXPECT_EQ(slurp(root_ / "precious" / "gold"), "gold");
  fs::create_directory_symlink(root_ / "precious", root_ / "link");
  remove_tree(root_ / "link").or_throw();
  EXPECT_FALSE(fs::exists(fs::symlink_status(root_ / "link")));
  EXPECT_EQ(slurp(root_ / "precious" / "gold"), "gold");
}

TEST_F(DirectoriesTest, APartialOneIsThereWholeAndDurableOrNotAtAll) {
  record_unsynced({});
  {
    auto partial = create().or_throw();
    replace_file(partial.path() / "one", "1").or_throw();
  }
  EXPECT_TRUE(fs::is_empty(root_));
  auto partial = create().or_throw();
  replace_file(partial.path() / "one", "1").or_throw();
  EXPECT_FALSE(fs::exists(root_ / "set"));
  partial.finish().or_throw();
  lose_power();
  EXPECT_EQ(slurp(root_ / "set" / "one"), "1");
  EXPECT_FALSE(fs::exists(root_ / "set.partial"));
}

TEST_F(DirectoriesTest, OfTwoBuildersOneIsRefusedAndRemovesNothing) {
  auto first = create().or_throw();
  replace_file(first.path() / "one", "1").or_throw();
  const auto second = create();
  ASSERT_FALSE(second);
  EXPECT_EQ(*second.error().detail,
            (root_ / "set.partial").string() + ": another process is writing there");
  EXPECT_EQ(slurp(root_ / "set.partial" / "one"), "1");
  first.finish().or_throw();
  const auto third = create();
  ASSERT_FALSE(third);
  EXPECT_EQ(*third.error().detail,
            (root_ / "set").string() + ": already there, and not an empty directory");
  EXPECT_FALSE(fs::exists(root_ / "set.partial"));
}

TEST_F(DirectoriesTest, ABuilderWhoseDirectoryWasMovedRemovesNothingOfTheNext) {
  {
    std::optional<PartialDirectory> first = create().or_throw();
    fs::rename(root_ / "set.partial", root_ / "moved");
    auto second = create().or_throw();
    replace_file(second.path() / "one", "1").or_throw();
    first.reset();
    EXPECT_EQ(slurp(root_ / "set.partial" / "one"), "1");
    second.finish().or_throw();
  }
  EXPECT_EQ(slurp(root_ / "set" / "one"), "1");
}

TEST_F(DirectoriesTest, R43_APartialOneRemovesOnlyWhatIsItsOwn) {
  fs::create_directories(root_ / "set.partial");
  spill(root_ / "set.partial" / "one", "left by a builder that was killed");
  spill(root_ / "set.partial" / "thesis", "mine");
  const auto refused = create();
  ASSERT_FALSE(refused);
  EXPECT_EQ(*refused.error().detail,
            (root_ / "set.partial").string() + ": holds files that are not ours; remove it first");
  EXPECT_EQ(slurp(root_ / "set.partial" / "thesis"), "mine");
}

TEST_F(DirectoriesTest, R67_APartialOneIsNoLink) {
  fs::create_directories(root_ / "precious");
  fs::create_directory_symlink(root_ / "precious", root_ / "set.partial");
  EXPECT_FALSE(create());
  EXPECT_TRUE(fs::is_empty(root_ / "precious"));
}

TEST_F(DirectoriesTest, R06_AnExchangeThatIsNotDurableKeepsBoth) {
  for (const bool durable : {true, false}) {
    fs::remove_all(root_);
    fs::create_directories(root_ / "set");
    spill(root_ / "set" / "one", "old");
    {
      auto partial = create(Target::kReplaced).or_throw();
      replace_file(partial.path() / "one", "new").or_throw();
      const ScopedFileFault fault(
          {.call = FileCall::kSync, .nth = durable ? 99 : 2, .os_errno = EIO});
      EXPECT_EQ(partial.exchange().has_value(), durable);
    }
    EXPECT_EQ(slurp(root_ / "set" / "one"), "new");
    EXPECT_EQ(fs::exists(root_ / "set.partial"), !durable);
    EXPECT_EQ(slurp(root_ / "set.partial" / "one"), durable ? "" : "old");
  }
}

TEST_F(DirectoriesTest, R06_ALinkIsFollowedToTheDirectoryItself) {
  fs::create_directories(root_ / "disk" / "set");
  spill(root_ / "disk" / "set" / "one", "old");
  fs::create_directory_symlink(root_ / "disk" / "set", root_ / "set");
  auto partial = create(Target::kReplaced).or_throw();
  EXPECT_EQ(partial.path(), root_ / "disk" / "set.partial");
  replace_file(partial.path() / "one", "new").or_throw();
  partial.exchange().or_throw();
  EXPECT_TRUE(fs::is_symlink(root_ / "set"));
  EXPECT_EQ(slurp(root_ / "disk" / "set" / "one"), "new");
}

TEST_F(DirectoriesTest, R67_NoFileIsWrittenThroughALink) {
  spill(root_ / "victim", "victim");
  fs::create_symlink(root_ / "victim", root_ / "link");
  const auto opened = File::open(root_ / "link", FileMode::kReadWrite);
  ASSERT_FALSE(opened);
  EXPECT_NE(opened.error().to_string().find("not written through a symbolic link"),
            std::string::npos);
  EXPECT_FALSE(open_descriptor(root_ / "link", 0));
  File::open(root_ / "link", FileMode::kCreate).or_throw().write_at(0, {}).or_throw();
  EXPECT_FALSE(fs::is_symlink(root_ / "link")) << "a new file takes the link's place";
  fs::create_symlink(root_ / "victim", root_ / "text.new");
  replace_file(root_ / "text", "text").or_throw();
  EXPECT_EQ(slurp(root_ / "text"), "text");
  EXPECT_EQ(slurp(root_ / "victim"), "victim");
}

}  // namespace
}  // namespace plimsoll
