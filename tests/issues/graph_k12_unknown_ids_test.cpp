// SPDX-License-Identifier: Apache-2.0
//
// K12: ids not seen in training grew the map past the embedding table. Goal: they share the last
// index, which the table has, whatever the files.
#include <algorithm>
#include <cmath>
#include <set>

#include <fmt/format.h>
#include <gtest/gtest.h>

#include "tests/support/can_traffic.h"

namespace plimsoll {
namespace {

// Indices of the nodes of every graph of a split.
std::set<std::int64_t> indices(const GraphSet& set, GraphSplit split) {
  auto batches = GraphBatches::open(&set, {.split = split}).or_throw();
  test::GraphMemory memory(batches.most());
  std::set<std::int64_t> found;
  for (GraphBatch batch; !batch.ends_epoch;) {
    batch = batches.next(memory.buffers()).or_throw();
    for (std::int64_t node = 0; node < batch.counts.nodes; ++node) {
      const float index = memory.x[static_cast<std::size_t>(node * kGraphFeatures)];
      EXPECT_EQ(index, std::floor(index));
      found.insert(static_cast<std::int64_t>(index));
    }
  }
  return found;
}

TEST(GraphK12, UnknownIdsShareTheLastIndexOfTheTable) {
  // The test file has ids 0x110 … 0x12F; training knows 0x100 … 0x11F of them.
  test::CanTraffic traffic({{"train_1.csv", test::can_csv(9'000, 32, 1, 0x100)},
                            {"test_1.csv", test::can_csv(9'000, 32, 2, 0x110)}});
  const GraphSetInfo info = traffic.import().info;
  EXPECT_EQ(info.ids, 32);
  EXPECT_EQ(info.table_rows(), 33);
  EXPECT_EQ(info.files[1].unknown_id_frames, 0);
  EXPECT_GT(info.files[0].unknown_id_frames, 3'000);
  const GraphSet set = traffic.open();
  const auto train = indices(set, GraphSplit::kTrain);
  EXPECT_EQ(*train.rbegin(), 31) << "no unknown id in training";
  const auto test = indices(set, GraphSplit::kTest);
  EXPECT_EQ(*test.begin(), 16);
  EXPECT_EQ(*test.rbegin(), 32);
  EXPECT_EQ(test.size(), 17U);
}

TEST(GraphK12, AnotherSetsVocabularyBoundsTheIndices) {
  test::CanTraffic known({{"train_1.csv", test::can_csv(5'000, 8, 1, 0x200)}});
  known.import();
  test::CanTraffic other({{"train_1.csv", test::can_csv(5'000, 64, 2, 0x1F0)}});
  other.options().vocabulary = known.options().out;
  EXPECT_EQ(other.import().info.ids, 8);
  const GraphSet set = other.open();
  EXPECT_EQ(set.vocabulary().front(), 0x200);
  const auto found = indices(set, GraphSplit::kTrain);
  EXPECT_EQ(*found.rbegin(), 8);
  EXPECT_EQ(found.size(), 9U);
}

// Frames of ids 0x200 … 0x207, every fourth an attack by an id of its own from `first` on.
std::string with_made_up_ids(std::int64_t frames, std::uint32_t first) {
  std::string text = "timestamp,arbitration_id,data_field,attack\n";
  for (std::int64_t k = 0; k < frames; ++k) {
    const bool attack = k % 4 == 3;
    const auto id = attack ? first + static_cast<std::uint32_t>(k / 4)
                           : 0x200 + static_cast<std::uint32_t>(k % 8);
    text += fmt::format("{}.{:03},{:03X},00,{}\n", k / 1000, k % 1000, id, attack ? 1 : 0);
  }
  return text;
}

TEST(GraphK12, IdsThatOnlyAttacksMakeUpAreUnknownWhenNormalOnesAreAskedFor) {
  test::CanTraffic traffic({{"train_1.csv", with_made_up_ids(2'000, 0x300)},
                            {"test_1.csv", with_made_up_ids(400, 0x600)}});
  EXPECT_EQ(traffic.import().info.ids, 6 + 500);  // Every fourth id of the eight is never sent.
  traffic.options().normal_ids = true;
  for (const int threads : {1, 2}) {
    traffic.options().threads = threads;
    traffic.options().rebuild = true;
    const GraphSetInfo info = traffic.import().info;
    EXPECT_EQ(info.ids, 6);
    EXPECT_EQ(info.files[0].unknown_id_frames + info.files[1].unknown_id_frames, 500 + 100);
    EXPECT_EQ(info.files[0].frames + info.files[1].frames, 2'400);
    const GraphSet set = traffic.open();
    EXPECT_EQ(indices(set, GraphSplit::kTrain), (std::set<std::int64_t>{0, 1, 2, 3, 4, 5, 6}));
  }
  traffic.options().rebuild = false;
  EXPECT_TRUE(traffic.import().reused);
  traffic.options().vocabulary = traffic.options().out;
  const auto refused = import_can(traffic.governor, traffic.options(), nullptr);
  ASSERT_FALSE(refused);
  EXPECT_NE(refused.error().to_string().find("--normal-ids"), std::string::npos);
}

TEST(GraphK12, MoreIdsThanTheOptionAllowsAreRefusedWithItsName) {
  test::CanTraffic traffic({{"train_1.csv", test::can_csv(9'000, 500, 1)}});
  traffic.options().ids_max = 100;
  const auto refused = import_can(traffic.governor, traffic.options(), nullptr);
  ASSERT_FALSE(refused);
  EXPECT_NE(refused.error().to_string().find("--ids-max"), std::string::npos);
}

}  // namespace
}  // namespace plimsoll
