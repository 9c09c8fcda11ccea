// SPDX-License-Identifier: Apache-2.0
//
// Real steps in the arena: what is traced is what was allocated, and what is predicted from small
// steps is what large ones need.
#include "torch/step_tracer.h"

#include <gtest/gtest.h>
#include <torch/torch.h>

#include <memory>
#include <string>

#include "plimsoll/bytes.h"
#include "plimsoll/torch.h"
#include "torch/arena_pages.h"

namespace plimsoll {
namespace {

using namespace literals;

class StepTracerTest : public testing::Test {
 protected:
  void SetUp() override {
    GovernorOptions options;
    options.memory_limit = "4GiB";
    governor_ = Governor::create(options).or_throw();
    TensorArena::attach(governor_).or_throw();
    torch::manual_seed(1);
    net_ = torch::nn::Sequential(torch::nn::Linear(64, 256), torch::nn::ReLU(),
                                 torch::nn::LayerNorm(torch::nn::LayerNormOptions({256})),
                                 torch::nn::Dropout(0.1), torch::nn::Linear(256, 10));
    optimizer_ = std::make_unique<torch::optim::AdamW>(net_->parameters(), 1e-3);
  }
  void TearDown() override {
    optimizer_.reset();
    net_ = nullptr;
    TensorArena::detach();
  }
  Result<void> step(const StepSize& size) {
    optimizer_->zero_grad();
    const at::Tensor x = torch::randn({size.rows, 64});
    const at::Tensor y = torch::randint(0, 10, {size.rows});
    torch::nn::functional::cross_entropy(net_->forward(x), y).backward();
    optimizer_->step();
    return {};
  }
  Result<StepTrace> traced(std::int64_t rows) {
    return trace_step({rows, 0, 0}, [this, rows] { return step({rows, 0, 0}); });
  }

  Governor governor_;
  torch::nn::Sequential net_{nullptr};
  std::unique_ptr<torch::optim::AdamW> optimizer_;
};

TEST_F(StepTracerTest, PredictsTheArenasPeakOfLargeStepsToTheByte) {
  step({4, 0, 0}).or_throw();  // Makes the optimizer's states.
  StepRegions regions(&arena_block_bytes);
  for (const std::int64_t rows : {16, 24, 32, 48}) {
    regions.add(traced(rows).or_throw()).or_throw();
  }
  for (const std::int64_t rows : {100, 1000, 4096, 16384}) {
    const StepTrace truth = traced(rows).or_throw();
    const StepPrediction said = regions.predict({rows, 0, 0}).or_throw();
    EXPECT_GE(said.bound_bytes, truth.live_peak_bytes) << rows;
    EXPECT_EQ(said.peak.bytes, truth.live_peak_bytes) << rows;
    EXPECT_TRUE(regions.predicts(truth)) << rows;
    EXPECT_LE(truth.leased_peak_bytes, arena_leased_bytes(truth.live_peak_bytes)) << rows;
  }
}

TEST_F(StepTracerTest, TellsOperatorsAndPhases) {
  step({4, 0, 0}).or_throw();
  const StepTrace trace = traced(512).or_throw();
  bool forward = false;
  bool backward = false;
  for (const StepBlock& block : trace.blocks) {
    forward = forward || (block.born == StepPhase::kForward && trace.ops[block.op] == "aten::relu");
    backward = backward || block.born == StepPhase::kBackward;
  }
  EXPECT_TRUE(forward);
  EXPECT_TRUE(backward);
  EXPECT_GT(trace.seconds, 0.0);
}

TEST_F(StepTracerTest, PlansTheLargestBatchAndARealStepOfItFits) {
  step({4, 0, 0}).or_throw();
  PlanOptions options;
  options.most_rows = 1 << 20;
  options.available_bytes = 200_MiB;
  const BatchPlan plan = plan_batch(governor_, options, [this](const StepSize& size) {
                           return step(size);
                         }).or_throw();
  EXPECT_EQ(plan.label, PlanLabel::kExact);
  EXPECT_LE(plan.leased_bytes, 200_MiB);
  TensorArena::purge();
  TensorArena::reset_peak();
  step({plan.batch_size, 0, 0}).or_throw();
  EXPECT_LE(TensorArena::stats().leased_peak_bytes, plan.leased_bytes);
  EXPECT_EQ(TensorArena::stats().live_peak_bytes, plan.peak.bytes);
  // A fifth more would not have fitted.
  TensorArena::purge();
  TensorArena::reset_peak();
  step({plan.batch_size * 6 / 5, 0, 0}).or_throw();
  EXPECT_GT(TensorArena::stats().leased_peak_bytes, 200_MiB);
}

TEST_F(StepTracerTest, ARefusalInsideTorchIsAnErrorAndTracingEnds) {
  const auto refused = trace_step({1, 0, 0}, []() -> Result<void> {
    const at::Tensor huge = torch::empty({64LL << 30});
    return {};
  });
  ASSERT_FALSE(refused);
  EXPECT_EQ(refused.error().code, ErrorCode::kOverBudget);
  EXPECT_TRUE(traced(8));
}

TEST_F(StepTracerTest, AStepOfTooManyEventsIsNotBelieved) {
  const auto cut = trace_step(
      {8, 0, 0},
      [this] {
        return step({8, 0, 0});
      },
      10);
  ASSERT_FALSE(cut);
  EXPECT_TRUE(too_long_to_trace(cut.error())) << cut.error().to_string();
}

TEST_F(StepTracerTest, WithoutAGovernorNothingIsTraced) {
  TensorArena::detach();
  EXPECT_EQ(traced(8).error().code, ErrorCode::kInvalidArgument);
}

}  // namespace
}  // namespace plimsoll
