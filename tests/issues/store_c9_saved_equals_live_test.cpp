// SPDX-License-Identifier: Apache-2.0
//
// C9: saving the final embeddings copied files without syncing first, and the sync at the end of
// an epoch was commented out: what was saved was not what had been trained.
#include "tests/support/embedding_table_fixture.h"

namespace plimsoll {
namespace {

using namespace test;

class C9SavedEqualsLiveTest : public EmbeddingTableTest {};

TEST_F(C9SavedEqualsLiveTest, ACommittedTableCopiedAsFilesHoldsTheLiveRows) {
  const auto ids = sparse_ids(800, 49);
  auto options = with_floor({.directory = directory(), .dim = 32, .ids = ids, .batch_rows = 100});
  auto store = open(options);
  std::mt19937_64 random(49);
  for (int epoch = 1; epoch <= 3; ++epoch) {
    for (int round = 0; round < 10; ++round) {
      const auto some = draw(ids, 100, random);
      store.apply(some, random_floats(some.size() * 32, random)).or_throw();
    }
    store.commit(epoch).or_throw();
    const auto saved = root_ / ("saved-" + std::to_string(epoch));
    std::filesystem::copy(directory(), saved);  // While the live table stays open.
    const auto live = all_rows(store);
    options.directory = saved;
    auto copy = open(options);
    EXPECT_EQ(all_rows(copy), live);
    EXPECT_EQ(copy.last_commit(), epoch);
  }
}

}  // namespace
}  // namespace plimsoll
