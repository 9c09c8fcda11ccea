// SPDX-License-Identifier: Apache-2.0
//
// C4: clearing the cache left the files of its disk tier behind, and these were asked before the
// table itself: after a clear, a restart or a template load, old rows were served.
#include "tests/support/embedding_table_fixture.h"

namespace plimsoll {
namespace {

using namespace test;

class C4NoStaleRowsTest : public EmbeddingTableTest {};

TEST_F(C4NoStaleRowsTest, TheNewestRowIsServedAfterEvictionCommitAndReopening) {
  const auto ids = sparse_ids(1000, 44);
  const auto options =
      with_floor({.directory = directory(), .dim = 64, .ids = ids, .batch_rows = 128});
  const auto one = std::span(ids).first(1);
  const auto others = std::span(ids).subspan(1);
  std::int64_t step = 0;
  for (int life = 0; life < 3; ++life) {
    auto store = open(options);
    for (int round = 0; round < 5; ++round) {
      ++step;
      const std::vector<float> row(64, static_cast<float>(step));
      store.update(one, row).or_throw();
      static_cast<void>(gather(store, others));  // Evicts it, and what was there before.
      EXPECT_EQ(gather(store, one), row);
      store.commit(step).or_throw();
      static_cast<void>(gather(store, others));
      EXPECT_EQ(gather(store, one), row);
    }
  }
  auto store = open(options);
  EXPECT_EQ(gather(store, one), std::vector<float>(64, 15.0F));
}

}  // namespace
}  // namespace plimsoll
