// SPDX-License-Identifier: Apache-2.0
//
// Goal: a slow disk costs time and nothing else: no row is dropped, nothing waits for ever. What
// the smallest slab does: smallest_slab_test.cpp.
#include "os/file_faults.h"
#include "plimsoll/sample_order.h"
#include "tests/support/embedding_table_fixture.h"

namespace plimsoll {
namespace {

using namespace test;

class BackPressureTest : public EmbeddingTableTest,
                         public ::testing::WithParamInterface<RowLayout> {
 protected:
  // Every kind of call, `steps` times, each answer compared with the oracle.
  static void work(EmbeddingStore& store, EmbeddingOracle& oracle,
                   const std::vector<std::int64_t>& ids, std::int64_t steps, std::uint64_t seed) {
    std::mt19937_64 random(seed);
    const auto dim = static_cast<std::size_t>(store.dim());
    for (std::int64_t step = 1; step <= steps; ++step) {
      // In sample order an epoch ends every fourth step, in which a third of its rows are visited.
      const std::int64_t epoch = step / 4;
      const SampleOrder order(static_cast<std::int64_t>(ids.size()), 0, epoch);
      store.begin_epoch(epoch).or_throw();
      auto batch = draw(ids, 1 + random() % 128, random);
      if (step % 2 == 0) {
        batch.resize(ids.size() / 6);
        for (auto& id : batch) {
          const auto at =
              step % 4 * static_cast<std::int64_t>(batch.size()) / 2 + (&id - &batch[0]);
          id = ids[static_cast<std::size_t>(order.at(at))];
        }
      }
      store.prefetch(draw(ids, 64, random));
      expect_rows(store, oracle, batch);
      const auto values = random_floats(batch.size() * dim, random);
      if (step % 4 == 0) {
        store.update(batch, values).or_throw();
        oracle.update(batch, values);
      } else {
        store.apply(batch, values).or_throw();
        oracle.apply(batch, values);
      }
      if (step % 3 == 0) {
        store.commit(step).or_throw();
      }
    }
    store.commit(steps + 1).or_throw();
    expect_all_rows(store, oracle, ids);
  }
};

TEST_P(BackPressureTest, ADiskAHundredTimesSlowerDropsNothing) {
  const auto ids = sparse_ids(160, 4);
  const auto options = with_floor({.directory = directory(),
                                   .dim = 96,
                                   .layout = GetParam(),
                                   .ids = ids,
                                   .batch_rows = 128,
                                   .io_threads = 2});
  EmbeddingOracle oracle(96, {}, {});
  {
    auto store = open(options);
    const bool cached = GetParam() == RowLayout::kAnyOrder;
    ASSERT_TRUE(!cached || store.plan().frame_bytes < 54 * 4096) << "the table must not fit";
    // An SSD answers in some 30 microseconds.
    const ScopedFileFault slow(
        {.call = FileCall::kAny, .nth = 1, .keeps_failing = true, .delay_us = 3000});
    work(store, oracle, ids, 12, 1);
    EXPECT_GT(file_fault_calls(), 60);
    EXPECT_TRUE(!cached || store.stats().evictions_dirty > 10);
  }
  auto store = open(options);
  expect_all_rows(store, oracle, ids);
}

INSTANTIATE_TEST_SUITE_P(Layouts, BackPressureTest, both_layouts(), layout_case);

}  // namespace
}  // namespace plimsoll
