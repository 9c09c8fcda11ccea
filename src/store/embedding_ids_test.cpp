// SPDX-License-Identifier: Apache-2.0
//
// Goal: finding the rows of arbitrary ids costs no more reads than it must, and a table of such ids
// holds what a plain map would while its index has hardly any room. Method: the file layer counts
// reads; random operations by seed against the map; every read fails once.
#include <cerrno>
#include <cstdint>
#include <set>

#include "os/file_faults.h"
#include "tests/support/embedding_table_fixture.h"

namespace plimsoll {
namespace {

using namespace test;

constexpr std::int64_t kDim = 8;
constexpr std::size_t kIdsPerPage = 340;  // Of the sorted file: docs/formats/embedding_store.md.

class SparseIdsTest : public EmbeddingTableTest {
 protected:
  [[nodiscard]] EmbeddingStoreOptions sparse(std::span<const std::int64_t> ids,
                                             std::int64_t rows_max = 0) const {
    return with_floor({.directory = directory(),
                       .dim = kDim,
                       .init = {.seed = 5},
                       .ids = ids,
                       .rows_max = rows_max,
                       .batch_rows = 600,
                       .io_threads = 2});
  }
  /// A table with a commit that holds every row, so that no read looks up what a row began as.
  void write_all(const EmbeddingStoreOptions& options, std::span<const std::int64_t> ids) {
    auto store = open(options);
    const std::vector<float> rows(ids.size() * kDim, 1.0F);
    store.update(ids, rows).or_throw();
    store.commit(1).or_throw();
  }
  /// Pages of the sorted file in which `some` of `ids` are, or would be.
  static std::int64_t pages_of(std::vector<std::int64_t> ids, std::span<const std::int64_t> some) {
    std::sort(ids.begin(), ids.end());
    std::set<std::ptrdiff_t> pages;
    for (const std::int64_t id : some) {
      const auto after = std::upper_bound(ids.begin(), ids.end(), id);
      pages.insert(std::max<std::ptrdiff_t>(after - ids.begin() - 1, 0) /
                   static_cast<std::ptrdiff_t>(kIdsPerPage));
    }
    return static_cast<std::int64_t>(pages.size());
  }
  /// Reads that `call` makes of anything but pages of rows.
  template <class Call>
  static std::int64_t index_reads(const EmbeddingStore& store, const Call& call) {
    const std::int64_t pages_before = store.stats().pages_read;
    const ScopedFileFault counting({.call = FileCall::kRead, .nth = INT64_MAX});
    call();
    return file_fault_calls() - (store.stats().pages_read - pages_before);
  }
};

TEST_F(SparseIdsTest, R28AMissedIndexPageIsReadOnceForABatchAndApplyReadsNone) {
  const auto ids = sparse_ids(40'000, 1);  // 118 pages, of which the smallest slab holds two.
  const auto options = sparse(ids, 42'000);
  write_all(options, ids);
  auto store = open(options);
  std::mt19937_64 random(2);
  std::vector<float> rows(600 * kDim, 0.5F);
  for (int round = 0; round < 5; ++round) {
    const auto batch = draw(ids, 600, random);
    const std::int64_t pages = pages_of(ids, batch);
    const auto gathered = index_reads(store, [&] { store.gather(batch, rows).or_throw(); });
    EXPECT_LE(gathered, pages);
    EXPECT_GE(gathered, pages - 2) << "were they in RAM? Then nothing is tested";
    EXPECT_EQ(index_reads(store, [&] { store.apply(batch, rows).or_throw(); }), 0);
    const auto others = draw(ids, 600, random);
    EXPECT_LE(index_reads(store, [&] { store.update(others, rows).or_throw(); }),
              pages_of(ids, others));
    const auto fresh = sparse_ids(100, 100 + static_cast<std::uint64_t>(round));
    EXPECT_LE(index_reads(store, [&] { store.insert(fresh).or_throw(); }), pages_of(ids, fresh));
    store.gather(fresh, std::span(rows).first(fresh.size() * kDim)).or_throw();
    EXPECT_EQ(index_reads(store, [&] { store.erase(fresh).or_throw(); }), 0);
  }
}

TEST_F(SparseIdsTest, R28WithRoomForTheIndexNothingOfItIsReadAfterOpening) {
  const auto ids = sparse_ids(40'000, 1);
  auto options = sparse(ids, 42'000);
  write_all(options, ids);
  options.store_bytes += 4 << 20;
  auto store = open(options);
  const auto least = EmbeddingStore::plan(sparse(ids, 42'000)).or_throw();
  EXPECT_GT(store.plan().index_bytes, least.index_bytes);
  EXPECT_LE(store.plan().index_bytes, least.index_bytes + 16 * 40'000);  // Bytes an id.
  std::mt19937_64 random(3);
  std::vector<float> rows(600 * kDim, 0.5F);
  for (int round = 0; round < 5; ++round) {
    const auto batch = draw(ids, 600, random);
    const auto fresh = sparse_ids(100, 100 + static_cast<std::uint64_t>(round));
    EXPECT_EQ(index_reads(store,
                          [&] {
                            store.gather(batch, rows).or_throw();
                            store.apply(batch, rows).or_throw();
                            store.insert(fresh).or_throw();
                            store.erase(fresh).or_throw();
                          }),
              0);
  }
}

// What was looked up must not outlive the ids: a place changes hands between gather and apply.
TEST_F(SparseIdsTest, AnIdThatCameBackIsFoundWhereItIsNow) {
  const auto ids = sparse_ids(2000, 4);
  auto store = open(sparse(ids, 2100));
  EmbeddingOracle oracle(kDim, {}, {.seed = 5});
  const std::vector<std::int64_t> batch(ids.begin(), ids.begin() + 10);
  const std::vector<std::int64_t> one{batch[3]};
  std::vector<float> rows(batch.size() * kDim, 0.25F);
  expect_rows(store, oracle, batch);
  store.erase(one).or_throw();
  const auto refused = store.apply(batch, rows);
  ASSERT_FALSE(refused);
  EXPECT_NE(refused.error().to_string().find(std::to_string(one[0])), std::string::npos);
  EXPECT_EQ(store.insert(one).or_throw(), 1);
  store.apply(batch, rows).or_throw();
  oracle.apply(batch, rows);
  expect_all_rows(store, oracle, ids);
}

TEST_F(SparseIdsTest, AFailedReadOfTheIndexChangesNothingAndCanBeTriedAgain) {
  const auto ids = sparse_ids(20'000, 5);
  const auto options = sparse(ids, 20'100);
  write_all(options, ids);
  const std::vector<float> rows(100 * kDim, 2.0F);
  const auto fresh = sparse_ids(50, 6);
  std::mt19937_64 random(7);
  for (std::int64_t nth = 1; nth <= 28; nth += nth < 4 ? 1 : 12) {
    SCOPED_TRACE(nth);
    const auto batch = draw(ids, 100, random);  // Of some 60 pages.
    auto store = open(options);
    const auto expect_eio = [&](const char* what, const auto& call) {
      const ScopedFileFault armed({.call = FileCall::kRead, .nth = nth, .os_errno = EIO});
      const auto failed = call();
      ASSERT_FALSE(failed) << what;
      EXPECT_EQ(failed.error().os_errno, EIO) << what;
      EXPECT_NE(failed.error().to_string().find("rows.ids"), std::string::npos) << what;
    };
    expect_eio("update", [&] { return store.update(batch, rows); });
    expect_eio("apply", [&] { return store.apply(batch, rows); });
    expect_eio("erase", [&] { return store.erase(batch); });
    if (nth < 10) {
      expect_eio("insert", [&] { return store.insert(fresh); });
    }
    EXPECT_EQ(store.rows(), 20'000);
    EXPECT_EQ(gather(store, batch), std::vector<float>(batch.size() * kDim, 1.0F));
    EXPECT_EQ(store.insert(fresh).or_throw(), 50);
  }
}

class SparseAgainstMapTest : public SparseIdsTest, public ::testing::WithParamInterface<int> {};

TEST_P(SparseAgainstMapTest, HoldsWhatAPlainMapHolds) {
  const auto seed = static_cast<std::uint64_t>(GetParam());
  SCOPED_TRACE("seed " + std::to_string(seed));
  std::mt19937_64 random(seed + 1000);  // Other numbers than the ids.
  const auto made = sparse_ids(9000, seed);
  auto options = sparse(made, 9000 + 3000);
  options.store_bytes +=
      static_cast<std::int64_t>(random() % 3) * (60 << 10);  // More pages of ids.
  std::optional<EmbeddingStore> store(open(options));
  EmbeddingOracle live(kDim, {}, {.seed = 5});
  EmbeddingOracle saved = live;
  std::set<std::int64_t> there(made.begin(), made.end());
  auto there_saved = there;
  std::int64_t step = 0;
  const auto some_of = [&](const std::set<std::int64_t>& from, std::size_t count) {
    const std::vector<std::int64_t> all(from.begin(), from.end());
    return draw(all, count, random);
  };
  for (int operation = 0; operation < 80 && !HasFatalFailure(); ++operation) {
    const auto count = 1 + random() % 900;  // More than batch_rows now and then.
    const auto batch = some_of(there, count);
    const auto within = std::span(batch).first(std::min<std::size_t>(count, 600));
    const auto values = random_floats(count * kDim, random);
    const auto what = random() % 100;
    SCOPED_TRACE("operation " + std::to_string(operation) + " " + std::to_string(what));
    if (what < 25) {
      expect_rows(*store, live, batch);
    } else if (what < 50) {  // A step of training, half of them announced.
      if (what % 2 == 0) {
        store->prefetch(within);
      }
      expect_rows(*store, live, within);
      store->apply(within, std::span(values).first(within.size() * kDim)).or_throw();
      live.apply(within, std::span(values).first(within.size() * kDim));
    } else if (what < 60) {
      store->update(batch, values).or_throw();
      live.update(batch, values);
    } else if (what < 75) {
      std::vector<std::int64_t> fresh(random() % 100);
      for (auto& id : fresh) {  // New ones, some that were erased, some that are there.
        id = random() % 2 == 0 ? static_cast<std::int64_t>(random()) : made[random() % made.size()];
      }
      const auto before = there.size();
      there.insert(fresh.begin(), fresh.end());
      ASSERT_EQ(store->insert(fresh).or_throw(), static_cast<std::int64_t>(there.size() - before));
    } else if (what < 85) {
      const auto out = std::span(batch).first(std::min<std::size_t>(count, 60));
      store->erase(out).or_throw();
      live.erase(out);
      for (const std::int64_t id : out) {
        there.erase(id);
      }
    } else if (what < 90) {
      std::vector<float> row(kDim);
      const auto unknown = static_cast<std::int64_t>(random());
      ASSERT_FALSE(store->gather({&unknown, 1}, row));
    } else if (what < 96) {
      store->commit(++step).or_throw();
      saved = live;
      there_saved = there;
    } else {  // As after a crash.
      store.reset();
      store.emplace(open(options));
      live = saved;
      there = there_saved;
      step = std::max<std::int64_t>(store->last_commit(), 0);
    }
    ASSERT_EQ(store->rows(), static_cast<std::int64_t>(there.size()));
  }
  expect_all_rows(*store, live, std::vector<std::int64_t>(there.begin(), there.end()));
}

INSTANTIATE_TEST_SUITE_P(Seeds, SparseAgainstMapTest, ::testing::Range(1, 5));

}  // namespace
}  // namespace plimsoll
