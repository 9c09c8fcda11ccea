// SPDX-License-Identifier: Apache-2.0
//
// Goal: a store returns what was written, in request order, from a slab far smaller than itself,
// whatever the ids, groups and dtypes; and refuses what it must, in words that are pinned here.
// Method: FeatureSet (plain arrays) is the oracle; random requests, the seed printed on failure.
#include "plimsoll/feature_store.h"

#include <algorithm>
#include <fstream>
#include <numeric>
#include <thread>

#include <gtest/gtest.h>

#include "store/feature_format.h"
#include "store/feature_table.h"
#include "tests/support/feature_set.h"

namespace plimsoll {
namespace {

using test::compare;
using test::FeatureSet;
using test::GroupKind;
using test::IdKind;
using test::ScratchDirectory;
namespace fs = std::filesystem;

std::vector<ColumnSpec> mixed_columns() {
  return {{.name = "flag", .dtype = DType::kUint8, .shape = {}},
          {.name = "image", .dtype = DType::kFloat32, .shape = {24}},
          {.name = "text", .dtype = DType::kFloat16, .shape = {3, 5}},
          {.name = "stamp", .dtype = DType::kInt64, .shape = {}}};
}

std::vector<ColumnSpec> clip_columns() {
  return {{.name = "image", .dtype = DType::kFloat32, .shape = {512}},
          {.name = "text", .dtype = DType::kFloat32, .shape = {512}}};
}

TEST(FeatureLayoutTest, StoresTwoClipVectorsInExactlyOnePage) {
  const auto layout = plan_feature_layout(clip_columns()).or_throw();
  EXPECT_EQ(layout.stride, 4096);
  EXPECT_EQ(layout.block_bytes, 4096);
  EXPECT_EQ(layout.records_per_block, 1);
}

TEST(FeatureLayoutTest, AlignsEveryColumnToItsElementWithoutGaps) {
  const auto layout = plan_feature_layout(mixed_columns()).or_throw();
  EXPECT_EQ(layout.record_bytes, 1 + 96 + 30 + 8);
  EXPECT_EQ(layout.stride, 136);
  for (std::size_t k = 0; k < layout.columns.size(); ++k) {
    EXPECT_EQ(layout.offsets[k] % dtype_bytes(layout.columns[k].dtype), 0);
  }
}

TEST(FeatureLayoutTest, WastesAtMostAnEighthWhereSixteenPagesAllowIt) {
  for (std::int64_t floats = 1; floats <= 16384; floats += 37) {
    const auto layout =
        plan_feature_layout({{.name = "x", .dtype = DType::kFloat32, .shape = {floats}}})
            .or_throw();
    const std::int64_t used = layout.records_per_block * layout.stride;
    ASSERT_GE(layout.records_per_block, 1);
    ASSERT_LE(used, layout.block_bytes);
    std::int64_t least_waste = 100;
    for (std::int64_t pages = 1; pages <= 16; ++pages) {
      const std::int64_t fill = pages * 4096 / layout.stride * layout.stride;
      least_waste =
          fill > 0 ? std::min(least_waste, 100 - fill * 100 / (pages * 4096)) : least_waste;
    }
    const std::int64_t waste = 100 - used * 100 / layout.block_bytes;
    ASSERT_TRUE(waste <= 13 || waste == least_waste) << floats << " floats waste " << waste << " %";
  }
}

TEST(FeatureLayoutTest, GivesARecordAboveSixteenPagesItsOwnBlock) {
  const auto layout =
      plan_feature_layout({{.name = "x", .dtype = DType::kFloat32, .shape = {77, 512}}}).or_throw();
  EXPECT_EQ(layout.records_per_block, 1);
  EXPECT_EQ(layout.block_bytes, 159744);
}

TEST(FeatureLayoutTest, RefusesColumnsItCannotStore) {
  EXPECT_FALSE(plan_feature_layout({}));
  EXPECT_FALSE(plan_feature_layout({{.name = "Image"}}));
  EXPECT_FALSE(plan_feature_layout({{.name = "../x"}}));
  EXPECT_FALSE(plan_feature_layout({{.name = "x"}, {.name = "x"}}));
  EXPECT_FALSE(plan_feature_layout({{.name = "x", .shape = {0}}}));
  EXPECT_FALSE(plan_feature_layout({{.name = "x", .shape = {INT64_MAX, 8}}}));
  EXPECT_FALSE(plan_feature_layout({{.name = "x", .shape = {1 << 20, 8}}}));
}

struct Shape {
  std::int64_t rows;
  IdKind ids;
  GroupKind groups;
  std::int64_t cache_bytes;  // 0: the store's floor.
};

class FeatureStoreShapes : public ::testing::TestWithParam<Shape> {};

TEST_P(FeatureStoreShapes, ReturnsWhatWasWrittenInRequestOrder) {
  const Shape shape = GetParam();
  const std::uint64_t seed = 7'000 + static_cast<std::uint64_t>(shape.rows);
  SCOPED_TRACE("seed " + std::to_string(seed));
  ScratchDirectory scratch;
  Governor governor = test::governor_of();
  const FeatureSet set = test::make_set(seed, shape.rows, mixed_columns(), shape.ids, shape.groups);
  ASSERT_TRUE(test::write_set(governor, scratch / "set", set));
  std::int64_t cache_bytes = shape.cache_bytes;
  if (cache_bytes == 0) {
    const auto refused =
        FeatureStore::open(governor, {.directory = scratch / "set", .cache_bytes = 1});
    ASSERT_FALSE(refused);
    ASSERT_EQ(refused.error().code, ErrorCode::kOverBudget);
    cache_bytes = refused.error().requested_bytes;
  }
  auto store =
      FeatureStore::open(governor, {.directory = scratch / "set", .cache_bytes = cache_bytes})
          .or_throw();
  EXPECT_LE(governor.state().leased_bytes, cache_bytes + 4096);
  EXPECT_EQ(store.info().rows, shape.rows);
  EXPECT_EQ(store.info().columns, set.columns);
  EXPECT_EQ(store.info().dense_ids, shape.ids == IdKind::kDense || shape.rows < 2);

  std::mt19937_64 random(seed);
  for (int round = 0; round < 30; ++round) {
    const auto size = round == 0 ? std::size_t{0} : static_cast<std::size_t>(random() % 700);
    std::vector<std::int64_t> ordinals(size);
    for (auto& ordinal : ordinals) {
      ordinal = static_cast<std::int64_t>(random() % static_cast<std::uint64_t>(shape.rows));
    }
    const std::vector<int> columns =
        round % 3 == 0 ? std::vector<int>{0, 1, 2, 3} : std::vector<int>{3, 1};
    ASSERT_EQ(compare(store, set, ordinals, columns, round % 2 == 1), "") << "round " << round;
    std::vector<std::int64_t> ids(size);
    ASSERT_TRUE(store.ids_of(ordinals, ids));
    std::vector<std::int64_t> back(size);
    ASSERT_TRUE(store.ordinals_of(ids, back));
    ASSERT_EQ(back, ordinals);
  }
  if (shape.groups != GroupKind::kNone) {
    std::int64_t begin = 0;
    for (std::int64_t g = 0; g < store.info().groups; ++g) {
      const auto [first, count] = store.group(g).or_throw();
      ASSERT_EQ(first, begin);
      for (std::int64_t i = first; i < first + count; ++i) {
        ASSERT_EQ(set.group_index[static_cast<std::size_t>(i)], g);
      }
      begin += count;
    }
    EXPECT_EQ(begin, shape.rows);
  }
  EXPECT_TRUE(FeatureStore::verify(scratch / "set", nullptr));
}

INSTANTIATE_TEST_SUITE_P(
    All, FeatureStoreShapes,
    ::testing::Values(Shape{1, IdKind::kDense, GroupKind::kNone, 0},
                      Shape{5000, IdKind::kDense, GroupKind::kNone, 0},
                      Shape{5000, IdKind::kDense, GroupKind::kNone, 64 << 20},
                      Shape{6000, IdKind::kShuffled, GroupKind::kUniform, 0},
                      Shape{7003, IdKind::kSparse, GroupKind::kVaried, 0},
                      Shape{7003, IdKind::kSparse, GroupKind::kVaried, 2 << 20},
                      Shape{20000, IdKind::kSparse, GroupKind::kNone, 300 << 10}));

TEST(FeatureStoreTest, CountsHitsAndStaysInsideItsSlab) {
  ScratchDirectory scratch;
  Governor governor = test::governor_of();
  const FeatureSet set = test::make_set(1, 2000, clip_columns());
  ASSERT_TRUE(test::write_set(governor, scratch / "set", set));
  auto store = FeatureStore::open(governor, {.directory = scratch / "set", .cache_bytes = 16 << 20})
                   .or_throw();
  std::vector<std::int64_t> all(2000);
  for (std::size_t i = 0; i < all.size(); ++i) {
    all[i] = static_cast<std::int64_t>(i);
  }
  ASSERT_EQ(compare(store, set, all, {0, 1}, false), "");
  EXPECT_EQ(store.stats().hits, 0);
  EXPECT_EQ(store.stats().blocks_read, 2000);
  ASSERT_EQ(compare(store, set, all, {0, 1}, false), "");
  EXPECT_EQ(store.stats().hits, 2000);
  EXPECT_EQ(store.stats().requests, 4000);
  EXPECT_EQ(store.stats().blocks_read, 2000);
}

TEST(FeatureStoreTest, ShrinkGivesPagesBackAndReadsGoOn) {
  ScratchDirectory scratch;
  Governor governor = test::governor_of();
  const FeatureSet set = test::make_set(2, 2000, clip_columns());
  ASSERT_TRUE(test::write_set(governor, scratch / "set", set));
  auto store = FeatureStore::open(governor, {.directory = scratch / "set", .cache_bytes = 4 << 20})
                   .or_throw();
  std::vector<std::int64_t> some(900);
  for (std::size_t i = 0; i < some.size(); ++i) {
    some[i] = static_cast<std::int64_t>(i * 2);
  }
  ASSERT_EQ(compare(store, set, some, {1}, false), "");
  const std::int64_t before = governor.state().leased_bytes;
  const std::int64_t given = store.shrink(1 << 20);
  EXPECT_GE(given, 1 << 20);
  EXPECT_EQ(governor.state().leased_bytes, before - given);
  ASSERT_EQ(compare(store, set, some, {0, 1}, true), "");
  EXPECT_EQ(governor.state().leased_bytes, before - given) << "enough frames were left";
  // Down to the fewest frames, which is less than one request would pin.
  EXPECT_GT(store.shrink(INT64_MAX), 2 << 20);
  EXPECT_LT(governor.state().leased_bytes - store.plan().buffer_bytes, 128 << 10);
  ASSERT_EQ(compare(store, set, some, {0, 1}, true), "");
  EXPECT_EQ(store.stats().resident_frames, 8);
  EXPECT_EQ(store.shrink(INT64_MAX), 0);
  // Some at first, then all of them.
  EXPECT_LE(store.grow_back(1 << 20), 1 << 20);
  ASSERT_EQ(compare(store, set, some, {0, 1}, true), "");
  EXPECT_GT(store.stats().resident_frames, 8);
  EXPECT_GT(store.grow_back(INT64_MAX), 0);
  EXPECT_EQ(governor.state().leased_bytes, before);
  EXPECT_EQ(store.grow_back(INT64_MAX), 0);
  ASSERT_EQ(compare(store, set, some, {0, 1}, true), "");
}

// How many reads a sweep over `wanted` takes: neighbours up to `gap` pages apart share one of at
// most 16 pages, and 256 blocks are asked for at a time. Every record has one page to itself.
std::int64_t reads_of_sweep(std::vector<std::int64_t> wanted, std::int64_t gap) {
  std::sort(wanted.begin(), wanted.end());
  wanted.erase(std::unique(wanted.begin(), wanted.end()), wanted.end());
  std::int64_t reads = 0;
  std::int64_t begin = 0;
  for (std::size_t i = 0; i < wanted.size(); ++i) {
    const bool joins =
        i % 256 != 0 && wanted[i] - wanted[i - 1] <= gap + 1 && wanted[i] - begin < 16;
    begin = joins ? begin : wanted[i];
    reads += joins ? 0 : 1;
  }
  return reads;
}

TEST(FeatureSweepTest, ARequestIsOnePassInTheOrderOfTheFileNeighboursInOneRead) {
  constexpr std::uint64_t kSeed = 31;
  SCOPED_TRACE("seed " + std::to_string(kSeed));
  ScratchDirectory scratch;
  Governor governor = test::governor_of();
  const FeatureSet set = test::make_set(kSeed, 5000, clip_columns());
  ASSERT_TRUE(test::write_set(governor, scratch / "set", set));
  std::mt19937_64 random(kSeed);
  std::vector<std::int64_t> shuffled(5000);
  std::iota(shuffled.begin(), shuffled.end(), 0);
  std::shuffle(shuffled.begin(), shuffled.end(), random);
  for (const std::size_t size : {200U, 1000U, 4096U}) {
    for (const std::int64_t gap : {0, 1, 3}) {
      const std::vector<std::int64_t> wanted(shuffled.begin(),
                                             shuffled.begin() + static_cast<std::ptrdiff_t>(size));
      auto store = FeatureStore::open(governor, {.directory = scratch / "set",
                                                 .cache_bytes = 40 << 20,
                                                 .join_gap_bytes = gap * 4096})
                       .or_throw();
      ASSERT_EQ(compare(store, set, wanted, {0, 1}, false), "");
      const FeatureStats stats = store.stats();
      EXPECT_EQ(stats.reads, reads_of_sweep(wanted, gap)) << size << " gap " << gap;
      EXPECT_EQ(stats.blocks_read, static_cast<std::int64_t>(size));
      EXPECT_EQ(stats.bytes_delivered, static_cast<std::int64_t>(size) * 4096);
      if (gap == 0) {
        EXPECT_EQ(stats.bytes_read, stats.bytes_delivered);
      } else {
        EXPECT_GT(stats.bytes_read, stats.bytes_delivered) << "what stands between is read too";
      }
    }
  }
}

TEST(FeatureSweepTest, ASlabTooSmallForBuffersJoinsNeighboursAndNoGaps) {
  ScratchDirectory scratch;
  Governor governor = test::governor_of();
  const FeatureSet set = test::make_set(32, 400, clip_columns());
  ASSERT_TRUE(test::write_set(governor, scratch / "set", set));
  const auto opened = [&] {
    return FeatureStore::open(governor, {.directory = scratch / "set", .cache_bytes = 1 << 19})
        .or_throw();
  };
  {
    auto store = opened();
    EXPECT_EQ(store.plan().buffer_bytes, 0);
    std::vector<std::int64_t> every_second(200);
    for (std::size_t i = 0; i < every_second.size(); ++i) {
      every_second[i] = static_cast<std::int64_t>(2 * i);
    }
    ASSERT_EQ(compare(store, set, every_second, {0}, false), "");
    EXPECT_EQ(store.stats().reads, 200);
    EXPECT_EQ(store.stats().bytes_read, 200 * 4096);
  }
  auto store = opened();
  std::vector<std::int64_t> all(400);
  std::iota(all.begin(), all.end(), 0);
  ASSERT_EQ(compare(store, set, all, {0}, false), "");
  EXPECT_LT(store.stats().reads, 400 / 8);
}

// Which blocks stay: 2,000 records of a page each, and frames for part of them.
class FeatureKeepsTest : public ::testing::Test {
 protected:
  static constexpr std::int64_t kRows = 2000;
  static constexpr std::size_t kAtOnce = 50;

