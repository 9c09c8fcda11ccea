// SPDX-License-Identifier: Apache-2.0
//
// Gradients, and their application.
//
// Threads: the thread that trains.   Memory: see step.h.
#include "recipes/cosir/step.h"

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

// Compares encoded rows. `gradients`: of `inputs` as far as the comparison reaches them by itself;
// `slopes`: of what was encoded. Both stay as they are where nothing has a gradient.
Loss differentiate(const Model& model, const LossOptions& options, const LossInput& in, Encoded all,
                   const std::vector<at::Tensor>& inputs, std::vector<at::Tensor>& gradients,
                   Slopes& slopes) {
  std::vector<at::Tensor> leaves{all.turned.out, all.turned.unit, all.text};
  if (all.image.defined()) {
    leaves.push_back(all.image);
  }
  // Without projections text and image are data: only what the conditions moved has a gradient.
  const std::size_t sloped = model.shape.projections ? leaves.size() : 1;
  std::vector<at::Tensor> asked;
  for (std::size_t k = 0; k < sloped; ++k) {
    asked.push_back(leaves[k].set_requires_grad(true));
  }
  asked.insert(asked.end(), inputs.begin(), inputs.end());
  const c10::AutoGradMode on{true};
  all.radius = kernels::polar_coordinates(inputs[0]).radius;
  LossInput compared = in;
  compared.conditions = inputs[0];
  Loss loss = compare(model, compared, all, options);
  if (!loss.total.requires_grad()) {
    return loss;
  }
  auto found = torch::autograd::grad({loss.total}, asked, {}, std::nullopt, false,
                                     /*allow_unused=*/true);
  loss.total = loss.total.detach();
  const c10::AutoGradMode off{false};
  const auto slope = [&](std::size_t k) {
    return k < sloped && found[k].defined() ? found[k].contiguous() : at::Tensor();
  };
  slopes = {slope(0), slope(1), leaves.size() > 3 ? slope(3) : at::Tensor(), slope(2)};
  gradients.assign(found.begin() + static_cast<std::ptrdiff_t>(sloped), found.end());
  gradients[0] = gradients[0].defined() ? gradients[0].contiguous() : at::zeros_like(inputs[0]);
  return loss;
}

}  // namespace

double cosine_scale(std::int64_t step, std::int64_t steps, double rate) {
  const double done =
      static_cast<double>(step) / static_cast<double>(std::max<std::int64_t>(1, steps));
  const double least = rate > 0.0 ? kLeastRate / rate : 0.0;
  return std::max(0.5 * (1.0 + std::cos(std::numbers::pi * done)), least);
}

Stepper::Stepper(const CosirConfig& config, State* state, Data* data, Hands* hands)
    : config_(config),
      state_(state),
      data_(data),
      hands_(hands),
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

// Row by row what compute_loss() does, in tiles.
Result<Loss> Stepper::grade(const LossInput& given, const std::vector<at::Tensor>& inputs,
                            std::vector<at::Tensor>& gradients) const {
  LossInput in = given;
  if (hands_ != nullptr) {
    PLIMSOLL_TRY(in, hands_->begin(given));
  }
  const std::int64_t rows = in.conditions.size(0);
  Tiles tiles(state_->model, loss_, config_.gradient_caching, in);
  Encoded all =
      hands_ != nullptr ? hands_->encoded(rows) : empty_encoded(state_->model, loss_, rows);
  if (hands_ != nullptr) {
    PLIMSOLL_TRY_VOID(hands_->encode(tiles, all));
  }
  for (std::int64_t tile = 0; hands_ == nullptr && tile < tiles.count(); ++tile) {
    tiles.encode(tile, all);
  }

  Loss loss;
  Slopes slopes;
  const auto compared = [&]() -> Slopes {
    loss =
        differentiate(state_->model, loss_, in, std::exchange(all, {}), inputs, gradients, slopes);
    return slopes;
  };
  if (hands_ != nullptr) {
    PLIMSOLL_TRY_VOID(hands_->compare(compared));
    PLIMSOLL_TRY_VOID(hands_->differentiate(tiles, slopes));
  } else {
    static_cast<void>(compared());
  }

  for (std::int64_t tile = 0; tile < tiles.count(); ++tile) {
    const auto found =
        hands_ != nullptr ? hands_->gradients(tiles, tile) : tiles.gradients(tile, slopes);
    const c10::AutoGradMode off{false};
    for (std::size_t k = 0; k < found.size(); ++k) {
      if (found[k].defined() && k == 0) {
        gradients[0].narrow(0, Tiles::first_row(tile), tiles.rows_of(tile)).add_(found[0]);
      } else if (found[k].defined()) {
        gradients[k] = gradients[k].defined() ? gradients[k] + found[k] : found[k];
      }
    }
  }
  return loss;
}

Result<Gradients> Stepper::phase1(const std::shared_ptr<Batch>& batch, std::int64_t rows) {
  LossInput in = input(batch, rows);
  PLIMSOLL_TRY(in.conditions, data_->conditions(in.ids));
  in.conditions.set_requires_grad(true);
  Gradients result;
  std::vector<at::Tensor> inputs{in.conditions};
  const auto& combiner = state_->combiner.parameters();
  const auto& projections = state_->projections.parameters();
  inputs.insert(inputs.end(), combiner.begin(), combiner.end());
  inputs.insert(inputs.end(), projections.begin(), projections.end());
  std::vector<at::Tensor> all(inputs.size());
  PLIMSOLL_TRY(const Loss loss, grade(in, inputs, all));
  result.loss = loss.total.item<double>();
  result.terms = loss.values;
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
