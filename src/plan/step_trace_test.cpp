// SPDX-License-Identifier: Apache-2.0
#include "plan/step_trace.h"

#include <gtest/gtest.h>

#include <array>
#include <thread>

#include "plan/random_step.h"
#include "plan/step_model.h"

namespace plimsoll {
namespace {

constexpr TraceEvent allocate(std::uint64_t address, std::int64_t bytes, std::uint16_t thread = 1) {
  return {address, bytes, 1, thread, TraceKind::kAllocate, StepPhase::kForward};
}
constexpr TraceEvent release(std::uint64_t address, std::int64_t bytes, std::uint16_t thread = 1) {
  return {address, bytes, 0, thread, TraceKind::kFree, StepPhase::kForward};
}

Result<StepTrace> built(std::span<const TraceEvent> events, std::int64_t second_begins) {
  TracedSteps steps;
  steps.size = {4, 0, 0};
  steps.events = events;
  steps.second_begins = second_begins;
  steps.live_at_begin = 1000;
  steps.thread = 1;
  steps.ops = {"", "matmul"};
  return build_step_trace(steps, &rounded_to_64);
}

TEST(StepTraceTest, WhatTheFirstStepLeavesIsCarriedIntoTheSecond) {
  const std::array events{allocate(1, 100), allocate(2, 10),  release(2, 64),  // The first step.
                          release(1, 128),  allocate(1, 100), allocate(3, 7)};
  const StepTrace trace = built(events, 3).or_throw();
  EXPECT_EQ(trace.carried, 1);
  ASSERT_EQ(trace.blocks.size(), 3U);
  EXPECT_EQ(trace.blocks[0].bytes, 100);
  EXPECT_EQ(trace.events, (std::vector<std::int32_t>{-1, 1, 2}));
  EXPECT_EQ(trace.static_bytes, 1000);
}

TEST(StepTraceTest, WhatTheFirstStepFreesOfEarlierBlocksIsNotStatic) {
  const std::array events{release(9, 400), allocate(1, 100)};
  EXPECT_EQ(built(events, 1).or_throw().static_bytes, 600);
}

TEST(StepTraceTest, BlocksOfOtherThreadsAreSummedUpAndNotListed) {
  const std::array events{allocate(1, 100), allocate(50, 64, 2), allocate(51, 64, 2),
                          release(50, 64, 1), release(51, 64, 2)};
  const StepTrace trace = built(events, 0).or_throw();
  EXPECT_EQ(trace.blocks.size(), 1U);
  EXPECT_EQ(trace.other_threads_bytes, 128);
}

TEST(StepTraceTest, AnAddressAllocatedTwiceIsAnError) {
  const std::array events{allocate(1, 100), allocate(1, 100)};
  EXPECT_EQ(built(events, 0).error().code, ErrorCode::kInternal);
}

TEST(StepTraceTest, ARingKeepsWhatItHasRoomForAndCountsTheRest) {
  TraceRing ring(2);
  int block = 0;
  TraceScope::current() = {7, StepPhase::kBackward};
  for (int k = 0; k < 5; ++k) {
    ring.record(TraceKind::kAllocate, &block, k);
  }
  TraceScope::current() = {};
  ASSERT_EQ(ring.events().size(), 2U);
  EXPECT_EQ(ring.events_lost(), 3);
  EXPECT_EQ(ring.events()[1].bytes, 1);
  EXPECT_EQ(ring.events()[1].op, 7U);
  EXPECT_EQ(ring.events()[1].phase, StepPhase::kBackward);
  std::uint16_t other = 0;
  std::thread([&other] { other = TraceRing::this_thread(); }).join();
  EXPECT_NE(other, TraceRing::this_thread());
}

TEST(StepModelTest, ReplaysThePeakOfAnySizeFromFourSmallTraces) {
  for (std::uint64_t seed = 0; seed < 300; ++seed) {
    const RandomStep step(seed);
    const std::array traces{step.trace(8), step.trace(12), step.trace(16), step.trace(24)};
    const StepModel model = StepModel::fit(traces).or_throw();
    EXPECT_TRUE(model.confirmed()) << "seed " << seed;
    for (const std::int64_t rows : {1, 3, 17, 100, 999, 4096}) {
      const ReplayedPeak peak = model.replay({rows, 0, 0}, &rounded_to_64);
      EXPECT_EQ(peak.bytes, step.peak(rows)) << "seed " << seed << ", " << rows << " rows";
      const PeakParts& parts = peak.parts;
      EXPECT_EQ(parts.static_bytes + parts.gradient_bytes + parts.activation_bytes +
                    parts.optimizer_bytes + parts.temporary_bytes + parts.other_threads_bytes,
                peak.bytes);
      EXPECT_TRUE(model.predicts(step.trace(rows == 1 ? 2 : rows)));
    }
  }
}

TEST(StepModelTest, GraphsAreFittedInGraphsNodesAndEdges) {
  const auto trace = [](std::int64_t graphs, std::int64_t nodes, std::int64_t edges) {
    StepTrace one;
    one.size = {graphs, nodes, edges};
    one.static_bytes = 640;
    one.ops = {"", "index_add"};
    one.blocks = {{8 * graphs + 16, 1, StepPhase::kForward},
                  {44 * nodes, 1, StepPhase::kForward},
                  {4 * (edges + nodes), 1, StepPhase::kForward},
                  {4 * edges + 4 * graphs + 12 * nodes, 1, StepPhase::kBackward}};
    one.events = {0, 1, 2, 3, -3, -2};
    return one;
  };
  const std::array traces{trace(2, 51, 130), trace(3, 71, 155), trace(5, 127, 290),
                          trace(7, 161, 300), trace(11, 290, 505)};
  const StepModel model = StepModel::fit(traces).or_throw();
  EXPECT_TRUE(model.confirmed());
  EXPECT_TRUE(model.predicts(trace(300, 7001, 20017)));
  EXPECT_EQ(model.replay({300, 7001, 20017}, &rounded_to_64).op, "index_add");
}

TEST(StepModelTest, ABlockThatFollowsNoFormulaIsTakenFromAbove) {
  const auto trace = [](std::int64_t rows, std::int64_t bytes) {
    StepTrace one;
    one.size = {rows, 0, 0};
    one.ops = {""};
    one.blocks = {{bytes, 0, StepPhase::kForward}};
    one.events = {0, -1};
    return one;
  };
  const std::array traces{trace(8, 100), trace(12, 50), trace(16, 130), trace(24, 120)};
  const StepModel model = StepModel::fit(traces).or_throw();
  EXPECT_FALSE(model.confirmed());
  for (const StepTrace& known : traces) {
    EXPECT_GE(model.replay(known.size, &rounded_to_64).bytes, known.blocks[0].bytes);
  }
  EXPECT_FALSE(model.predicts(traces[1]));
}

}  // namespace
}  // namespace plimsoll