  FeatureKeepsTest() : set_(test::make_set(35, kRows, clip_columns())) {
    test::write_set(governor_, scratch_ / "set", set_).or_throw();
    order_.resize(kRows);
    std::iota(order_.begin(), order_.end(), 0);
    std::shuffle(order_.begin(), order_.end(), random_);
  }
  FeatureStore open(std::int64_t frames) {
    auto store =
        FeatureStore::open(
            governor_,
            {.directory = scratch_ / "set",
             .cache_bytes =
                 FeatureStore::inspect(scratch_ / "set").or_throw().floor_bytes + frames * 4096})
            .or_throw();
    frames_ = store.stats().frames;
    return store;
  }
  // Reads these records, and returns how many were there.
  std::int64_t hits(FeatureStore& store, std::span<const std::int64_t> wanted) {
    const std::int64_t before = store.stats().hits;
    for (std::size_t at = 0; at < wanted.size(); at += kAtOnce) {
      const auto some = wanted.subspan(at, std::min(kAtOnce, wanted.size() - at));
      EXPECT_EQ(compare(store, set_, {some.begin(), some.end()}, {0}, false), "");
    }
    return store.stats().hits - before;
  }
  std::span<const std::int64_t> records(std::int64_t begin, std::int64_t count) const {
    return std::span(order_).subspan(static_cast<std::size_t>(begin),
                                     static_cast<std::size_t>(count));
  }

