// SPDX-License-Identifier: Apache-2.0
//
// Goal: records of variable length come back as they were written, whatever their lengths, ids,
// groups, compression and parts, from the smallest slab; and damage or misuse is named.
// Method: FeatureSet (plain arrays) is the oracle; random requests, the seed printed on failure.
#include <cstdlib>
#include <fstream>
#include <limits>

#include <sys/wait.h>

#include <gtest/gtest.h>

#include "os/crash_point.h"
#include "os/file_faults.h"
#include "plimsoll/feature_store.h"
#include "store/feature_block.h"
#include "store/feature_format.h"
#include "store/feature_parts.h"
#include "tests/support/array_files.h"
#include "tests/support/feature_set.h"

namespace plimsoll {
namespace {

using test::compare;
using test::FeatureSet;
using test::GroupKind;
using test::IdKind;
using test::ScratchDirectory;
namespace fs = std::filesystem;

// Tokens, boxes of four, samples of sound beyond many blocks; fixed columns before and behind.
std::vector<ColumnSpec> mixed_columns() {
  return {{.name = "label", .dtype = DType::kUint8, .shape = {}},
          {.name = "tokens", .dtype = DType::kInt32, .shape = {}, .length_max = 300},
          {.name = "boxes", .dtype = DType::kFloat16, .shape = {4}, .length_max = 9},
          {.name = "image", .dtype = DType::kFloat32, .shape = {5}},
          {.name = "sound", .dtype = DType::kUint8, .shape = {}, .length_max = 30'000}};
}

std::vector<std::int64_t> upto(std::int64_t end) {
  std::vector<std::int64_t> all(static_cast<std::size_t>(end));
  std::iota(all.begin(), all.end(), 0);
  return all;
}

struct Shape {
  IdKind ids;
  GroupKind groups;
  BlockCompression compression;
  std::int64_t parts;
  std::int64_t cache_bytes;  // 0: the floor.
};

class FeatureRaggedShapes : public ::testing::TestWithParam<Shape> {};

TEST_P(FeatureRaggedShapes, ReadBackEveryByte) {
  constexpr std::int64_t kRows = 900;
  const Shape shape = GetParam();
  if (shape.compression == BlockCompression::kLz4 && !lz4_available()) {
    GTEST_SKIP() << "this build has no LZ4";
  }
  const std::uint64_t seed = 70 + static_cast<std::uint64_t>(shape.parts);
  SCOPED_TRACE("seed " + std::to_string(seed));
  std::mt19937_64 random(seed);
  ScratchDirectory scratch;
  Governor governor = test::governor_of();
  FeatureSet set = test::make_set(seed, kRows, mixed_columns(), shape.ids, shape.groups);
  test::make_compressible(set, seed, 0.5);
  const fs::path directory = scratch / "set";
  std::vector<std::int64_t> cuts{0};
  for (std::int64_t p = 1; p < shape.parts; ++p) {
    std::int64_t cut = p * kRows / shape.parts;
    while (!set.groups.empty() && set.group_index[static_cast<std::size_t>(cut)] ==
                                      set.group_index[static_cast<std::size_t>(cut - 1)]) {
      ++cut;
    }
    cuts.push_back(cut);
  }
  cuts.push_back(kRows);
  ASSERT_TRUE(test::write_set(governor, directory, test::slice(set, 0, cuts[1]), 1 << 20,
                              shape.compression));
  for (std::size_t p = 1; p + 1 < cuts.size(); ++p) {
    ASSERT_TRUE(test::extend_set(governor, directory, set, cuts[p], cuts[p + 1]));
  }
  for (const bool joined : {false, true}) {
    SCOPED_TRACE(joined ? "joined" : "as written");
    if (joined) {
      ASSERT_TRUE(FeatureStore::join(governor, directory, nullptr));
    }
    const auto verified = FeatureStore::verify(directory, nullptr);
    ASSERT_TRUE(verified) << verified.error().to_string();
    const FeatureInfo info = FeatureStore::inspect(directory).or_throw();
    EXPECT_EQ(info.columns, set.columns);
    EXPECT_EQ(info.rows, kRows);
    EXPECT_EQ(info.parts, joined ? 1 : shape.parts);
    const std::int64_t bytes = shape.cache_bytes > 0 ? shape.cache_bytes : info.floor_bytes;
    auto store =
        FeatureStore::open(governor, {.directory = directory, .cache_bytes = bytes}).or_throw();
    EXPECT_LE(governor.state().pools[static_cast<std::size_t>(Tag::kFeature)].leased_bytes,
              bytes + 4095);
    for (int round = 0; round < 12; ++round) {
      std::vector<std::int64_t> ordinals(random() % 700);
      for (auto& ordinal : ordinals) {
        ordinal = static_cast<std::int64_t>(random() % kRows);
      }
      const std::vector<int> columns = round % 3 == 0   ? std::vector<int>{0, 1, 2, 3, 4}
                                       : round % 3 == 1 ? std::vector<int>{4, 0, 2}
                                                        : std::vector<int>{3};
      ASSERT_TRUE(store.prefetch_ordinals(std::span(ordinals).first(ordinals.size() / 2)));
      ASSERT_EQ(compare(store, set, ordinals, columns, round % 2 == 1), "") << "round " << round;
      std::vector<std::int64_t> lengths(ordinals.size());
      for (const int k : {1, 2, 4}) {
        ASSERT_TRUE(store.lengths(ordinals, k, lengths));
        for (std::size_t i = 0; i < lengths.size(); ++i) {
          ASSERT_EQ(
              lengths[i],
              set.lengths[static_cast<std::size_t>(k)][static_cast<std::size_t>(ordinals[i])]);
        }
      }
    }
    ASSERT_EQ(compare(store, set, upto(kRows), {0, 1, 2, 3, 4}, true), "");
    EXPECT_GT(store.stats().bytes_delivered, 0);
  }
}

INSTANTIATE_TEST_SUITE_P(
    All, FeatureRaggedShapes,
    ::testing::Values(Shape{IdKind::kDense, GroupKind::kNone, BlockCompression::kNone, 1, 0},
                      Shape{IdKind::kDense, GroupKind::kNone, BlockCompression::kLz4, 1, 32 << 20},
                      Shape{IdKind::kSparse, GroupKind::kVaried, BlockCompression::kLz4, 4, 0},
                      Shape{IdKind::kShuffled, GroupKind::kUniform, BlockCompression::kNone, 9,
                            1 << 20}));

TEST(FeatureRaggedTest, ARecordTouchesNoPageMoreThanItMustUnlessGapsWouldBeAnEighthOfTheStream) {
  std::mt19937_64 random(3);
  for (const unsigned largest : {12U, 14U, 16U}) {  // Bits of a record's size.
    RaggedPlaces stream;
    std::int64_t filled = 0;
    for (int i = 0; i < 100'000; ++i) {
      const auto bytes = static_cast<std::int64_t>(random() % (1U << (random() % largest + 1)));
      const std::int64_t end = stream.end();
      const std::int64_t place = stream.next(bytes);
      const std::int64_t gap = (4096 - end % 4096) % 4096;
      ASSERT_TRUE(place == end || place == end + gap);
      ASSERT_EQ(stream.end(), place + bytes);
      const auto pages = [&](std::int64_t at) { return (at + bytes + 4095) / 4096 - at / 4096; };
      ASSERT_TRUE(bytes == 0 || pages(place) == pages(0) || end - filled + gap > (end + bytes) / 8)
          << bytes << " at " << end;
      ASSERT_TRUE(place == end || pages(place) < pages(end));
      filled += bytes;
      ASSERT_LE(stream.end() - filled, stream.end() / 8);
    }
  }
}

// Records as the benchmark has them: the pages they need and no other, for less than a tenth of the
// file.
TEST(FeatureRaggedTest, RecordsOfOneToFourPagesTouchNoPageMoreThanTheyMust) {
  std::mt19937_64 random(4);
  RaggedPlaces stream;
  std::int64_t needed = 0;
  std::int64_t touched = 0;
  std::int64_t filled = 0;
  for (int i = 0; i < 100'000; ++i) {
    const auto bytes = static_cast<std::int64_t>(256 + random() % 16'125);
    const std::int64_t place = stream.next(bytes);
    needed += (bytes + 4095) / 4096;
    touched += (place + bytes + 4095) / 4096 - place / 4096;
    filled += bytes;
  }
  EXPECT_LE(static_cast<double>(touched), 1.001 * static_cast<double>(needed));
  EXPECT_LE(static_cast<double>(stream.end()), 1.1 * static_cast<double>(filled));
}

// Sound of 2 to 6 records, written by hand.
class FeatureRaggedRequests : public ::testing::Test {
 protected:
  static constexpr std::int64_t kLongest = 5;
  Result<void> append(const std::vector<std::int64_t>& ids,
                      const std::vector<std::int64_t>& lengths, const std::vector<float>& values) {
    auto writer = FeatureWriter::create(governor_, {.directory = scratch_ / "set",
                                                    .columns = {{.name = "x",
                                                                 .dtype = DType::kFloat32,
                                                                 .shape = {},
                                                                 .length_max = kLongest}}})
                      .or_throw();
    const std::vector<std::span<const std::byte>> columns{std::as_bytes(std::span(values))};
    const std::vector<std::span<const std::int64_t>> all{lengths};
    if (auto done = writer.append(ids, columns, {}, all); !done) {
      return done;
    }
    return writer.finish();
  }
  std::string refusal(const std::vector<std::int64_t>& ids,
                      const std::vector<std::int64_t>& lengths, const std::vector<float>& values) {
    const auto done = append(ids, lengths, values);
    EXPECT_TRUE(test::names_in(scratch_.path()).empty());
    return done ? "none" : *done.error().detail;
  }
  ScratchDirectory scratch_{};
  Governor governor_{test::governor_of()};
};

TEST_F(FeatureRaggedRequests, NameTheRecordThatDoesNotFit) {
  EXPECT_EQ(refusal({7, 8}, {5, 6}, std::vector<float>(11)),
            "record 1 (id 8), column \"x\": 6 elements; it takes 0 to 5");
  EXPECT_EQ(refusal({7, 8}, {5, -1}, std::vector<float>(4)),
            "record 1 (id 8), column \"x\": -1 elements; it takes 0 to 5");
  EXPECT_EQ(refusal({7, 8}, {5}, std::vector<float>(5)),
            "column \"x\": 1 lengths were given for 2 records");
  EXPECT_EQ(refusal({7, 8}, {5, 2}, std::vector<float>(6)),
            "column \"x\": 24 bytes were given for 7 elements of 4 bytes");
  EXPECT_EQ(refusal({7, 8, 9}, {2, 0, 3}, {0, 1, 2, std::numeric_limits<float>::infinity(), 4}),
            "record 2 (id 9), column \"x\": holds a NaN or an infinity");
}

TEST_F(FeatureRaggedRequests, NameAnOutputOfTheWrongSize) {
  ASSERT_TRUE(append({7, 8, 9}, {2, 0, 3}, {0, 1, 2, 3, 4}));
  auto store = FeatureStore::open(governor_, {.directory = scratch_ / "set"}).or_throw();
  std::vector<float> out(5, -1.0F);
  const auto read = [&](std::size_t floats, const std::vector<std::int64_t>& ids) {
    const std::vector<std::span<std::byte>> spans{
        std::as_writable_bytes(std::span(out).first(floats))};
    return store.read(ids, std::vector<int>{0}, spans);
  };
  ASSERT_TRUE(read(5, {9, 8, 7}));
  EXPECT_EQ(out, (std::vector<float>{2, 3, 4, 0, 1}));
  EXPECT_TRUE(read(0, {8, 8}));
  EXPECT_EQ(*read(4, {9, 8, 7}).error().detail,
            "column \"x\": the output is smaller than the elements of the records; lengths() "
            "counts them");
  EXPECT_EQ(*read(5, {9, 8}).error().detail,
            "column \"x\": the output has 8 bytes more than the records");
  std::vector<std::int64_t> lengths(1);
  EXPECT_FALSE(store.lengths(std::vector<std::int64_t>{3}, 0, lengths)) << "no such record";
  EXPECT_FALSE(store.lengths(std::vector<std::int64_t>{0}, 1, lengths)) << "no such column";
}

TEST_F(FeatureRaggedRequests, EmptyRecordsAndNoRecordsAreStored) {
  ASSERT_TRUE(append({4, 5}, {0, 0}, {}));
  ASSERT_TRUE(FeatureStore::verify(scratch_ / "set", nullptr));
  auto store = FeatureStore::open(governor_, {.directory = scratch_ / "set"}).or_throw();
  const std::vector<std::span<std::byte>> none(1);
  EXPECT_TRUE(store.read(std::vector<std::int64_t>{5, 4}, std::vector<int>{0}, none));
  fs::remove_all(scratch_ / "set");
  ASSERT_TRUE(append({}, {}, {}));
  EXPECT_TRUE(FeatureStore::verify(scratch_ / "set", nullptr));
  EXPECT_EQ(FeatureStore::open(governor_, {.directory = scratch_ / "set"})->info().rows, 0);
}

TEST_F(FeatureRaggedRequests, OnlyRaggedStoresAndPartsAreOfTheNewFormat) {
  ASSERT_TRUE(append({4, 5}, {1, 2}, {1, 2, 3}));
  EXPECT_NE(test::slurp(scratch_ / "set" / "features.json").find("\"version\": 3"),
            std::string::npos);
  const FeatureSet set =
      test::make_set(1, 20, {{.name = "x", .dtype = DType::kInt32, .shape = {}}});
  ASSERT_TRUE(test::write_set(governor_, scratch_ / "fixed", set));
  EXPECT_NE(test::slurp(scratch_ / "fixed" / "features.json").find("\"version\": 1"),
            std::string::npos);
}

TEST(FeatureRaggedDamageTest, FlippedBitsAreNoticedOrHarmless) {
  ScratchDirectory scratch;
  Governor governor = test::governor_of();
  const FeatureSet set = test::make_set(11, 700, mixed_columns(), IdKind::kSparse);
  const fs::path directory = scratch / "set";
  ASSERT_TRUE(test::write_set(governor, directory, set));
  const std::int64_t floor = FeatureStore::inspect(directory)->floor_bytes;
  std::mt19937_64 random(12);
  for (const std::string& name : test::names_in(directory)) {
    const std::string good = test::slurp(directory / name);
    int noticed = 0;
    for (int round = 0; round < 16; ++round) {
      std::string bad = good;
      bad[random() % bad.size()] ^= static_cast<char>(1 << random() % 8);
      test::spill(directory / name, bad);
      for (const std::int64_t bytes :
           {floor, std::int64_t{16} << 20}) {  // Tables paged, and whole.
        auto store = FeatureStore::open(governor, {.directory = directory, .cache_bytes = bytes});
        const std::string wrong = store ? compare(*store, set, upto(700), {0, 1, 2, 3, 4}, true)
                                        : store.error().to_string();
        EXPECT_EQ(wrong.find("differs"), std::string::npos) << name;
        const bool sound = FeatureStore::verify(directory, nullptr).has_value();
        EXPECT_TRUE(wrong.empty() || !sound) << name << ": " << wrong;
        noticed += sound ? 0 : 1;
      }
    }
    EXPECT_GT(noticed, 0) << name;
    test::spill(directory / name, good);
  }
}

TEST(FeatureRaggedCrashTest, AnExtensionIsThereWholeOrNotWhereverTheWriterIsKilled) {
  ScratchDirectory scratch;
  Governor governor = test::governor_of();
  const FeatureSet set = test::make_set(13, 300, mixed_columns(), IdKind::kSparse);
  const fs::path directory = scratch / "set";
  ASSERT_TRUE(test::write_set(governor, directory, test::slice(set, 0, 200)));
  bool ended = false;
  bool old_seen = false;
  for (long nth = 1; !ended; nth += 2) {
    ASSERT_LT(nth, 400);
    const pid_t child = ::fork();
    if (child == 0) {
      ::setenv("PLIMSOLL_CRASH", std::string("*:").append(std::to_string(nth)).c_str(), 1);
      reload_crash_points();
      std::_Exit(test::extend_set(test::governor_of(), directory, set, 200, 300, 0) ? 0 : 3);
    }
    int status = 0;
    ::waitpid(child, &status, 0);
    ASSERT_TRUE(WIFSIGNALED(status) || WEXITSTATUS(status) == 0) << "point " << nth;
    ended = WIFEXITED(status);
    ASSERT_TRUE(FeatureStore::verify(directory, nullptr)) << "point " << nth;
    auto store = FeatureStore::open(governor, {.directory = directory}).or_throw();
    const std::int64_t rows = store.info().rows;
    ASSERT_TRUE(rows == 300 || (!ended && rows == 200)) << rows << " rows, point " << nth;
    ASSERT_EQ(compare(store, set, upto(rows), {0, 1, 2, 3, 4}, true), "");
    old_seen = old_seen || rows == 200;
    fs::remove_all(feature_part_path(directory, 1));
  }
  EXPECT_TRUE(old_seen);
}

TEST(FeatureRaggedCrashTest, NothingIsLeftBehindWhicheverCallFails) {
  ScratchDirectory scratch;
  Governor governor = test::governor_of();
  const FeatureSet set = test::make_set(14, 300, mixed_columns(), IdKind::kSparse);
  for (const FileCall call : {FileCall::kWrite, FileCall::kSync}) {
    int failures = 0;
    for (std::int64_t nth = 1;; ++nth) {
      Result<void> result;
      {
        const ScopedFileFault fault({.call = call, .nth = nth, .os_errno = 28});
        result = test::write_set(governor, scratch / "set", set, 64 << 10);
      }
      const bool whole = FeatureStore::verify(scratch / "set", nullptr).has_value();
      fs::remove_all(scratch / "set");
      EXPECT_TRUE(test::names_in(scratch.path()).empty()) << "call " << nth;
      if (result) {
        EXPECT_TRUE(whole);
        break;
      }
      ++failures;
      EXPECT_EQ(result.error().code, ErrorCode::kIo) << result.error().to_string();
    }
    EXPECT_GT(failures, 3);
  }
}

}  // namespace
}  // namespace plimsoll
