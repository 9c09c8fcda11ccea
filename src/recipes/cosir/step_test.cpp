// SPDX-License-Identifier: Apache-2.0
//
// Goal: a step that is refused memory has changed nothing, and succeeds to the same bits once there
// is room; the rehearsal's measurement covers the step it stands for.
// Method: all free bytes of the governor are leased away while a step is tried.
#include "recipes/cosir/step.h"
#include "torch/step_tracer.h"

#include <ATen/ATen.h>
#include <gtest/gtest.h>
#include <torch/csrc/autograd/autograd.h>

#include "plimsoll/synth.h"
#include "plimsoll/torch.h"
#include "recipes/cosir/settle.h"
#include "tests/support/feature_set.h"
#include "torch/admission.h"

namespace plimsoll::cosir {
namespace {

class CosirStepTest : public testing::Test {
 protected:
  void SetUp() override {
    config_.data = (scratch_ / "data").string();
    config_.out = (scratch_ / "run").string();
    config_.memory_limit = "1GiB";
    config_.batch_size = 800;
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
  EXPECT_NE(refused.error().to_string().find("memory_limit"), std::string::npos);
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
  EXPECT_GT(rehearsed, 800 * 800 * 4);  // The [B, B] matrix at least.
  for (int step = 0; step < 3; ++step) {
    EXPECT_LE(measure_peak(once).or_throw(), with_margin(rehearsed));
  }
}

// The largest difference of two gradients, of the larger one's largest number.
double difference(const at::Tensor& one, const at::Tensor& other) {
  const double most = std::max(one.abs().max().item<double>(), other.abs().max().item<double>());
  return most == 0.0 ? 0.0 : (one - other).abs().max().item<double>() / most;
}

at::Tensor flat(const std::vector<at::Tensor>& list) {
  std::vector<at::Tensor> flat;
  for (const auto& one : list) {
    flat.push_back(one.flatten());
  }
  return at::cat(flat);
}

TEST_F(CosirStepTest, GradientsByTilesAreThoseOfTheWholeBatch) {
  config_.projections = "true";
  config_.loss_boundary = 1;
  state_.emplace(config_, resolve_shape(config_, 48, 48).or_throw());
  stepper_.emplace(config_, &*state_, data_.get());
  for (const std::int64_t rows : {800, 600, 512, 40}) {
    const auto tiles = stepper_->phase1(batch_, rows).or_throw();
    ASSERT_EQ(tiles.projections.size(), 4U);
    const auto tensors = data_->tensors(batch_);
    LossInput in{tensors.image.narrow(0, 0, rows),
                 tensors.text.narrow(0, 0, rows),
                 data_->conditions(batch_->ids().first(static_cast<std::size_t>(rows))).or_throw(),
                 batch_->ids().first(static_cast<std::size_t>(rows)),
                 tensors.groups.narrow(0, 0, rows),
                 batch_->epoch()};
    in.conditions.set_requires_grad(true);
    const Loss whole = compute_loss(state_->model, in, loss_options(config_));
    EXPECT_NEAR(tiles.loss / whole.total.item<double>(), 1.0, 1e-6) << rows;
    for (int k = 0; k < kTerms; ++k) {
      const auto at_k = static_cast<std::size_t>(k);
      EXPECT_TRUE(whole.values[at_k] != 0.0 || k == kBoundary) << kTermNames[at_k];
      EXPECT_NEAR(tiles.terms[at_k], whole.values[at_k], 1e-6 * std::abs(whole.values[at_k]));
    }
    std::vector<at::Tensor> inputs{in.conditions};
    const auto& combiner = state_->combiner.parameters();
    const auto& projections = state_->projections.parameters();
    inputs.insert(inputs.end(), combiner.begin(), combiner.end());
    inputs.insert(inputs.end(), projections.begin(), projections.end());
    const auto found = torch::autograd::grad({whole.total}, inputs);
    const auto middle = found.begin() + 1 + static_cast<std::ptrdiff_t>(combiner.size());
    EXPECT_LT(difference(tiles.conditions, found[0]), 1e-5) << rows;
    // As one vector: the last norm cancels the scale, so the radius branch's are rounding alone.
    EXPECT_LT(difference(flat(tiles.combiner), flat({found.begin() + 1, middle})), 1e-5) << rows;
    EXPECT_LT(difference(flat(tiles.projections), flat({middle, found.end()})), 1e-5) << rows;
  }
}

TEST_F(CosirStepTest, GradientCachingGivesTheSameBits) {
  for (const char* projections : {"true", "false"}) {
    config_.projections = projections;
    state_.emplace(config_, resolve_shape(config_, 48, 48).or_throw());
    stepper_.emplace(config_, &*state_, data_.get());
    for (const std::int64_t rows : {800, 600, 40}) {
      config_.gradient_caching = false;
      const auto kept = stepper_->phase1(batch_, rows).or_throw();
      config_.gradient_caching = true;
      const auto cached = stepper_->phase1(batch_, rows).or_throw();
      EXPECT_EQ(cached.loss, kept.loss);
      EXPECT_EQ(cached.terms, kept.terms);
      EXPECT_TRUE(cached.conditions.equal(kept.conditions)) << rows;
      EXPECT_TRUE(flat(cached.combiner).equal(flat(kept.combiner))) << rows;
      if (!kept.projections.empty()) {
        EXPECT_TRUE(flat(cached.projections).equal(flat(kept.projections))) << rows;
      }
    }
  }
}

TEST_F(CosirStepTest, GradientCachingNeedsLessMemoryAndARefusalChangesNothing) {
  config_.projections = "true";
  config_.dim = 1024;
  config_.loss_infonce = 0;  // Its [B, B] matrix is there in either case.
  config_.loss_angular = 1;
  state_.emplace(config_, resolve_shape(config_, 48, 48).or_throw());
  stepper_.emplace(config_, &*state_, data_.get());
  const auto once = [&]() -> Result<void> {
    auto made = stepper_->phase1(batch_, batch_->rows());
    return made ? Result<void>{} : tl::unexpected(made.error());
  };
  const auto step_bytes = [&] {  // Beside what the model holds.
    TensorArena::purge();
    const std::int64_t held = measure_peak([] { return Result<void>{}; }).or_throw();
    return measure_peak(once).or_throw() - held;
  };
  const std::int64_t whole = step_bytes();
  config_.gradient_caching = true;
  const std::int64_t parts = step_bytes();
  EXPECT_LT(parts, whole * 9 / 10) << whole;
  const auto calm = stepper_->phase1(batch_, batch_->rows()).or_throw();
  ASSERT_FALSE(starved(false).has_value());
  EXPECT_TRUE(
      stepper_->phase1(batch_, batch_->rows()).or_throw().conditions.equal(calm.conditions));
}

TEST_F(CosirStepTest, RehearsalsOfSmallerStepsFitTheirWayToTheRealOne) {
  const std::int64_t real =
      rehearse_step(governor_, batch_->rows(), {.pair_bytes = kPairBytes},
                    [&](std::int64_t rows) -> Result<void> {
                      auto made = stepper_->phase1(batch_, rows);
                      return made ? Result<void>{} : tl::unexpected(made.error());
                    })
          .or_throw();
  // The real size is refused by hand; the smaller ones run.
  const auto refused =
      rehearse_step(governor_, batch_->rows(), {.pair_bytes = kPairBytes},
                    [&](std::int64_t rows) -> Result<void> {
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

TEST_F(CosirStepTest, AStepOfWhichNothingFitsIsEstimatedOrNeedsTwiceWhatIsLeft) {
  const auto none = [](std::int64_t) -> Result<void> {
    return fail(ErrorCode::kOverBudget, "refused for the test");
  };
  const std::int64_t left = left_for_tensors(governor_.state());
  EXPECT_EQ(rehearse_step(governor_, 64, {}, none).error().requested_bytes, 2 * left);

  const StepHints known{
      .estimate = [&](std::int64_t rows) -> Result<std::int64_t> { return 3 * left + rows; }};
  EXPECT_EQ(rehearse_step(governor_, 64, known, none).error().requested_bytes, 3 * left + 64);

  const StepHints little{.estimate = [](std::int64_t) -> Result<std::int64_t> { return 1; }};
  EXPECT_EQ(rehearse_step(governor_, 64, little, none).error().requested_bytes, 2 * left);
}

TEST_F(CosirStepTest, OfSeveralRefusalsTheOneThatNamesTheLargestLimitIsTold) {
  Refusals refusals;
  EXPECT_EQ(refusals.note(Result<std::int64_t>(7)).or_throw(), 7);
  EXPECT_TRUE(refusals.outcome().has_value());
  for (const std::int64_t needed :
       {std::int64_t{1} << 30, std::int64_t{3} << 30, std::int64_t{2} << 30}) {
    const Result<std::int64_t> refused = tl::unexpected(refused_bytes(governor_, "a step", needed));
    EXPECT_EQ(refusals.note(refused, 5).or_throw(), 5);
  }
  EXPECT_EQ(refusals.outcome().error().requested_bytes, std::int64_t{3} << 30);
  EXPECT_EQ(refusals.note(Result<std::int64_t>(fail(ErrorCode::kCorrupt, "bad"))).error().code,
            ErrorCode::kCorrupt);
}

}  // namespace
}  // namespace plimsoll::cosir
