// SPDX-License-Identifier: Apache-2.0
//
// C3: evicting dirty data with the disk tier off dropped it, and the next sync found nothing,
// cleared its marks and reported success.
#include "tests/support/embedding_table_fixture.h"

namespace plimsoll {
namespace {

using namespace test;

class C3DirtyEvictionNotLostTest : public EmbeddingTableTest {};

TEST_F(C3DirtyEvictionNotLostTest, ChangesEvictedFromASlabSmallerThanTheTableAreAllThere) {
  const auto ids = sparse_ids(2000, 43);
  auto options = with_floor({.directory = directory(), .dim = 128, .ids = ids, .batch_rows = 64});
  options.dirty_bytes = 16 << 20;  // More than there is: nothing is written but to be evicted.
  EmbeddingOracle oracle(128, options.optimizer, options.init);
  {
    auto store = open(options);
    ASSERT_LT(4 * store.plan().total_bytes, 2000 * 1552);
    std::mt19937_64 random(43);
    for (int round = 0; round < 60; ++round) {
      const auto some = draw(ids, 64, random);
      const auto grads = random_floats(some.size() * 128, random);
      store.apply(some, grads).or_throw();
      oracle.apply(some, grads);
    }
    EXPECT_GT(store.stats().evictions_dirty, 500);
    expect_all_rows(store, oracle, ids);
    store.commit(1).or_throw();
    EXPECT_EQ(store.stats().dirty_bytes, 0);
  }
  auto store = open(options);
  expect_all_rows(store, oracle, ids);
}

}  // namespace
}  // namespace plimsoll
