// SPDX-License-Identifier: Apache-2.0
//
// K4: batches that fill the memory left one or two steps an epoch, which is full-batch descent.
#include <gtest/gtest.h>

#include "tests/support/can_traffic.h"

namespace plimsoll {
namespace {

TEST(GraphK4, AnEpochHasAtLeastSoManySteps) {
  test::CanTraffic traffic({{"train_1.csv", test::can_csv(30'101, 30, 8)}});
  traffic.import();
  const GraphSet set = traffic.open();
  const auto graphs = static_cast<std::int64_t>(set.split(GraphSplit::kTrain).size());
  ASSERT_EQ(graphs, 240);
  for (const std::int64_t steps : {1L, 2L, 7L, 50L, 121L, 239L, 240L}) {
    auto batches =
        GraphBatches::open(&set, {.batch_graphs = 100'000, .min_steps = steps}).or_throw();
    for (const std::int64_t epoch : {0L, 5L}) {
      EXPECT_GE(batches.steps(epoch), steps);
    }
    EXPECT_LE(batches.steps(0), 2 * steps) << "no more of them than needed";
  }
  const auto refused = GraphBatches::open(&set, {.min_steps = 241});
  ASSERT_FALSE(refused);
  EXPECT_NE(refused.error().to_string().find("min_steps"), std::string::npos);
}

TEST(GraphK4, AResumedEpochGoesOnWithTheSameBatches) {
  test::CanTraffic traffic({{"train_1.csv", test::can_csv(30'101, 30, 8)}});
  traffic.import();
  const GraphSet set = traffic.open();
  const GraphBatchesOptions options{.batch_graphs = 64, .nodes_max = 700, .seed = 3};
  auto whole = GraphBatches::open(&set, options).or_throw();
  test::GraphMemory memory(whole.most());
  test::GraphMemory again(whole.most());
  for (int step = 0; step < 12; ++step) {
    auto resumed_options = options;
    resumed_options.epoch = whole.epoch();
    resumed_options.position = whole.position();
    auto resumed = GraphBatches::open(&set, resumed_options).or_throw();
    const GraphBatch a = whole.next(memory.buffers()).or_throw();
    const GraphBatch b = resumed.next(again.buffers()).or_throw();
    ASSERT_EQ(a.counts.graphs, b.counts.graphs);
    ASSERT_EQ(memory.graphs, again.graphs);
    ASSERT_EQ(memory.x, again.x);
    ASSERT_EQ(memory.edge_index, again.edge_index);
  }
}

}  // namespace
}  // namespace plimsoll
