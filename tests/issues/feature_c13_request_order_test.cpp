// SPDX-License-Identifier: Apache-2.0
//
// C13: rows come back in request order, and an unknown id is an error that names it. The original's
// cache key sorted the ids, so a permuted request got the old order; missing ids were dropped.
#include <cstring>

#include <gtest/gtest.h>

#include "plimsoll/feature_store.h"
#include "tests/support/feature_set.h"

namespace plimsoll {
namespace {

class C13 : public ::testing::Test {
 protected:
  C13()
      : set(test::make_set(13, 2000, {{.name = "x", .dtype = DType::kFloat32, .shape = {30}}},
                           test::IdKind::kSparse)) {
    test::write_set(governor, scratch / "set", set).or_throw();
    store.emplace(
        FeatureStore::open(governor, {.directory = scratch / "set", .cache_bytes = 1 << 20})
            .or_throw());
  }
  test::ScratchDirectory scratch;
  Governor governor{test::governor_of()};
  test::FeatureSet set;
  std::optional<FeatureStore> store;
};

TEST_F(C13, APermutedRequestReturnsTheNewOrder) {
  std::mt19937_64 random(13);
  std::vector<std::size_t> rows(500);
  for (auto& row : rows) {
    row = random() % 2000;
  }
  for (int round = 0; round < 5; ++round) {
    std::shuffle(rows.begin(), rows.end(), random);
    std::vector<std::int64_t> request;
    for (const std::size_t row : rows) {
      request.push_back(set.ids[row]);
    }
    std::vector<std::byte> out(request.size() * 120);
    const std::vector<std::span<std::byte>> spans{out};
    ASSERT_TRUE(store->read(request, std::vector<int>{0}, spans));
    for (std::size_t i = 0; i < rows.size(); ++i) {
      const auto expected = set.at(static_cast<std::int64_t>(rows[i]), 0);
      ASSERT_EQ(std::memcmp(out.data() + i * 120, expected.data(), 120), 0);
    }
  }
}

TEST_F(C13, AMissingIdIsAnErrorThatNamesItAndNothingIsDropped) {
  std::int64_t unknown = 424'242;
  while (std::find(set.ids.begin(), set.ids.end(), unknown) != set.ids.end()) {
    ++unknown;
  }
  std::vector<std::byte> out(3 * 120);
  const std::vector<std::span<std::byte>> spans{out};
  const auto read = store->read(std::vector<std::int64_t>{set.ids[0], unknown, set.ids[1]},
                                std::vector<int>{0}, spans);
  ASSERT_FALSE(read);
  EXPECT_EQ(read.error().code, ErrorCode::kNotFound);
  EXPECT_NE(read.error().to_string().find("no record with id " + std::to_string(unknown)),
            std::string::npos);
}

}  // namespace
}  // namespace plimsoll
