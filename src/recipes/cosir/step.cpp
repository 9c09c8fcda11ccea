// SPDX-License-Identifier: Apache-2.0
//
// Gradients, and their application.
//
// Threads: the thread that trains.   Memory: see cosir_step.h.
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

// Row by row what compute_loss() does, in tiles, so that the sums over rows are the same whether
// a tile's graph was kept or is made again.
Loss Stepper::grade(const LossInput& in, const std::vector<at::Tensor>& inputs,
                    std::vector<at::Tensor>& gradients) const {
  struct Tile {
    LossInput in;
    Encoded rows;
  };
  const std::int64_t rows = in.conditions.size(0);
  const at::Tensor values = in.conditions.detach();
  const auto tile_at = [&](std::int64_t first) {
    const std::int64_t count = std::min(kTileRows, rows - first);
    Tile tile{{in.image.narrow(0, first, count), in.text.narrow(0, first, count),
               values.narrow(0, first, count).detach(),
               in.ids.subspan(static_cast<std::size_t>(first), static_cast<std::size_t>(count)),
               in.groups.narrow(0, first, count), in.epoch},
              {}};
    tile.in.conditions.set_requires_grad(true);
    tile.rows = encode(state_->model, tile.in, loss_);
    return tile;
  };

  Encoded all;
  std::vector<Tile> kept;
  for (std::int64_t first = 0; first < rows; first += kTileRows) {
    const c10::AutoGradMode graph{!config_.gradient_caching};
    Tile tile = tile_at(first);
    const c10::AutoGradMode off{false};
    // The whole takes a tile's values over, and the tile keeps its graph alone.
    const auto take = [&](at::Tensor& whole, at::Tensor& part) {
      if (!whole.defined()) {
        whole = at::empty({rows, part.size(1)}, part.options());
      }
      const at::Tensor place = whole.narrow(0, first, part.size(0));
      place.copy_(part);
      part.set_data(place);
    };
    take(all.turned.out, tile.rows.turned.out);
    take(all.turned.text_unit, tile.rows.turned.text_unit);
    if (tile.rows.image.defined()) {
      take(all.image, tile.rows.image);
    }
    if (first == 0) {
      all.text = tile.rows.text.narrow(0, 0, std::min(rows, kRotationTexts)).clone();
    }
    if (!config_.gradient_caching) {
      kept.push_back(std::move(tile));
    }
  }

  std::vector<at::Tensor> leaves{all.turned.out, all.turned.text_unit, all.text};
  if (all.image.defined()) {
    leaves.push_back(all.image);
  }
  // Without projections text and image are data: only what the conditions moved has a gradient.
  const std::size_t sloped = state_->model.shape.projections ? leaves.size() : 1;
  std::vector<at::Tensor> asked;
  for (std::size_t k = 0; k < sloped; ++k) {
    asked.push_back(leaves[k].set_requires_grad(true));
  }
  asked.insert(asked.end(), inputs.begin(), inputs.end());
  all.radius = polar(in.conditions).radius;
  Loss loss = compare(state_->model, in, all, loss_);
  if (!loss.total.requires_grad()) {
    return loss;
  }
  auto found = torch::autograd::grad({loss.total}, asked, {}, std::nullopt, false,
                                     /*allow_unused=*/true);
  std::vector<at::Tensor> slopes(leaves.size());  // Of the leaves; undefined where there is none.
  const auto middle = found.begin() + static_cast<std::ptrdiff_t>(sloped);
  std::copy(found.begin(), middle, slopes.begin());
  gradients.assign(middle, found.end());
  found.clear();
  gradients[0] = gradients[0].defined() ? gradients[0].contiguous() : at::zeros_like(values);
  loss.total = loss.total.detach();
  leaves.clear();
  all = {};  // Compared; a kept tile still holds what it needs of them.

  for (std::int64_t first = 0; first < rows; first += kTileRows) {
    const Tile tile = kept.empty() ? tile_at(first)
                                   : std::move(kept[static_cast<std::size_t>(first / kTileRows)]);
    const std::int64_t count = tile.in.conditions.size(0);
    std::vector<at::Tensor> ends;
    std::vector<at::Tensor> down;
    const auto join = [&](const at::Tensor& end, const at::Tensor& slope, std::int64_t most) {
      if (slope.defined() && end.requires_grad()) {
        ends.push_back(most < count ? end.narrow(0, 0, most) : end);
        down.push_back(slope.narrow(0, first, most));
      }
    };
    join(tile.rows.turned.out, slopes[0], count);
    join(tile.rows.turned.text_unit, slopes[1], count);
    if (first == 0) {
      join(tile.rows.text, slopes[2], std::min(rows, kRotationTexts));
    }
    if (slopes.size() > 3) {
      join(tile.rows.image, slopes[3], count);
    }
    if (ends.empty()) {
      continue;
    }
    asked.assign(inputs.begin(), inputs.end());
    asked[0] = tile.in.conditions;
    found = torch::autograd::grad(ends, asked, down, std::nullopt, false, /*allow_unused=*/true);
    const c10::AutoGradMode off{false};
    if (found[0].defined()) {
      gradients[0].narrow(0, first, count).add_(found[0]);
    }
    for (std::size_t k = 1; k < found.size(); ++k) {
      if (found[k].defined()) {
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
  const Loss loss = grade(in, inputs, all);
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
