// SPDX-License-Identifier: Apache-2.0
#include "watch/progress.h"

#include <cstdlib>
#include <filesystem>
#include <optional>
#include <string>

#include <fcntl.h>
#include <unistd.h>

#include <gtest/gtest.h>

#include "tests/support/array_files.h"

namespace plimsoll {
namespace {

TEST(ProgressNoteTest, WhoAskedAroundItHearsToo) {
  auto outer = ProgressNote::create().or_throw();
  {
    const auto inner = ProgressNote::create().or_throw();
    tell_progress("run: step 4");
    EXPECT_EQ(outer.read(), "");
    EXPECT_EQ(inner.read(), "run: step 4");
  }
  EXPECT_EQ(outer.read(), "run: step 4");
  EXPECT_EQ(told_progress(), "run: step 4");
  tell_progress("run: step 8");
  EXPECT_EQ(outer.read(), "run: step 8");
}

// A note's descriptor may be another file's once the note is gone.
TEST(ProgressNoteTest, OneThatIsGoneIsNamedNowhereAndNothingIsWrittenInItsPlace) {
  const auto path = std::filesystem::temp_directory_path() / "plimsoll-progress-test";
  test::spill(path, "a log");
  std::optional<ProgressNote> first(ProgressNote::create().or_throw());
  const std::string named = std::getenv(ProgressNote::kVariable);
  first.reset();
  EXPECT_FALSE(is_progress_asked());
  const int file = ::open(path.c_str(), O_RDWR | O_CLOEXEC);
  ASSERT_TRUE(named.ends_with("/" + std::to_string(file)));
  {
    const auto second = ProgressNote::create().or_throw();
    tell_progress("run: step 12");
    EXPECT_EQ(second.read(), "run: step 12");
  }
  ::close(file);
  EXPECT_EQ(test::slurp(path), "a log");
  std::filesystem::remove(path);
}

}  // namespace
}  // namespace plimsoll
