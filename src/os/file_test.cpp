// SPDX-License-Identifier: Apache-2.0
//
// Files against a real file system, and against one made to fail at the n-th call.
#include <gtest/gtest.h>

#include <algorithm>
#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <memory>
#include <string>
#include <vector>

#include <unistd.h>

#include "os/file.h"
#include "os/file_faults.h"
#include "plimsoll/replace_file.h"

namespace plimsoll {
namespace {

namespace fs = std::filesystem;

class FileTest : public testing::Test {
 protected:
  FileTest() {
    std::string pattern = (fs::temp_directory_path() / "plimsoll_file_XXXXXX").string();
    directory_ = ::mkdtemp(pattern.data());
  }
  ~FileTest() override { fs::remove_all(directory_); }
  FileTest(const FileTest&) = delete;
  FileTest& operator=(const FileTest&) = delete;

  [[nodiscard]] fs::path path(const char* name) const { return directory_ / name; }
  static std::span<const std::byte> bytes_of(std::string_view text) {
    return std::as_bytes(std::span(text));
  }
  static std::string text_of(const File& file) {
    std::string text(static_cast<std::size_t>(file.size().or_throw()), '\0');
    file.read_at(0, std::as_writable_bytes(std::span(text))).or_throw();
    return text;
  }

  fs::path directory_;
};

TEST_F(FileTest, ReadsBackWhatWasWrittenAtAnOffset) {
  File file = File::open(path("a"), FileMode::kCreate).or_throw();
  file.write_at(0, bytes_of("hello world")).or_throw();
  file.write_at(6, bytes_of("there")).or_throw();
  file.sync().or_throw();
  EXPECT_EQ(text_of(file), "hello there");
  const File again = File::open(path("a"), FileMode::kRead).or_throw();
  EXPECT_EQ(text_of(again), "hello there");
  EXPECT_EQ(again.path(), path("a"));
}

TEST_F(FileTest, NamesAMissingFile) {
  const auto missing = File::open(path("none"), FileMode::kRead);
  ASSERT_FALSE(missing);
  EXPECT_EQ(missing.error().code, ErrorCode::kNotFound);
  EXPECT_EQ(missing.error().to_string(), path("none").string() + ": no such file or directory");
  EXPECT_EQ(File::open(directory_, FileMode::kReadWrite).error().code, ErrorCode::kIo);
}

TEST_F(FileTest, CallsAShortFileCorruptAndSaysWhereItEnds) {
  File file = File::open(path("short"), FileMode::kCreate).or_throw();
  file.write_at(0, bytes_of("123")).or_throw();
  std::array<std::byte, 8> out{};
  const auto read = file.read_at(1, out);
  ASSERT_FALSE(read);
  EXPECT_EQ(read.error().code, ErrorCode::kCorrupt);
  EXPECT_EQ(read.error().to_string(),
            path("short").string() + ": ends at byte 3, but 8 bytes at 1 were expected");
}

TEST_F(FileTest, MovesItsDescriptorAndClosesItOnce) {
  File first = File::open(path("m"), FileMode::kCreate).or_throw();
  File second = std::move(first);
  EXPECT_FALSE(first.valid());  // NOLINT(bugprone-use-after-move): what a moved-from file says.
  EXPECT_TRUE(second.valid());
  first = std::move(second);
  EXPECT_TRUE(first.valid());
  first.write_at(0, bytes_of("x")).or_throw();
}

TEST_F(FileTest, TransfersAlignedBlocksDirectlyOrFallsBack) {
  File file = File::open(path("direct"), FileMode::kCreate, true).or_throw();
  constexpr std::size_t kBytes = 16384;
  const std::unique_ptr<std::byte, void (*)(void*)> out(
      static_cast<std::byte*>(std::aligned_alloc(4096, kBytes)), std::free);
  const std::unique_ptr<std::byte, void (*)(void*)> in(
      static_cast<std::byte*>(std::aligned_alloc(4096, kBytes)), std::free);
  std::memset(out.get(), 0x5A, kBytes);
  file.write_at(4096, std::span(out.get(), kBytes)).or_throw();
  file.read_at(4096, std::span(in.get(), kBytes)).or_throw();
  EXPECT_EQ(std::memcmp(out.get(), in.get(), kBytes), 0);
  EXPECT_EQ(file.size().or_throw(), 4096 + 16384);
  file.drop_cache();
}

TEST_F(FileTest, FallsBackToBufferedWhereDirectIsRefused) {
  if (!fs::is_directory("/dev/shm")) {
    GTEST_SKIP() << "no tmpfs to try";
  }
  const fs::path place = "/dev/shm/plimsoll_direct_" + std::to_string(::getpid());
  File file = File::open(place, FileMode::kCreate, true).or_throw();
  if (!file.direct()) {
    file.write_at(1, bytes_of("unaligned is fine when buffered")).or_throw();
  }
  fs::remove(place);
}

TEST_F(FileTest, CompletesAShortWriteAndAShortRead) {
  File file = File::open(path("s"), FileMode::kCreate).or_throw();
  {
    const ScopedFileFault fault({.call = FileCall::kWrite, .os_errno = 0, .short_bytes = 3});
    file.write_at(0, bytes_of("abcdefgh")).or_throw();
    EXPECT_EQ(file_fault_calls(), 2);
  }
  const ScopedFileFault fault({.call = FileCall::kRead, .os_errno = 0, .short_bytes = 5});
  EXPECT_EQ(text_of(file), "abcdefgh");
  EXPECT_EQ(file_fault_calls(), 2);
}

TEST_F(FileTest, RetriesAnInterruptedCall) {
  File file = File::open(path("i"), FileMode::kCreate).or_throw();
  const ScopedFileFault fault({.call = FileCall::kWrite, .os_errno = EINTR});
  file.write_at(0, bytes_of("abc")).or_throw();
  EXPECT_EQ(text_of(file), "abc");
  EXPECT_EQ(file_fault_calls(), 2);
}

TEST_F(FileTest, NamesAFullDiskAndWhatToDo) {
  File file = File::open(path("full"), FileMode::kCreate).or_throw();
  const ScopedFileFault fault(
      {.call = FileCall::kWrite, .nth = 2, .os_errno = ENOSPC, .keeps_failing = true});
  file.write_at(0, bytes_of("abc")).or_throw();
  for (int i = 0; i < 2; ++i) {
    const auto written = file.write_at(3, bytes_of("defg"));
    ASSERT_FALSE(written);
    EXPECT_EQ(written.error().code, ErrorCode::kIo);
    EXPECT_EQ(written.error().os_errno, ENOSPC);
    EXPECT_EQ(written.error().to_string(),
              path("full").string() +
                  ": writing 4 bytes at 3: No space left on device: "
                  "free some space there, or choose another directory");
  }
}

TEST_F(FileTest, ReportsAFailedSync) {
  File file = File::open(path("sync"), FileMode::kCreate).or_throw();
  const ScopedFileFault fault({.call = FileCall::kSync, .os_errno = EIO});
  const auto synced = file.sync();
  ASSERT_FALSE(synced);
  EXPECT_EQ(synced.error().os_errno, EIO);
  EXPECT_EQ(synced.error().to_string(), path("sync").string() + ": syncing: Input/output error");
}

TEST_F(FileTest, ReadsSmallFilesAndRefusesLargeOnes) {
  std::ofstream(path("small")) << "content";
  EXPECT_EQ(read_small_file(path("small")).or_throw(), "content");
  const auto large = read_small_file(path("small"), 3);
  ASSERT_FALSE(large);
  EXPECT_EQ(large.error().code, ErrorCode::kCorrupt);
  EXPECT_EQ(large.error().to_string(),
            path("small").string() + ": 7 bytes where at most 3 were expected");
  EXPECT_EQ(read_small_file(path("none")).error().code, ErrorCode::kNotFound);
}

TEST_F(FileTest, ReplacesAFileWhole) {
  replace_file(path("r"), "first").or_throw();
  replace_file(path("r"), "second").or_throw();
  EXPECT_EQ(read_small_file(path("r")).or_throw(), "second");
  EXPECT_FALSE(fs::exists(path("r.new")));
}

// Goal: whichever call fails, the old content is still there and nothing is left beside it.
TEST_F(FileTest, KeepsTheOldFileWhenAReplacementFailsBeforeTheRename) {
  replace_file(path("k"), "old").or_throw();
  for (const FileCall call : {FileCall::kWrite, FileCall::kSync, FileCall::kRename}) {
    const ScopedFileFault fault({.call = call, .os_errno = EIO});
    EXPECT_FALSE(replace_file(path("k"), "new"));
    EXPECT_EQ(read_small_file(path("k")).or_throw(), "old");
    EXPECT_FALSE(fs::exists(path("k.new")));
  }
  const ScopedFileFault fault({.call = FileCall::kSync, .nth = 2, .os_errno = EIO});
  EXPECT_FALSE(replace_file(path("k"), "new"));  // The directory's sync: renamed, not yet durable.
  EXPECT_EQ(read_small_file(path("k")).or_throw(), "new");
}

// Goal: the same of a file that a caller writes by other means than File.
TEST_F(FileTest, ReplacesAFileThatACallerWritesWholeOrNotAtAll) {
  const auto write = [](const fs::path& beside) -> Result<void> {
    std::ofstream(beside) << "new";
    return {};
  };
  replace_file(path("w"), "old").or_throw();
  for (const FileCall call : {FileCall::kSync, FileCall::kRename}) {
    const ScopedFileFault fault({.call = call, .os_errno = EIO});
    EXPECT_EQ(replace_file_with(path("w"), write).error().os_errno, EIO);
    EXPECT_EQ(read_small_file(path("w")).or_throw(), "old");
    EXPECT_FALSE(fs::exists(path("w.new")));
  }
  const auto refused = replace_file_with(path("w"), [](const fs::path& beside) -> Result<void> {
    std::ofstream(beside) << "half";
    return fail(ErrorCode::kOverBudget, "no memory for the other half");
  });
  EXPECT_EQ(refused.error().code, ErrorCode::kOverBudget);
  EXPECT_EQ(read_small_file(path("w")).or_throw(), "old");
  EXPECT_FALSE(fs::exists(path("w.new")));
  const auto none = [](const fs::path&) { return Result<void>{}; };
  EXPECT_EQ(replace_file_with(path("w"), none).error().code, ErrorCode::kNotFound);
  replace_file_with(path("w"), write).or_throw();
  EXPECT_EQ(read_small_file(path("w")).or_throw(), "new");
  EXPECT_FALSE(fs::exists(path("w.new")));
}

TEST_F(FileTest, RenamesDurablyAcrossDirectories) {
  fs::create_directory(path("to"));
  std::ofstream(path("a")) << "moved";
  rename_durable(path("a"), path("to") / "b").or_throw();
  EXPECT_EQ(read_small_file(path("to") / "b").or_throw(), "moved");
  EXPECT_EQ(rename_durable(path("a"), path("b")).error().os_errno, ENOENT);
  EXPECT_EQ(sync_directory(path("none")).error().code, ErrorCode::kNotFound);
}

TEST_F(FileTest, ReservesAPlaceOnDiskWithoutChangingWhatIsThere) {
  File file = File::open(path("r"), FileMode::kCreate).or_throw();
  const auto written = bytes_of("a row");
  file.write_at(0, written).or_throw();
  file.reserve(5, 1 << 20);
  if (file.size().or_throw() == 5) {
    GTEST_SKIP() << "this file system cannot reserve";
  }
  EXPECT_EQ(file.size().or_throw(), 1 << 20);
  std::vector<std::byte> read(10);
  file.read_at(0, read).or_throw();
  EXPECT_TRUE(std::equal(written.begin(), written.end(), read.begin()));
  EXPECT_EQ(std::count(read.begin() + 5, read.end(), std::byte{0}), 5);
}

TEST_F(FileTest, SetsItsSize) {
  File file = File::open(path("t"), FileMode::kCreate).or_throw();
  file.truncate(10'000).or_throw();
  EXPECT_EQ(file.size().or_throw(), 10'000);
  file.truncate(0).or_throw();
  EXPECT_EQ(file.size().or_throw(), 0);
}

}  // namespace
}  // namespace plimsoll
