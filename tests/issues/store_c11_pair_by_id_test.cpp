// SPDX-License-Identifier: Apache-2.0
//
// C11: features were laid out by arrival and embeddings by sorted position, and one getter computed
// positions as id / chunk: pairs came apart as soon as ids were not 0, 1, 2, …
#include "tests/support/embedding_table_fixture.h"

namespace plimsoll {
namespace {

using namespace test;

class C11PairByIdTest : public EmbeddingTableTest {};

TEST_F(C11PairByIdTest, TwoTablesMadeInDifferentOrdersPairByIdAlways) {
  const auto ids = sparse_ids(1000, 51);
  auto shuffled = ids;
  std::mt19937_64 random(51);
  std::shuffle(shuffled.begin(), shuffled.end(), random);
  EmbeddingStoreOptions options{.directory = root_ / "a", .dim = 8, .ids = ids};
  auto a = open(options);
  options.directory = root_ / "b";
  options.ids = shuffled;
  options.dim = 24;
  auto b = open(with_floor(options));
  // Every row says whose it is.
  const auto mark = [](EmbeddingStore& store, std::span<const std::int64_t> order) {
    for (const std::int64_t id : order) {
      const std::vector<float> row(static_cast<std::size_t>(store.dim()),
                                   static_cast<float>(id % 100'003));
      store.update({&id, 1}, row).or_throw();
    }
  };
  mark(a, shuffled);
  mark(b, ids);
  for (int round = 0; round < 20; ++round) {
    const auto request = draw(ids, 300, random);
    const auto left = gather(a, request);
    const auto right = gather(b, request);
    for (std::size_t i = 0; i < request.size(); ++i) {
      ASSERT_EQ(left[i * 8], static_cast<float>(request[i] % 100'003));
      ASSERT_EQ(right[i * 24 + 23], left[i * 8 + 7]);
    }
  }
}

}  // namespace
}  // namespace plimsoll
