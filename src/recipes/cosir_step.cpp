// SPDX-License-Identifier: Apache-2.0
//
// Gradients, and their application.
//
// Threads: the thread that trains.   Memory: see cosir_step.h.
#include "recipes/cosir_step.h"

#include <ATen/ops/zeros_like.h>
#include <torch/csrc/autograd/autograd.h>

#include <algorithm>
#include <cmath>
#include <numbers>
#include <span>
#include <utility>

#include "base/check.h"

namespace plimsoll::cosir {
namespace {

constexpr double kLeastRate = 1e-9;  // Where the cosine schedule ends.

}  // namespace

double cosine_scale(std::int64_t step, std::int64_t steps, double rate) {
  const double done =
      static_cast<double>(step) / static_cast<double>(std::max<std::int64_t>(1, steps));
  const double least = rate > 0.0 ? kLeastRate / rate : 0.0;
  return std::max(0.5 * (1.0 + std::cos(std::numbers::pi * done)), least);
}

Stepper::Stepper(const CosirConfig& config, State* state, Data* data)
    : config_(config),
      state_(state),
      data_(data),
      loss_(loss_options(config)),
      steps_(config.epochs * data->loader().batches_per_epoch()) {}

double Stepper::rate_scale(std::int64_t step) const {
  return cosine_scale(step, steps_, config_.lr);
}

LossInput Stepper::input(const std::shared_ptr<Batch>& batch, std::int64_t rows) const {
  const auto tensors = data_->tensors(batch);
  return {tensors.image.narrow(0, 0, rows),
          tensors.text.narrow(0, 0, rows),
          {},
          batch->ids().first(static_cast<std::size_t>(rows)),
          tensors.groups.narrow(0, 0, rows),
          batch->epoch()};
}

Result<Gradients> Stepper::phase1(const std::shared_ptr<Batch>& batch, std::int64_t rows) {
  LossInput in = input(batch, rows);
  PLIMSOLL_TRY(in.conditions, data_->conditions(in.ids));
  in.conditions.set_requires_grad(true);
  const Loss loss = compute_loss(state_->model, in, loss_);
  Gradients result;
  result.loss = loss.total.item<double>();
  result.terms = loss.values;
  std::vector<at::Tensor> inputs{in.conditions};
  const auto& combiner = state_->combiner.parameters();
  const auto& projections = state_->projections.parameters();
  inputs.insert(inputs.end(), combiner.begin(), combiner.end());
  inputs.insert(inputs.end(), projections.begin(), projections.end());
  std::vector<at::Tensor> all(inputs.size());
  if (loss.total.requires_grad()) {
    all = torch::autograd::grad({loss.total}, inputs, {}, std::nullopt, false,
                                /*allow_unused=*/true);
  }
  for (std::size_t k = 0; k < all.size(); ++k) {  // Terms switched off leave some without one.
    all[k] = all[k].defined() ? all[k].contiguous() : at::zeros_like(inputs[k]);
  }
  result.conditions = all[0];
  const auto middle = all.begin() + 1 + static_cast<std::ptrdiff_t>(combiner.size());
  result.combiner.assign(all.begin() + 1, middle);
  result.projections.assign(middle, all.end());
  return result;
}

Result<const Representatives*> Stepper::representatives() {
  if (!representatives_) {
    PLIMSOLL_TRY(const double radius, radius_quantile(data_->trained(), 0.5));
    representatives_ = make_representatives(state_->model, radius);
  }
  return &*representatives_;
}

Result<Gradients> Stepper::phase2(const std::shared_ptr<Batch>& batch, std::int64_t rows) {
  PLIMSOLL_TRY(const auto* chosen, representatives());
  const LossInput in = input(batch, rows);
  const NoiseKey key{seed_for(loss_.seed, Purpose::kNoise), in.epoch};
  auto made = phase2_step(state_->model, state_->classifier, *chosen, in, loss_.temperature, key);
  Gradients result;
  result.loss = made.loss;
  result.labeller = std::move(made.gradients);
  return result;
}

Result<void> Stepper::apply(const Batch& batch, const Gradients& gradients) {
  const double scale = rate_scale(state_->at.step);
  const bool follows = config_.label_schedule == "cosine";
  const auto& c = gradients.conditions;
  // Rows first: this can fail (a gradient that is not finite), the model's optimizers cannot.
  PLIMSOLL_TRY_VOID(data_->rows().apply(
      batch.ids(), {c.const_data_ptr<float>(), static_cast<std::size_t>(c.numel())},
      follows ? static_cast<float>(scale) : 1.0F));
  state_->combiner.step(gradients.combiner, scale);
  state_->projections.step(gradients.projections, scale);
  return {};
}

void Stepper::apply_labeller(const Gradients& gradients) {
  state_->labeller.step(gradients.labeller, 1.0);
}

}  // namespace plimsoll::cosir
