// SPDX-License-Identifier: Apache-2.0
//
// The six terms, one function each, and their weighted sum.
//
// Threads: as torch operators.   Memory: see cosir_loss.h.
#include "recipes/cosir/loss.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/exp.h>
#include <ATen/ops/relu.h>
#include <ATen/ops/tensor.h>
#include <ATen/ops/zeros.h>
#include <c10/core/InferenceMode.h>
#include <torch/csrc/autograd/grad_mode.h>

#include <algorithm>
#include <cmath>
#include <numbers>

#include "base/check.h"
#include "base/philox.h"
#include "kernels/contrast_loops.h"

namespace plimsoll::cosir {
namespace {

constexpr std::int64_t kRadiusPairs = 50;
constexpr double kRadiusDegrees = 15.0;
constexpr double kRadiusMargin = 0.05;
constexpr std::int64_t kAnchors = 4;
constexpr double kBoundaryRadius = 10.0;

// ‖x − y‖ per row, with gradient 0 where the two are equal.
at::Tensor row_distance(const at::Tensor& x, const at::Tensor& y) {
  const auto square = (x - y).square().sum(1);
  const auto equal = square == 0;
  return square.masked_fill(equal, 1.0).sqrt().masked_fill(equal, 0.0);
}

at::Tensor laplacian(const at::Tensor& cosine, const at::Tensor& conditions,
                     const at::Tensor& picked) {
  const auto distance = row_distance(conditions, conditions.index_select(0, picked));
  return ((1.0 - cosine) * at::exp(-distance)).mean();
}

// Among neighbours in angle, the one with the larger radius should be turned further.
at::Tensor radius_order(const kernels::Neighbors& found, const at::Tensor& radius,
                        const at::Tensor& length) {
  static const auto kNear = static_cast<float>(std::cos(kRadiusDegrees * std::numbers::pi / 180));
  const auto whole = found.best_angle.options();
  auto low = at::empty({kRadiusPairs}, whole);
  auto high = at::empty({kRadiusPairs}, whole);
  const auto* r = radius.const_data_ptr<float>();
  const auto* cosine = found.best_cosine.const_data_ptr<float>();
  const auto* other = found.best_angle.const_data_ptr<std::int64_t>();
  std::int64_t pairs = 0;
  for (std::int64_t i = 0; i < radius.size(0) && pairs < kRadiusPairs; ++i) {
    if (cosine[i] > kNear) {
      const bool ordered = r[i] <= r[other[i]];
      low.data_ptr<std::int64_t>()[pairs] = ordered ? i : other[i];
      high.data_ptr<std::int64_t>()[pairs] = ordered ? other[i] : i;
      ++pairs;
    }
  }
  if (pairs == 0) {
    return at::zeros({}, length.options());
  }
  const auto farther = length.index_select(0, high.narrow(0, 0, pairs)) -
                       length.index_select(0, low.narrow(0, 0, pairs));
  return at::relu(kRadiusMargin - farther).mean();
}

// Four anchors a quarter turn apart should move texts in unrelated directions.
at::Tensor rotation(const Model& model, const at::Tensor& text, const at::Tensor& radius) {
  const std::int64_t texts = std::min(text.size(0), kRotationTexts);
  const double mean_radius = radius.detach().mean().item<double>();
  auto anchors = at::zeros({kAnchors, model.shape.label_dim}, text.options());
  auto* anchor = anchors.data_ptr<float>();
  const std::int64_t width = model.shape.label_dim;
  anchor[0 * width + 0] = static_cast<float>(mean_radius);
  anchor[1 * width + 1] = static_cast<float>(mean_radius);
  anchor[2 * width + 0] = -static_cast<float>(mean_radius);
  anchor[3 * width + 1] = -static_cast<float>(mean_radius);

  const Turn by = turn(model, kernels::polar_coordinates(anchors));
  const auto each = [&](const at::Tensor& x) { return x.repeat_interleave(texts, 0); };
  const auto turned =
      kernels::rotate_toward(text.narrow(0, 0, texts).repeat({kAnchors, 1}),
                             each(direction(model, anchors)), each(by.theta), each(by.scale));
  const auto moved = (turned.out - turned.unit).view({kAnchors, texts, -1}).mean(1);
  const auto next = moved.roll(-1, 0);
  const auto lengths = (moved.norm(2, 1) * next.norm(2, 1)).clamp_min(kernels::kNormFloor);
  return ((moved * next).sum(1) / lengths).square().mean();
}

}  // namespace

LossOptions loss_options(const CosirConfig& config) {
  return {{config.loss_infonce, config.loss_laplacian, config.loss_angular, config.loss_radius,
           config.loss_rotation, config.loss_boundary},
          config.temperature,
          static_cast<std::uint64_t>(config.seed)};
}

at::Tensor pick_neighbours(const at::Tensor& nearest, std::span<const std::int64_t> ids,
                           std::uint64_t seed, std::int64_t epoch) {
  auto picked = at::empty({nearest.size(0)}, nearest.options());
  const auto* from = nearest.const_data_ptr<std::int64_t>();
  auto* to = picked.data_ptr<std::int64_t>();
  const auto count =
      static_cast<std::uint32_t>(std::min<std::int64_t>(kernels::kNeighbors, nearest.size(0) - 1));
  for (std::size_t i = 0; i < ids.size(); ++i) {
    const auto word =
        philox(seed, static_cast<std::uint64_t>(ids[i]), static_cast<std::uint64_t>(epoch))[0];
    to[i] = from[i * kernels::kNeighbors + word % count];
  }
  return picked;
}

Encoded encode(const Model& model, const LossInput& in, const LossOptions& options) {
  Encoded rows;
  rows.text = project_text(model, in.text);
  const auto place = kernels::polar_coordinates(in.conditions);
  const Turn by = turn(model, place);
  rows.radius = place.radius;
  rows.turned =
      kernels::rotate_toward(rows.text, direction(model, in.conditions), by.theta, by.scale);
  if (options.weights[kInfoNce] != 0.0) {
    rows.image = kernels::normalize_rows(project_image(model, in.image));
  }
  return rows;
}

Loss compute_loss(const Model& model, const LossInput& in, const LossOptions& options) {
  return compare(model, in, encode(model, in, options), options);
}

Loss compare(const Model& model, const LossInput& in, const Encoded& rows,
             const LossOptions& options) {
  PLIMSOLL_CHECK(in.conditions.size(0) >= 2, "the loss compares rows; it needs two");
  const auto& weight = options.weights;
  const kernels::Rotated& turned = rows.turned;
  std::array<at::Tensor, kTerms> term;
  if (weight[kInfoNce] != 0.0) {
    term[kInfoNce] =
        kernels::symmetric_info_nce(turned.out, rows.image, in.groups, options.temperature);
  }
  if (weight[kLaplacian] != 0.0 || weight[kAngular] != 0.0 || weight[kRadius] != 0.0) {
    const auto found = kernels::nearest_neighbors(in.conditions);
    const auto picked = weight[kLaplacian] != 0.0
                            ? pick_neighbours(found.nearest, in.ids, options.seed, in.epoch)
                            : at::Tensor{};
    const auto moved = kernels::displacement_cosines(
        turned.out, turned.unit, picked, weight[kAngular] != 0.0 ? found.best_angle : at::Tensor{});
    if (weight[kLaplacian] != 0.0) {
      term[kLaplacian] = laplacian(moved.cosine0, in.conditions, picked);
    }
    if (weight[kAngular] != 0.0) {
      term[kAngular] = (1.0 - moved.cosine1).mean();
    }
    if (weight[kRadius] != 0.0) {
      term[kRadius] = radius_order(found, rows.radius, moved.length);
    }
  }
  if (weight[kRotation] != 0.0) {
    term[kRotation] = rotation(model, rows.text, rows.radius);
  }
  if (weight[kBoundary] != 0.0) {
    term[kBoundary] = at::relu(rows.radius - kBoundaryRadius).square().mean();
  }

  Loss loss;
  for (int k = 0; k < kTerms; ++k) {
    const auto at_k = static_cast<std::size_t>(k);
    if (term[at_k].defined()) {
      loss.values[at_k] = term[at_k].item<double>();
      const auto part = term[at_k] * weight[at_k];
      loss.total = loss.total.defined() ? loss.total + part : part;
    }
  }
  if (!loss.total.defined()) {
    loss.total = at::zeros({}, in.conditions.options());
  }
  return loss;
}

}  // namespace plimsoll::cosir