  ScratchDirectory scratch_;
  Governor governor_ = test::governor_of();
  FeatureSet set_;
  std::mt19937_64 random_{35};
  std::vector<std::int64_t> order_;
  std::int64_t frames_{0};
};

// The last ones read would give 0.15 of the records; those that never make way, a half.
TEST_F(FeatureKeepsTest, OfHalfTheRecordsInRamTwoFifthsAreFoundInAnEpochOfAnyOrder) {
  for (const bool announced : {false, true}) {
    auto store = open(kRows / 2);
    ASSERT_LT(frames_, kRows * 6 / 10);
    std::int64_t read = 0;
    for (int epoch = 0; epoch < 8; ++epoch) {
      read = epoch == 4 ? store.stats().blocks_read : read;
      std::shuffle(order_.begin(), order_.end(), random_);
      for (std::int64_t at = 0; at < kRows; at += std::ssize(order_) / 20) {
        const auto some = records(at, kRows / 20);
        if (announced) {
          ASSERT_TRUE(store.prefetch_ordinals(some));
        }
        hits(store, some);
      }
    }
    EXPECT_LT(store.stats().blocks_read - read, 4 * (kRows - frames_ * 7 / 10))
        << "announced " << announced;
  }
}

TEST_F(FeatureKeepsTest, WhatIsAnnouncedStaysUntilItIsUsed) {
  auto store = open(400);
  hits(store, records(0, 800));
  const std::vector<std::int64_t> coming(order_.begin() + 800, order_.begin() + 900);
  ASSERT_TRUE(store.prefetch_ordinals(coming));
  hits(store, records(900, frames_ / 4));  // Twice as many as may pass.
  EXPECT_EQ(hits(store, coming), 100);
}

TEST_F(FeatureKeepsTest, WhatWasAskedForAgainOutlivesWhatIsReadOnce) {
  auto store = open(200);
  hits(store, records(0, 400));
  const auto again = records(400, 20);
  hits(store, again);
  EXPECT_EQ(hits(store, again), 20);
  hits(store, records(420, 2 * frames_));
  EXPECT_GT(hits(store, again), 10);
}

// Rows of before make way, though one in sixteen alone: 800 records that fit, after 800 others.
TEST_F(FeatureKeepsTest, OtherRecordsComeToBeKeptInTheEnd) {
  auto store = open(900);
  ASSERT_LT(frames_, 1100);
  for (int epoch = 0; epoch < 2; ++epoch) {
    hits(store, records(0, 800));
  }
  std::int64_t first = 0;
  std::int64_t last = 0;
  for (int epoch = 0; epoch < 30; ++epoch) {
    last = hits(store, records(1000, 800));
    first = epoch == 1 ? last : first;
  }
  EXPECT_LT(first, 400);
  EXPECT_GT(last, 600);
}

TEST(FeatureSweepTest, PrefetchingMakesTheNextRequestAHitAndCountsAsNone) {
  ScratchDirectory scratch;
  Governor governor = test::governor_of();
  const FeatureSet set = test::make_set(33, 3000, clip_columns());
  ASSERT_TRUE(test::write_set(governor, scratch / "set", set));
  auto store = FeatureStore::open(governor, {.directory = scratch / "set", .cache_bytes = 16 << 20})
                   .or_throw();
  const std::vector<std::int64_t> wanted{2999, 3, 4, 5, 70, 3};
  ASSERT_TRUE(store.prefetch_ordinals(wanted));
  EXPECT_EQ(store.stats().requests, 0);
  EXPECT_EQ(store.stats().hits, 0);
  EXPECT_EQ(store.stats().bytes_delivered, 0);
  EXPECT_EQ(store.stats().blocks_read, 5);
  EXPECT_EQ(store.stats().reads, 3);
  ASSERT_EQ(compare(store, set, wanted, {0, 1}, false), "");
  EXPECT_EQ(store.stats().hits, 6);
  EXPECT_EQ(store.stats().blocks_read, 5);
  EXPECT_EQ(store.prefetch_ordinals(std::vector<std::int64_t>{3000}).error().code,
            ErrorCode::kInvalidArgument);
}

TEST(FeatureVerifyTest, TellsHowFarItIsAndStopsWhenToldTo) {
  ScratchDirectory scratch;
  Governor governor = test::governor_of();
  const FeatureSet set = test::make_set(34, 2000, clip_columns());
  ASSERT_TRUE(test::write_set(governor, scratch / "set", set));
  std::vector<std::int64_t> seen;
  std::int64_t of = 0;
  ASSERT_TRUE(FeatureStore::verify(scratch / "set", [&](std::int64_t done, std::int64_t total) {
    seen.push_back(done);
    of = total;
    return true;
  }));
  EXPECT_EQ(of, 2000 * 4096);
  EXPECT_GE(seen.size(), 5U);
  EXPECT_TRUE(std::is_sorted(seen.begin(), seen.end()));
  EXPECT_EQ(seen.back(), of);
  int calls = 0;
  const auto stopped = FeatureStore::verify(
      scratch / "set", [&](std::int64_t, std::int64_t) { return ++calls < 3; });
  ASSERT_FALSE(stopped);
  EXPECT_EQ(*stopped.error().detail, (scratch / "set").string() + ": cancelled");
  EXPECT_EQ(calls, 3);
}

TEST(FeatureStoreTest, NamesWhatIsWrongWithARequest) {
  ScratchDirectory scratch;
  Governor governor = test::governor_of();
  const FeatureSet set = test::make_set(3, 50, mixed_columns());
  ASSERT_TRUE(test::write_set(governor, scratch / "set", set));
  auto store = FeatureStore::open(governor, {.directory = scratch / "set"}).or_throw();
  std::vector<std::byte> out(8);
  const std::vector<std::span<std::byte>> spans{out};
  const std::vector<int> stamp{3};
  const std::string where = (scratch / "set").string();
  EXPECT_EQ(*store.read_ordinals(std::vector<std::int64_t>{50}, stamp, spans).error().detail,
            where + ": there is no record 50; ordinals are 0 to 49");
  EXPECT_EQ(*store.read(std::vector<std::int64_t>{99}, stamp, spans).error().detail,
            where + ": there is no record with id 99 (it holds 50)");
  EXPECT_EQ(store.read(std::vector<std::int64_t>{99}, stamp, spans).error().code,
            ErrorCode::kNotFound);
  EXPECT_EQ(*store.read_ordinals(std::vector<std::int64_t>{1, 2}, stamp, spans).error().detail,
            "column \"stamp\": the output has 8 bytes, 2 records need 8 each");
  EXPECT_FALSE(store.read(std::vector<std::int64_t>{1, 2, 3}, stamp, spans));
  EXPECT_FALSE(store.read_ordinals(std::vector<std::int64_t>{1}, std::vector<int>{4}, spans));
  EXPECT_EQ(*store.column("pixels").error().detail,
            "there is no column \"pixels\"; the store has flag, image, text, stamp");
  EXPECT_EQ(store.column("text").or_throw(), 2);
  EXPECT_FALSE(store.group(0));
}

TEST(FeatureStoreTest, NamesTheFileThatIsMissingTruncatedOrAltered) {
  ScratchDirectory scratch;
  Governor governor = test::governor_of();
  const FeatureSet set =
      test::make_set(4, 3000, mixed_columns(), IdKind::kSparse, GroupKind::kVaried);
  EXPECT_EQ(FeatureStore::open(governor, {.directory = scratch / "none"}).error().code,
            ErrorCode::kNotFound);
  for (const std::string name :
       {"records.dat", "checksums.dat", "ids.dat", "groups.dat", "features.json", "index.ids"}) {
    const fs::path directory = scratch / ("set-" + name);
    ASSERT_TRUE(test::write_set(governor, directory, set));
    const auto size = static_cast<std::int64_t>(fs::file_size(directory / name));
    {
      std::fstream file(directory / name, std::ios::in | std::ios::out | std::ios::binary);
      file.seekg(size / 2);
      const char old = static_cast<char>(file.get());
      file.seekp(size / 2);
      file.put(static_cast<char>(old ^ 0x10));
    }
    const auto verified = FeatureStore::verify(directory, nullptr);
    ASSERT_FALSE(verified) << name;
    EXPECT_EQ(verified.error().code, ErrorCode::kCorrupt) << verified.error().to_string();
    EXPECT_NE(verified.error().to_string().find(name), std::string::npos)
        << verified.error().to_string();
    fs::resize_file(directory / name, static_cast<std::uintmax_t>(size - 1));
    const auto opened = FeatureStore::open(governor, {.directory = directory});
    ASSERT_FALSE(opened) << name;
    EXPECT_EQ(opened.error().code, ErrorCode::kCorrupt) << opened.error().to_string();
    EXPECT_NE(opened.error().to_string().find(name), std::string::npos)
        << opened.error().to_string();
  }
  EXPECT_EQ(governor.state().leased_bytes, 0);
}

TEST(FeatureStoreTest, ReportsAnAlteredBlockByNumberAndGoesOnReadingOthers) {
  ScratchDirectory scratch;
  Governor governor = test::governor_of();
  const FeatureSet set = test::make_set(5, 300, clip_columns());
  ASSERT_TRUE(test::write_set(governor, scratch / "set", set));
  {
    std::fstream file(scratch / "set" / "records.dat",
                      std::ios::in | std::ios::out | std::ios::binary);
    file.seekp(17 * 4096 + 9);
    file.put('\x7F');
  }
  auto store = FeatureStore::open(governor, {.directory = scratch / "set", .cache_bytes = 1 << 20})
                   .or_throw();
  for (int attempt = 0; attempt < 3; ++attempt) {
    EXPECT_EQ(
        compare(store, set, {3, 17, 40}, {0}, false),
        (scratch / "set" / "records.dat").string() + ": block 17 does not match its checksum");
    EXPECT_EQ(compare(store, set, {3, 16, 18, 40}, {0}, false), "");
  }
}

TEST(FeatureStoreTest, RefusesASlabTheGovernorCannotGive) {
  ScratchDirectory scratch;
  Governor governor = test::governor_of("320MiB");
  const FeatureSet set = test::make_set(6, 3000, clip_columns());
  ASSERT_TRUE(test::write_set(governor, scratch / "set", set));
  auto held = governor.reserve(Tag::kOther, governor.state().free_bytes() - (1 << 20)).or_throw();
  const auto refused =
      FeatureStore::open(governor, {.directory = scratch / "set", .cache_bytes = 8 << 20});
  ASSERT_FALSE(refused);
  EXPECT_EQ(refused.error().code, ErrorCode::kOverBudget);
  EXPECT_EQ(governor.state().pools[static_cast<std::size_t>(Tag::kFeature)].leased_bytes, 0);
  EXPECT_TRUE(
      FeatureStore::open(governor, {.directory = scratch / "set", .cache_bytes = 512 << 10}));
}

TEST(FeatureStoreTest, FingerprintFollowsColumnsRowsIdsAndValues) {
  ScratchDirectory scratch;
  Governor governor = test::governor_of();
  const auto fingerprint = [&](const std::string& name, const FeatureSet& set) {
    EXPECT_TRUE(test::write_set(governor, scratch / name, set));
    return FeatureStore::inspect(scratch / name).or_throw().fingerprint;
  };
  FeatureSet set = test::make_set(8, 100, mixed_columns());
  const std::string first = fingerprint("a", set);
  EXPECT_EQ(first, fingerprint("b", set));
  set.values[1][5] ^= std::byte{1};
  EXPECT_NE(first, fingerprint("c", set));
  set.values[1][5] ^= std::byte{1};
  std::swap(set.ids[3], set.ids[4]);
  EXPECT_NE(first, fingerprint("d", set));
}

}  // namespace
}  // namespace plimsoll
