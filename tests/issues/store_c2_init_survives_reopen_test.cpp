// SPDX-License-Identifier: Apache-2.0
//
// C2: initialising rows chunk by chunk cleared the cache and the dirty marks without syncing, so
// that all but the last chunk of an initialisation was lost on reopening.
#include "tests/support/embedding_table_fixture.h"

namespace plimsoll {
namespace {

using namespace test;

class C2InitSurvivesReopenTest : public EmbeddingTableTest {};

TEST_F(C2InitSurvivesReopenTest, EveryRowWrittenChunkByChunkIsThereAfterReopening) {
  const auto ids = sparse_ids(500, 42);
  const auto options =
      with_floor({.directory = directory(), .dim = 128, .ids = ids, .batch_rows = 100});
  EmbeddingOracle oracle(128, options.optimizer, options.init);
  {
    auto store = open(options);
    std::mt19937_64 random(42);
    for (std::size_t chunk = 0; chunk < 5; ++chunk) {
      const auto some = std::span(ids).subspan(chunk * 100, 100);
      const auto rows = random_floats(some.size() * 128, random);
      store.update(some, rows).or_throw();
      oracle.update(some, rows);
    }
    store.commit(1).or_throw();
  }
  auto store = open(options);
  expect_all_rows(store, oracle, ids);
}

TEST_F(C2InitSurvivesReopenTest, RowsOfTheInitialiserAreTheSameAfterReopening) {
  const auto ids = sparse_ids(500, 43);
  const EmbeddingStoreOptions options{.directory = directory(), .dim = 16, .ids = ids};
  std::vector<float> before;
  {
    auto store = open(options);
    before = gather(store, ids);
    store.commit(1).or_throw();
  }
  auto store = open(options);
  EXPECT_EQ(gather(store, ids), before);
}

}  // namespace
}  // namespace plimsoll
