// SPDX-License-Identifier: Apache-2.0
//
// C5: promoting a row from one tier to another never subtracted its bytes from the first, so that
// the accounted capacity leaked away.
#include "tests/support/embedding_table_fixture.h"

namespace plimsoll {
namespace {

using namespace test;

class C5AccountedBytesMatchTest : public EmbeddingTableTest {};

TEST_F(C5AccountedBytesMatchTest, LeasedBytesNeverMoveAndFramesAddUpAfterEveryOperation) {
  const auto ids = sparse_ids(1500, 45);
  const auto options =
      with_floor({.directory = directory(), .dim = 64, .ids = ids, .batch_rows = 128});
  const auto before = governor_.state().leased_bytes;
  auto store = open(options);
  const auto plan = store.plan();
  const auto page_bytes = EmbeddingStore::inspect(directory()).or_throw().page_bytes;
  std::mt19937_64 random(45);
  std::int64_t step = 0;
  for (int round = 0; round < 200; ++round) {
    const auto some = draw(ids, 1 + random() % 128, random);
    switch (random() % 4) {
      case 0:
        static_cast<void>(gather(store, some));
        break;
      case 1:
        store.apply(some, random_floats(some.size() * 64, random)).or_throw();
        break;
      case 2:
        store.prefetch(some);
        break;
      default:
        store.commit(++step).or_throw();
    }
    const auto stats = store.stats();
    ASSERT_EQ(governor_.state().leased_bytes - before, plan.total_bytes);
    ASSERT_LE(stats.resident_pages, stats.frames);
    ASSERT_LE(stats.dirty_bytes, stats.resident_pages * page_bytes);
    ASSERT_LE(stats.frames * page_bytes, plan.frame_bytes);
    ASSERT_LE(stats.hits, stats.requests);
  }
  const auto stats = store.stats();
  EXPECT_EQ(stats.bytes_written, stats.pages_written * page_bytes);
  EXPECT_EQ(stats.bytes_read, stats.pages_read * page_bytes);
}

}  // namespace
}  // namespace plimsoll
