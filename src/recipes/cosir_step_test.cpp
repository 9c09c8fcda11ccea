// SPDX-License-Identifier: Apache-2.0
//
// Goal: a step that is refused memory has changed nothing, and succeeds to the same bits once there
// is room; the rehearsal's measurement covers the step it stands for.
// Method: all free bytes of the governor are leased away while a step is tried.
#include "recipes/cosir_step.h"

#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include "plimsoll/synth.h"
#include "plimsoll/torch.h"
#include "recipes/admission.h"
#include "recipes/cosir_settle.h"
#include "tests/support/feature_set.h"

namespace plimsoll::cosir {
namespace {

class CosirStepTest : public testing::Test {
 protected:
  void SetUp() override {
    config_.data = (scratch_ / "data").string();
    config_.out = (scratch_ / "run").string();
    config_.memory_limit = "1GiB";
    config_.batch_size = 512;
    config_.phase2_epochs = 1;
    config_.compute_threads = 1;
    config_.epochs = 1;
    {
      auto maker = test::governor_of();
      CosirSynthOptions synth;
      synth.rows = 1000;
      synth.image_dim = 48;
      synth.text_dim = 48;
      synth.out = config_.data;
      synth_cosir(maker, synth, {}).or_throw();
    }
    governor_ = settle(config_, scratch_.path()).or_throw();
    data_ = Data::open(governor_, config_, {.embeddings = scratch_ / "rows"}).or_throw();
    state_.emplace(config_, resolve_shape(config_, 48, 48).or_throw());
    stepper_.emplace(config_, &*state_, data_.get());
    batch_ = std::make_shared<Batch>();
    data_->loader().next(*batch_).or_throw();
  }
  void TearDown() override {
    batch_.reset();
    stepper_.reset();
    state_.reset();
    data_.reset();
    TensorArena::purge();
    TensorArena::detach();
  }

  // Tries a step with (nearly) nothing free.
  Result<void> starved(bool second) {
    TensorArena::purge();
    std::int64_t held = governor_.state().free_bytes() - (64 << 10);
    auto hold = governor_.reserve(Tag::kOther, held).or_throw();
    return without_refusal([&]() -> Result<void> {
      auto made = second ? stepper_->phase2(batch_, batch_->rows())
                         : stepper_->phase1(batch_, batch_->rows());
      return made ? Result<void>{} : tl::unexpected(made.error());
    });
  }

  test::ScratchDirectory scratch_;
  CosirConfig config_;
  Governor governor_;
  std::unique_ptr<Data> data_;
  std::optional<State> state_;
  std::optional<Stepper> stepper_;
  std::shared_ptr<Batch> batch_;
};

TEST_F(CosirStepTest, ARefusedStepChangesNothingAndSucceedsLater) {
  const auto calm = stepper_->phase1(batch_, batch_->rows()).or_throw();
  const std::string before = state_->digest(data_->rows()).or_throw();
  const auto refused = starved(false);
  ASSERT_FALSE(refused.has_value());
  EXPECT_EQ(refused.error().code, ErrorCode::kOverBudget);
  EXPECT_NE(refused.error().to_string().find("--memory-limit"), std::string::npos);
  EXPECT_EQ(state_->digest(data_->rows()).or_throw(), before);

  const auto again = stepper_->phase1(batch_, batch_->rows()).or_throw();
  EXPECT_EQ(again.loss, calm.loss);
  EXPECT_TRUE(again.conditions.equal(calm.conditions));
  for (std::size_t k = 0; k < calm.combiner.size(); ++k) {
    EXPECT_TRUE(again.combiner[k].equal(calm.combiner[k])) << k;
  }
}

TEST_F(CosirStepTest, ARefusedStepOfPhaseTwoChangesNothingEither) {
  const auto calm = stepper_->phase2(batch_, batch_->rows()).or_throw();
  ASSERT_FALSE(starved(true).has_value());
  const auto again = stepper_->phase2(batch_, batch_->rows()).or_throw();
  EXPECT_EQ(again.loss, calm.loss);
  for (std::size_t k = 0; k < calm.labeller.size(); ++k) {
    EXPECT_TRUE(again.labeller[k].equal(calm.labeller[k])) << k;
  }
}

TEST_F(CosirStepTest, ApplyingChangesRowsModelAndNothingElse) {
  const auto made = stepper_->phase1(batch_, batch_->rows()).or_throw();
  const auto frozen = state_->model.direction_weight.clone();
  const auto weight = state_->model.angle.in_weight.detach().clone();
  const auto rows = data_->conditions(batch_->ids()).or_throw();
  stepper_->apply(*batch_, made).or_throw();
  EXPECT_TRUE(state_->model.direction_weight.equal(frozen));
  EXPECT_FALSE(state_->model.angle.in_weight.equal(weight));
  const auto after = data_->conditions(batch_->ids()).or_throw();
  EXPECT_FALSE(after.equal(rows));
  EXPECT_LT((after - rows).abs().max().item<double>(), 1.1 * config_.label_lr);
}

TEST_F(CosirStepTest, AStepStaysWithinItsRehearsal) {
  const auto once = [&]() -> Result<void> {
    auto made = stepper_->phase1(batch_, batch_->rows());
    return made ? Result<void>{} : tl::unexpected(made.error());
  };
  const std::int64_t rehearsed = measure_peak(once).or_throw();
  EXPECT_GT(rehearsed, 512 * 512 * 4);  // The [B, B] matrix at least.
  for (int step = 0; step < 3; ++step) {
    EXPECT_LE(measure_peak(once).or_throw(), with_margin(rehearsed));
  }
}

TEST_F(CosirStepTest, RehearsalsOfSmallerStepsFitTheirWayToTheRealOne) {
  const std::int64_t real =
      rehearse_step(governor_, batch_->rows(), kPairBytes, [&](std::int64_t rows) -> Result<void> {
        auto made = stepper_->phase1(batch_, rows);
        return made ? Result<void>{} : tl::unexpected(made.error());
      }).or_throw();
  // The real size is refused by hand; the smaller ones run.
  const auto refused =
      rehearse_step(governor_, batch_->rows(), kPairBytes, [&](std::int64_t rows) -> Result<void> {
        if (rows == batch_->rows()) {
          return fail(ErrorCode::kOverBudget, "refused for the test");
        }
        auto made = stepper_->phase1(batch_, rows);
        return made ? Result<void>{} : tl::unexpected(made.error());
      });
  ASSERT_FALSE(refused.has_value());
  EXPECT_GE(refused.error().requested_bytes, real);
  EXPECT_GT(refused.error().smallest_limit_bytes, 0);
}

}  // namespace
}  // namespace plimsoll::cosir
