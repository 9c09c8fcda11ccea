// SPDX-License-Identifier: Apache-2.0
//
// Goal: a store appears complete or not at all, whatever goes wrong, and errors name the culprit.
#include <cstdio>
#include <cstdlib>
#include <fstream>
#include <limits>

#include <sys/wait.h>

#include <gtest/gtest.h>

#include "os/crash_point.h"
#include "os/file_faults.h"
#include "os/power_loss.h"
#include "plimsoll/feature_store.h"
#include "store/feature_block.h"
#include "tests/support/feature_set.h"

namespace plimsoll {
namespace {

using test::FeatureSet;
using test::ScratchDirectory;
namespace fs = std::filesystem;

std::vector<ColumnSpec> two_columns(DType dtype = DType::kFloat32) {
  return {{.name = "image", .dtype = dtype, .shape = {16}},
          {.name = "text", .dtype = dtype, .shape = {4}}};
}

template <class T>
std::span<const std::byte> bytes_of(const std::vector<T>& values) {
  return std::as_bytes(std::span(values));
}

TEST(FeatureWriterTest, LeavesNothingBehindWithoutFinish) {
  ScratchDirectory scratch;
  Governor governor = test::governor_of();
  const FeatureSet set = test::make_set(1, 100, two_columns());
  {
    auto writer =
        FeatureWriter::create(governor, {.directory = scratch / "set", .columns = set.columns})
            .or_throw();
    ASSERT_TRUE(test::append_part(writer, set, 0, 100));
    EXPECT_EQ(test::names_in(scratch.path()), std::vector<std::string>{"set.partial"});
  }
  EXPECT_TRUE(test::names_in(scratch.path()).empty());
  EXPECT_EQ(governor.state().leased_bytes, 0);
}

TEST(FeatureWriterTest, ReplacesWhatAKilledWriterLeftAndNothingElse) {
  ScratchDirectory scratch;
  Governor governor = test::governor_of();
  const FeatureSet set = test::make_set(1, 100, two_columns());
  fs::create_directory(scratch / "set.partial");
  std::ofstream(scratch / "set.partial" / "records.dat") << "half a record";
  ASSERT_TRUE(test::write_set(governor, scratch / "set", set));
  fs::create_directory(scratch / "other.partial");
  std::ofstream(scratch / "other.partial" / "thesis.txt") << "mine";
  EXPECT_FALSE(test::write_set(governor, scratch / "other", set));
  EXPECT_TRUE(fs::exists(scratch / "other.partial" / "thesis.txt"));
}

TEST(FeatureWriterTest, R05_AFinishedStoreOutlivesAPowerFailureWithTheDirectoriesAboveIt) {
  ScratchDirectory scratch;
  Governor governor = test::governor_of();
  const FeatureSet set = test::make_set(1, 100, two_columns());
  record_unsynced({});
  const bool written =
      test::write_set(governor, scratch / "above" / "below" / "set", set).has_value();
  strike(
      unsynced_changes(), [](std::size_t, std::int64_t) { return false; }, 512);
  stop_recording_unsynced();
  ASSERT_TRUE(written);
  EXPECT_TRUE(FeatureStore::verify(scratch / "above" / "below" / "set", nullptr));
}

TEST(FeatureWriterTest, RefusesASecondWriterOfTheSameDirectory) {
  ScratchDirectory scratch;
  Governor governor = test::governor_of();
  const FeatureWriterOptions options{.directory = scratch / "set", .columns = two_columns()};
  auto first = FeatureWriter::create(governor, options);
  ASSERT_TRUE(first);
  const auto second = FeatureWriter::create(governor, options);
  ASSERT_FALSE(second);
  EXPECT_EQ(*second.error().detail,
            (scratch / "set.partial").string() + ": another process is writing there");
}

TEST(FeatureWriterTest, RefusesANonEmptyDirectoryAndLeavesItUntouched) {
  ScratchDirectory scratch;
  Governor governor = test::governor_of();
  fs::create_directory(scratch / "set");
  EXPECT_TRUE(test::write_set(governor, scratch / "set", test::make_set(1, 9, two_columns())));
  const auto before = test::names_in(scratch / "set");
  const auto again =
      test::write_set(governor, scratch / "set", test::make_set(2, 9, two_columns()));
  ASSERT_FALSE(again);
  EXPECT_EQ(*again.error().detail,
            (scratch / "set").string() + ": already there, and not an empty directory");
  EXPECT_EQ(test::names_in(scratch / "set"), before);
  EXPECT_TRUE(FeatureStore::verify(scratch / "set", nullptr));
}

TEST(FeatureWriterTest, NamesRecordIdAndColumnOfANonFiniteValue) {
  ScratchDirectory scratch;
  Governor governor = test::governor_of();
  for (const DType dtype : {DType::kFloat32, DType::kFloat16, DType::kBFloat16, DType::kFloat64}) {
    FeatureSet set = test::make_set(3, 40, two_columns(dtype), test::IdKind::kSparse);
    const auto width = static_cast<std::size_t>(dtype_bytes(dtype));
    // All ones is a NaN in every format. Record 33, text element 2.
    std::fill_n(set.values[1].begin() + static_cast<std::ptrdiff_t>((33 * 4 + 2) * width), width,
                std::byte{0xFF});
    auto writer =
        FeatureWriter::create(governor, {.directory = scratch / "set", .columns = set.columns})
            .or_throw();
    ASSERT_TRUE(test::append_part(writer, set, 0, 20));
    const auto bad = test::append_part(writer, set, 20, 40);
    ASSERT_FALSE(bad);
    EXPECT_EQ(*bad.error().detail, "record 33 (id " + std::to_string(set.ids[33]) +
                                       "), column \"text\": holds a NaN or an infinity");
    EXPECT_FALSE(test::append_part(writer, set, 0, 1)) << "the error stays";
    EXPECT_FALSE(writer.finish());
  }
  EXPECT_TRUE(test::names_in(scratch.path()).empty());
}

TEST(FeatureWriterTest, StoresNonFiniteValuesWhenAllowed) {
  ScratchDirectory scratch;
  Governor governor = test::governor_of();
  auto writer = FeatureWriter::create(
                    governor, {.directory = scratch / "set",
                               .columns = {{.name = "x", .dtype = DType::kFloat32, .shape = {}}},
                               .allow_non_finite = true})
                    .or_throw();
  const std::vector<float> values{1.0F, std::numeric_limits<float>::infinity()};
  const std::vector<std::span<const std::byte>> columns{bytes_of(values)};
  ASSERT_TRUE(writer.append(std::vector<std::int64_t>{0, 1}, columns));
  EXPECT_TRUE(writer.finish());
  EXPECT_FALSE(writer.finish());
}

TEST(FeatureWriterTest, RefusesWrongSizes) {
  ScratchDirectory scratch;
  Governor governor = test::governor_of();
  const auto refusal = [&](std::size_t columns, std::size_t bytes, std::size_t groups) {
    auto writer =
        FeatureWriter::create(governor, {.directory = scratch / "set", .columns = two_columns()})
            .or_throw();
    const std::vector<std::byte> image(bytes);
    const std::vector<std::byte> text(32);
    const std::vector<std::span<const std::byte>> spans{image, text};
    const std::vector<std::int64_t> group_ids(groups);
    const auto result =
        writer.append(std::vector<std::int64_t>{5, 6}, std::span(spans).first(columns), group_ids);
    return result ? std::string("none") : *result.error().detail;
  };
  EXPECT_EQ(refusal(2, 128, 0), "none");
  EXPECT_EQ(refusal(1, 128, 0), "1 columns were given, 2 are declared");
  EXPECT_EQ(refusal(2, 127, 0), "column \"image\": 127 bytes were given for 2 records of 64 bytes");
  EXPECT_EQ(refusal(2, 128, 2),
            "2 group ids were given for 2 records of a store that is not grouped");
}

TEST(FeatureWriterTest, NamesADuplicateIdAtFinish) {
  ScratchDirectory scratch;
  Governor governor = test::governor_of();
  FeatureSet set = test::make_set(4, 5000, two_columns(), test::IdKind::kSparse);
  set.ids[4321] = set.ids[12];
  const auto result = test::write_set(governor, scratch / "set", set);
  ASSERT_FALSE(result);
  EXPECT_EQ(result.error().code, ErrorCode::kInvalidArgument);
  EXPECT_NE(result.error().to_string().find(std::to_string(set.ids[12])), std::string::npos)
      << result.error().to_string();
  EXPECT_TRUE(test::names_in(scratch.path()).empty());
}

TEST(FeatureWriterTest, RefusesAGroupThatReturns) {
  ScratchDirectory scratch;
  Governor governor = test::governor_of();
  FeatureSet set =
      test::make_set(5, 500, two_columns(), test::IdKind::kDense, test::GroupKind::kVaried);
  set.groups.back() = set.groups[100];
  const auto result = test::write_set(governor, scratch / "set", set);
  ASSERT_FALSE(result);
  EXPECT_NE(result.error().to_string().find("a group returns"), std::string::npos)
      << result.error().to_string();
  EXPECT_TRUE(test::names_in(scratch.path()).empty());
}

TEST(FeatureWriterTest, LeavesNothingBehindWhicheverWriteSyncOrRenameFails) {
  ScratchDirectory scratch;
  Governor governor = test::governor_of();
  const FeatureSet set =
      test::make_set(6, 4000, two_columns(), test::IdKind::kSparse, test::GroupKind::kVaried);
  for (const FileCall call : {FileCall::kWrite, FileCall::kSync, FileCall::kRename}) {
    int failures = 0;
    for (std::int64_t nth = 1;; ++nth) {
      Result<void> result;
      {
        const ScopedFileFault fault({.call = call, .nth = nth, .os_errno = 28});
        result = test::write_set(governor, scratch / "set", set, 64 << 10);
      }
      if (result) {
        break;
      }
      ++failures;
      EXPECT_EQ(result.error().code, ErrorCode::kIo);
      EXPECT_NE(result.error().to_string().find("No space left"), std::string::npos);
      EXPECT_FALSE(fs::exists(scratch / "set" / "features.json") &&
                   !FeatureStore::verify(scratch / "set", nullptr))
          << "call " << nth;
      fs::remove_all(scratch / "set");  // A failed sync after the rename leaves a whole store.
      EXPECT_TRUE(test::names_in(scratch.path()).empty()) << "call " << nth;
    }
    EXPECT_GT(failures, 0);
    EXPECT_TRUE(FeatureStore::verify(scratch / "set", nullptr));
    fs::remove_all(scratch / "set");
  }
}

class KilledWriterTest : public ::testing::TestWithParam<BlockCompression> {};

// Writes the set in a child that is killed at its n-th crash point; true when it came to its end.
bool write_in_child(const fs::path& directory, const FeatureSet& set, BlockCompression compression,
                    long nth) {
  const pid_t child = ::fork();
  if (child == 0) {
    ::setenv("PLIMSOLL_CRASH", std::string("*:").append(std::to_string(nth)).c_str(), 1);
    reload_crash_points();
    const auto done = test::write_set(test::governor_of(), directory, set, 0, compression);
    if (!done) {
      std::fprintf(stderr, "%ld: %s\n", nth, done.error().to_string().c_str());
    }
    std::_Exit(done ? 0 : 3);
  }
  int status = 0;
  ::waitpid(child, &status, 0);
  EXPECT_TRUE(WIFSIGNALED(status) || WEXITSTATUS(status) == 0) << status;
  return WIFEXITED(status);
}

TEST_P(KilledWriterTest, LeavesAWholeStoreOrNoneWhereverItIsKilled) {
  if (GetParam() == BlockCompression::kLz4 && !lz4_available()) {
    GTEST_SKIP() << "this build has no LZ4";
  }
  ScratchDirectory scratch;
  FeatureSet set =
      test::make_set(8, 900, two_columns(), test::IdKind::kSparse, test::GroupKind::kVaried);
  test::make_compressible(set, 8, 0.5);
  bool ended = false;
  bool absent = false;
  for (long nth = 1; !ended; ++nth) {
    ASSERT_LT(nth, 300);
    ended = write_in_child(scratch / "set", set, GetParam(), nth);
    if (fs::exists(scratch / "set")) {
      const auto whole = FeatureStore::verify(scratch / "set", nullptr);
      ASSERT_TRUE(whole) << "killed at " << nth << ": " << whole.error().to_string();
      fs::remove_all(scratch / "set");
    } else {
      absent = true;
      ASSERT_FALSE(ended);
    }
  }
  EXPECT_TRUE(absent);
}

INSTANTIATE_TEST_SUITE_P(All, KilledWriterTest,
                         ::testing::Values(BlockCompression::kNone, BlockCompression::kLz4));

TEST(FeatureWriterTest, WritesAnEmptyStore) {
  ScratchDirectory scratch;
  Governor governor = test::governor_of();
  ASSERT_TRUE(test::write_set(governor, scratch / "set", test::make_set(7, 0, two_columns())));
  auto store = FeatureStore::open(governor, {.directory = scratch / "set"}).or_throw();
  EXPECT_EQ(store.info().rows, 0);
  EXPECT_TRUE(store.read_ordinals({}, {}, {}));
  EXPECT_TRUE(FeatureStore::verify(scratch / "set", nullptr));
}

}  // namespace
}  // namespace plimsoll
