// SPDX-License-Identifier: Apache-2.0
//
// Goal: a table in sample order that grows does so at the price stated: a row that comes costs
// nothing until it is changed, an epoch that begins with it streams like any other, and ids belong
// to the commits that name them. (What its rows hold: timeline_oracle_test.cpp; what a crash
// leaves: tests/crash.)
#include <set>

#include "plimsoll/sample_order.h"
#include "tests/support/embedding_table_fixture.h"

namespace plimsoll {
namespace {

using namespace test;

constexpr std::int64_t kMade = 3000;
constexpr std::int64_t kMost = 4000;
constexpr std::int64_t kDim = 32;
constexpr std::int64_t kBatch = 100;

std::vector<std::int64_t> range(std::int64_t from, std::int64_t to) {
  std::vector<std::int64_t> ids;
  for (std::int64_t id = from; id < to; ++id) {
    ids.push_back(id);
  }
  return ids;
}

class TimelineGrowthTest : public EmbeddingTableTest {
 protected:
  [[nodiscard]] EmbeddingStoreOptions options() const {
    return {.directory = directory(),
            .dim = kDim,
            .init = {.kind = RowInitKind::kNormal, .scale = 1.0F, .seed = 5},
            .layout = RowLayout::kSampleOrder,
            .order_seed = 11,
            .store_bytes = 2 << 20,
            .rows = kMade,
            .rows_max = kMost,
            .batch_rows = kBatch};
  }
  // One epoch in its order, every row of it changed; returns the share of gathered rows that were
  // in RAM.
  static double train(EmbeddingStore& store, std::int64_t epoch) {
    store.begin_epoch(epoch).or_throw();
    const StoreStats before = store.stats();
    const SampleOrder order(store.rows(), 11, epoch);
    std::vector<float> rows(kBatch * kDim);
    for (std::int64_t at = 0; at < order.samples(); at += kBatch) {
      std::vector<std::int64_t> ids;
      for (std::int64_t i = at; i < std::min(at + kBatch, order.samples()); ++i) {
        ids.push_back(order.at(i));
      }
      const auto some = std::span(rows).first(ids.size() * kDim);
      store.gather(ids, some).or_throw();
      store.apply(ids, some).or_throw();
    }
    const StoreStats after = store.stats();
    return 2.0 * static_cast<double>(after.hits - before.hits) /
           static_cast<double>(after.requests - before.requests);
  }
};

TEST_F(TimelineGrowthTest, AnEpochThatBeginsWithNewRowsStreamsThem) {
  auto store = open(options());
  EXPECT_EQ(store.rows_max(), kMost);
  EXPECT_EQ(train(store, 0), 1.0);
  EXPECT_EQ(store.insert(range(0, 3500)).or_throw(), 500);
  EXPECT_EQ(store.rows(), 3500);
  EXPECT_EQ(train(store, 1), 1.0);
  EXPECT_EQ(train(store, 2), 1.0);
  store.commit(1).or_throw();
  EXPECT_LE(EmbeddingStore::inspect(directory()).or_throw().disk_bytes,
            store.plan().disk_cap_bytes);
}

// "Frozen once writing for it has begun; newcomers join the next": announced in time, they cost no
// pass over the table.
TEST_F(TimelineGrowthTest, RowsThatComeBeforeAnEpochIsWrittenForJoinItFree) {
  auto store = open(options());
  train(store, 0);
  store.begin_epoch(1).or_throw();
  store.insert(range(kMade, kMade + 700)).or_throw();
  const SampleOrder order(kMade, 11, 1);  // Epoch 1 is as it began.
  std::vector<float> rows(kBatch * kDim, 1.0F);
  for (std::int64_t at = 0; at < kMade; at += kBatch) {
    std::vector<std::int64_t> ids;
    for (std::int64_t i = at; i < at + kBatch; ++i) {
      ids.push_back(order.at(i));
    }
    store.update(ids, rows).or_throw();
  }
  store.commit(1).or_throw();
  const std::int64_t written = store.stats().bytes_written;
  store.begin_epoch(2).or_throw();  // Of 3,700 rows.
  EXPECT_EQ(store.stats().bytes_written, written) << "rows were moved once more";
  EXPECT_EQ(train(store, 2), 1.0);
}

TEST_F(TimelineGrowthTest, ARowThatComesIsWrittenNowhereUntilItIsChanged) {
  auto store = open(options());
  train(store, 0);
  store.commit(1).or_throw();
  const StoreStats before = store.stats();
  store.insert(range(kMade, kMost)).or_throw();
  EXPECT_EQ(store.stats().bytes_written, before.bytes_written);
  const auto fresh = gather(store, range(kMade, kMost));
  EXPECT_NE(fresh, std::vector<float>(fresh.size(), 0.0F));
  auto other = options();
  other.directory = root_ / "made-so";
  other.rows = kMost;
  other.rows_max = 0;
  auto made = open(other);
  EXPECT_EQ(fresh, gather(made, range(kMade, kMost))) << "not as a table made with them begins";
}

TEST_F(TimelineGrowthTest, IdsBelongToTheCommitsThatNameThem) {
  const std::vector<std::int64_t> first{-9, 77'000};
  const std::vector<std::int64_t> second{5'000'000, 6};  // 6 is there already.
  const std::vector<std::int64_t> third{-1, -2, -3};
  {
    auto store = open(options());
    EXPECT_EQ(store.insert(first).or_throw(), 2);
    store.commit(1).or_throw();
    EXPECT_EQ(store.insert(second).or_throw(), 1);
    store.update(std::span(second).first(1), std::vector<float>(kDim, 3.0F)).or_throw();
    store.commit(2).or_throw();
    store.insert(third).or_throw();  // Never committed.
  }
  {
    auto store = open(options());
    EXPECT_EQ(store.rows(), kMade + 3);
    EXPECT_EQ(gather(store, std::span(second).first(1)), std::vector<float>(kDim, 3.0F));
    std::vector<float> row(kDim);
    EXPECT_FALSE(store.gather(std::span(third).first(1), row));
  }
  EXPECT_EQ(EmbeddingStore::inspect(directory()).or_throw().rows, kMade + 3);
  {
    auto wanted = options();
    wanted.at_step = 1;
    auto store = open(wanted);  // Goes on from the older commit with ids of its own.
    EXPECT_EQ(store.rows(), kMade + 2);
    EXPECT_EQ(store.insert(third).or_throw(), 3);
    store.commit(3).or_throw();
  }
  EXPECT_TRUE(EmbeddingStore::verify(directory(), {}));
  auto store = open(options());
  std::set<std::int64_t> found;
  for (const auto& [id, row] : all_rows(store)) {
    found.insert(id);
  }
  std::set<std::int64_t> wanted(first.begin(), first.end());
  wanted.insert(third.begin(), third.end());
  for (const std::int64_t id : range(0, kMade)) {
    wanted.insert(id);
  }
  EXPECT_EQ(found, wanted);
}

TEST_F(TimelineGrowthTest, WhatCannotBeIsRefusedAndChangesNothing) {
  auto store = open(options());
  const auto refused = store.insert(range(0, kMost + 1));
  ASSERT_FALSE(refused);
  EXPECT_EQ(refused.error().code, ErrorCode::kInvalidArgument);
  EXPECT_NE(refused.error().to_string().find("rows_max is 4000, 3000 rows are there"),
            std::string::npos);
  EXPECT_EQ(store.rows(), kMade);
  std::vector<float> row(kDim);
  EXPECT_FALSE(store.gather(range(kMade, kMade + 1), row));
  const auto erased = store.erase(range(0, 1));
  ASSERT_FALSE(erased);
  EXPECT_EQ(erased.error().code, ErrorCode::kInvalidArgument);
  auto fixed = options();
  fixed.directory = root_ / "fixed";
  fixed.rows_max = 0;
  auto other = open(fixed);
  const auto none = other.insert(range(kMade, kMade + 1));
  ASSERT_FALSE(none);
  EXPECT_NE(none.error().to_string().find("rows_max"), std::string::npos);
}

TEST_F(TimelineGrowthTest, ATableMayBeginWithoutRows) {
  auto wanted = options();
  wanted.rows = 0;
  {
    auto store = open(wanted);
    store.begin_epoch(0).or_throw();
    store.insert(range(100, 400)).or_throw();
    store.begin_epoch(0).or_throw();
    const SampleOrder order(300, 11, 0);
    for (std::int64_t at = 0; at < 300; at += 50) {
      std::vector<std::int64_t> ids;
      for (std::int64_t i = at; i < at + 50; ++i) {
        ids.push_back(100 + order.at(i));
      }
      store.update(ids, std::vector<float>(50 * kDim, static_cast<float>(at))).or_throw();
    }
    store.commit(4).or_throw();
  }
  auto store = open(wanted);
  const SampleOrder order(300, 11, 0);
  for (std::int64_t at = 0; at < 300; ++at) {
    const std::int64_t id = 100 + order.at(at);
    const std::int64_t fifty = at / 50;
    EXPECT_EQ(gather(store, {&id, 1})[0], static_cast<float>(fifty * 50));
  }
}

TEST_F(TimelineGrowthTest, EverythingIsPlannedForAsManyRowsAsThereMayBe) {
  auto wanted = options();
  wanted.store_bytes = 0;
  const SlabPlan growing = EmbeddingStore::plan(wanted).or_throw();
  EXPECT_EQ(growing.rows_max, kMost);
  wanted.rows = kMost;
  wanted.rows_max = 0;
  const SlabPlan full = EmbeddingStore::plan(wanted).or_throw();
  // 14.2 bytes for each id that may come, in whole pages.
  EXPECT_GE(growing.index_bytes, full.index_bytes + 14 * (kMost - kMade));
  EXPECT_LE(growing.index_bytes, full.index_bytes + 15 * (kMost - kMade) + 4 * 4096);
  EXPECT_GE(growing.disk_cap_bytes, full.disk_cap_bytes + 8 * (kMost - kMade));
}

}  // namespace
}  // namespace plimsoll
