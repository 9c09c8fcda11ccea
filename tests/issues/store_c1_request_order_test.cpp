// SPDX-License-Identifier: Apache-2.0
//
// C1: get_embeddings() returned rows in chunk order, not in request order, so that interleaved
// batches wrote vectors back to wrong ids. Their tests used contiguous ids and did not see it.
#include "tests/support/embedding_table_fixture.h"

namespace plimsoll {
namespace {

using namespace test;

class C1RequestOrderTest : public EmbeddingTableTest {};

TEST_F(C1RequestOrderTest, RowsComeBackInRequestOrderAndWritingThemBackChangesNothing) {
  const auto ids = sparse_ids(600, 41);  // 64 floats with AdamW: 5 rows a page, 120 pages.
  for (const bool small : {false, true}) {
    EmbeddingStoreOptions options{
        .directory = root_ / (small ? "small" : "large"), .dim = 64, .ids = ids, .batch_rows = 256};
    auto store = open(small ? with_floor(options) : options);
    EmbeddingOracle oracle(64, options.optimizer, options.init);
    std::mt19937_64 random(41);
    const auto all = random_floats(ids.size() * 64, random);
    store.update(ids, all).or_throw();
    oracle.update(ids, all);
    for (int round = 0; round < 20; ++round) {
      const auto request = draw(ids, 256, random);  // Shuffled, over many pages, with duplicates.
      expect_rows(store, oracle, request);
      store.update(request, gather(store, request)).or_throw();
      expect_rows(store, oracle, request);
    }
    expect_all_rows(store, oracle, ids);
    store.commit(1).or_throw();
    expect_all_rows(store, oracle, ids);
  }
}

}  // namespace
}  // namespace plimsoll
