// SPDX-License-Identifier: Apache-2.0
//
// K3: a budget of nodes alone let batches of many edges run out of memory, and a truncated number
// of steps dropped a tenth of the data. Goal: all bounds hold, and every graph comes exactly once.
#include <algorithm>
#include <numeric>

#include <gtest/gtest.h>

#include "tests/support/can_traffic.h"

namespace plimsoll {
namespace {

struct Bounds {
  std::int64_t graphs;
  std::int64_t nodes;
  std::int64_t edges;
  std::int64_t bytes;
};

class GraphK3 : public testing::TestWithParam<Bounds> {};

TEST_P(GraphK3, EveryGraphComesOnceAnEpochAndNoBoundIsPassed) {
  test::CanTraffic traffic(
      {{"train_1.csv", test::can_csv(20'030, 40, 3)}, {"test_1.csv", test::can_csv(5'000, 60, 4)}});
  traffic.import();
  const auto [graphs, nodes, edges, bytes] = GetParam();
  for (const std::int64_t cache_bytes : {std::int64_t{0}, std::int64_t{-1}}) {
    const GraphSet set = traffic.open(cache_bytes);
    for (const auto split : {GraphSplit::kTrain, GraphSplit::kValidation, GraphSplit::kTest}) {
      auto batches = GraphBatches::open(&set, {.split = split,
                                               .batch_graphs = graphs,
                                               .nodes_max = nodes,
                                               .edges_max = edges,
                                               .bytes_max = bytes,
                                               .seed = 9})
                         .or_throw();
      test::GraphMemory memory(batches.most());
      std::vector<std::int64_t> first;
      for (std::int64_t epoch = 0; epoch < 2; ++epoch) {
        std::vector<std::int64_t> seen;
        std::int64_t steps = 0;
        for (GraphBatch batch; !batch.ends_epoch; ++steps) {
          ASSERT_EQ(batches.peek().graphs, std::min(graphs, batches.peek().graphs));
          batch = batches.next(memory.buffers()).or_throw();
          ASSERT_EQ(batch.epoch, epoch);
          ASSERT_LE(batch.counts.graphs, graphs);
          ASSERT_LE(batch.counts.nodes, nodes > 0 ? nodes : batches.most().nodes);
          ASSERT_LE(batch.counts.edges, edges > 0 ? edges : batches.most().edges);
          ASSERT_LE(batch.counts.bytes(), bytes > 0 ? bytes : INT64_MAX);
          seen.insert(seen.end(), memory.graphs.begin(),
                      memory.graphs.begin() + batch.counts.graphs);
        }
        EXPECT_EQ(steps, batches.steps(epoch));
        EXPECT_NE(seen, first) << "another epoch, another order";
        first = seen;
        std::sort(seen.begin(), seen.end());
        const auto wanted = set.split(split);
        EXPECT_TRUE(std::equal(seen.begin(), seen.end(), wanted.begin(), wanted.end()));
      }
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Any, GraphK3,
                         testing::Values(Bounds{7, 0, 0, 0}, Bounds{1000, 0, 0, 0},
                                         Bounds{1000, 200, 0, 0}, Bounds{1000, 0, 300, 0},
                                         Bounds{1000, 0, 0, 40'000}, Bounds{9, 250, 400, 50'000}));

TEST(GraphK3, AGraphThatIsAloneAboveABoundIsRefusedWithTheOption) {
  test::CanTraffic traffic({{"train_1.csv", test::can_csv(5'000, 40, 3)}});
  traffic.import();
  const GraphSet set = traffic.open();
  const auto batches = GraphBatches::open(&set, {.edges_max = 3});
  ASSERT_FALSE(batches);
  const std::string text = batches.error().to_string();
  EXPECT_NE(text.find("edges_max"), std::string::npos) << text;
  EXPECT_NE(text.find("alone has"), std::string::npos) << text;
}

TEST(GraphK3, SmallBuffersAreRefusedAndNothingIsLost) {
  test::CanTraffic traffic({{"train_1.csv", test::can_csv(5'000, 40, 3)}});
  traffic.import();
  const GraphSet set = traffic.open();
  auto batches = GraphBatches::open(&set, {.batch_graphs = 8, .seed = 1}).or_throw();
  test::GraphMemory memory(batches.most());
  GraphBuffers small = memory.buffers();
  small.edge_attr = small.edge_attr.first(11);
  const auto refused = batches.next(small);
  ASSERT_FALSE(refused);
  EXPECT_NE(refused.error().to_string().find("\"edge_attr\""), std::string::npos);
  EXPECT_EQ(batches.position(), 0);
  EXPECT_EQ(batches.next(memory.buffers()).or_throw().position, 0);
}

}  // namespace
}  // namespace plimsoll
