// SPDX-License-Identifier: Apache-2.0
//
// Goal: under any sequence of operations, and with a slab as small as can be, an embedding store
// holds what a plain map would. Method: random operations by seed; every row is compared, bits,
// slots and update counts included.
#include <optional>

#include "tests/support/embedding_table_fixture.h"

namespace plimsoll {
namespace {

using namespace test;

struct Case {
  std::uint64_t seed;
  std::int64_t dim;
  RowOptimizer kind;
  RowInitKind init;
  std::size_t rows;
  int compute_threads;
  RowDType dtype{};
};

class StoreAgainstMapTest : public EmbeddingTableTest,
                            public ::testing::WithParamInterface<Case> {};

TEST_P(StoreAgainstMapTest, HoldsWhatAPlainMapHolds) {
  const Case& c = GetParam();
  SCOPED_TRACE("seed " + std::to_string(c.seed));
  std::mt19937_64 random(c.seed);
  const auto ids = sparse_ids(c.rows, c.seed);
  const EmbeddingStoreOptions options =
      with_floor({.directory = directory(),
                  .dim = c.dim,
                  .dtype = c.dtype,
                  .optimizer = {.kind = c.kind, .learning_rate = 0.1F, .weight_decay = 0.01F},
                  .init = {.kind = c.init, .scale = 0.5F, .seed = c.seed},
                  .ids = ids,
                  .batch_rows = 300,
                  .io_threads = 2,
                  .compute_threads = c.compute_threads});
  EmbeddingOracle live(c.dim, options.optimizer, options.init, c.dtype);
  std::map<std::int64_t, EmbeddingOracle> commits;  // At most two, by step.
  std::optional<EmbeddingOracle> initial(live);

  std::optional<EmbeddingStore> store(open(options));
  std::int64_t step = 0;
  const auto dim = static_cast<std::size_t>(c.dim);
  for (int operation = 0; operation < 120; ++operation) {
    const auto count = 1 + random() % 300;
    const auto some = draw(ids, count, random);
    const auto what = random() % 100;
    SCOPED_TRACE("operation " + std::to_string(operation) + " " + std::to_string(what));
    if (what < 30) {
      expect_rows(*store, live, some);
    } else if (what < 60) {
      const auto grads = random_floats(count * dim, random);
      const float scale = random() % 2 == 0 ? 1.0F : 0.25F;
      store->apply(some, grads, scale).or_throw();
      live.apply(some, grads, scale);
    } else if (what < 70) {
      const auto values = random_floats(count * dim, random);
      store->update(some, values).or_throw();
      live.update(some, values);
    } else if (what < 85) {
      store->prefetch(some);
    } else if (what < 93) {
      store->commit(++step).or_throw();
      if (commits.size() == 2) {
        commits.erase(commits.begin());
      }
      commits.insert_or_assign(step, live);
    } else if (what < 97 || commits.empty()) {  // As after a crash: back to the newest commit.
      store.reset();
      live = commits.empty() ? *initial : commits.rbegin()->second;
      store.emplace(open(options));
      ASSERT_EQ(store->last_commit(), commits.empty() ? -1 : commits.rbegin()->first);
      step = std::max<std::int64_t>(store->last_commit(), 0);
    } else {  // Back to the older of two commits; the newer one is gone with the next.
      store.reset();
      auto older = options;
      older.at_step = commits.begin()->first;
      store.emplace(open(older));
      live = commits.begin()->second;
      step = commits.begin()->first;
      store->commit(++step).or_throw();
      commits.erase(std::next(commits.begin()), commits.end());
      commits.insert_or_assign(step, live);
    }
    if (::testing::Test::HasFatalFailure()) {
      return;
    }
  }
  expect_all_rows(*store, live, ids);
  store->commit(++step).or_throw();
  const auto stats = store->stats();
  EXPECT_GT(stats.evictions_clean + stats.evictions_dirty, 0) << "the slab was not too small";
  EXPECT_EQ(stats.dirty_bytes, 0);
  const auto cap = store->plan().disk_cap_bytes;
  store.reset();
  EXPECT_TRUE(EmbeddingStore::verify(directory(), {}));
  EXPECT_LE(EmbeddingStore::inspect(directory()).or_throw().disk_bytes, cap);
  store.emplace(open(options));
  expect_all_rows(*store, live, ids);
}

INSTANTIATE_TEST_SUITE_P(
    Seeds, StoreAgainstMapTest,
    ::testing::Values(
        Case{1, 128, RowOptimizer::kAdamW, RowInitKind::kNormal, 700, 1},
        Case{2, 128, RowOptimizer::kAdamW, RowInitKind::kUniform, 701, 3},
        Case{3, 33, RowOptimizer::kAdagrad, RowInitKind::kNormal, 2000, 2},
        Case{4, 2, RowOptimizer::kAdamWFresh, RowInitKind::kZeros, 20000, 1},
        Case{5, 2, RowOptimizer::kAdamW, RowInitKind::kNormal, 9001, 2},
        Case{6, 1500, RowOptimizer::kAdamW, RowInitKind::kUniform, 150, 2},
        Case{7, 1, RowOptimizer::kAdagrad, RowInitKind::kUniform, 30000, 1},
        Case{8, 64, RowOptimizer::kAdamWFresh, RowInitKind::kNormal, 4000, 2},
        Case{9, 60, RowOptimizer::kRowAdagrad, RowInitKind::kNormal, 3000, 2},
        Case{10, 17, RowOptimizer::kSgdMomentum, RowInitKind::kUniform, 5000, 1},
        Case{11, 24, RowOptimizer::kSgd, RowInitKind::kNormal, 6000, 2},
        Case{12, 40, RowOptimizer::kAdam, RowInitKind::kNormal, 1500, 2},
        Case{13, 77, RowOptimizer::kAdamW, RowInitKind::kNormal, 1200, 3, RowDType::kBFloat16},
        Case{15, 1500, RowOptimizer::kSgd, RowInitKind::kUniform, 300, 2, RowDType::kBFloat16}));

}  // namespace
}  // namespace plimsoll
