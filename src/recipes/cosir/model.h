// SPDX-License-Identifier: Apache-2.0
//
// The model of `cosir`: optional projections, and the combiner that turns a text by a condition.
//
// Plain structs of tensors and functions; the formulas are in docs/recipes/cosir.md.
// Reading order: this file, kernels/contrast.h, loss.h.
//
// Threads: as torch operators.
// Memory:  the parameters; a few [B, dim] tensors per call, held by autograd until backward.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "kernels/contrast.h"
#include "plimsoll/result.h"
#include "recipes/cosir/config.h"
#include "torch/checkpoint.h"
#include "torch/random_tensors.h"

namespace plimsoll::cosir {

/// Widths, resolved from the options and the data.
struct ModelShape {
  std::int64_t image_dim{0};
  std::int64_t text_dim{0};
  std::int64_t dim{0};
  std::int64_t label_dim{2};
  bool projections{false};
};

/// Errors: kInvalidArgument naming the option that does not fit the features.
Result<ModelShape> resolve_shape(const CosirConfig& config, std::int64_t image_dim,
                                 std::int64_t text_dim);

/// Linear(1, 64) → ReLU → LayerNorm → Linear(64, 1), plus a skip Linear(1, 1).
struct Branch {
  at::Tensor in_weight, in_bias, norm_weight, norm_bias, out_weight, out_bias, skip_weight,
      skip_bias;
};

struct Model {
  ModelShape shape;
  at::Tensor direction_weight;  ///< W [dim, label_dim], orthonormal columns; frozen.
  at::Tensor direction_bias;    ///< b [dim]; frozen.
  Branch radius;
  Branch angle;
  at::Tensor image_weight, image_bias, text_weight, text_bias;  ///< Undefined when off.
};

/// Every weight from philox(seed, its own stream): equal for any thread count.
Model make_model(const ModelShape& shape, std::uint64_t seed);

/// The trained parameters in their fixed order; the combiner's first, then the projections'.
std::vector<NamedTensor> combiner_parameters(const Model& model);
std::vector<NamedTensor> projection_parameters(const Model& model);
std::vector<NamedTensor> frozen_parameters(const Model& model);

/// Scale s and angle θ that the branches give for conditions.
struct Turn {
  at::Tensor scale;  ///< s = 0.8 + 0.4·MLP_r(r), [B].
  at::Tensor theta;  ///< θ = (π/6)·MLP_a(φ), [B].
};
Turn turn(const Model& model, const kernels::Polar& polar);

/// cWᵀ + b, [B, dim].
at::Tensor direction(const Model& model, const at::Tensor& conditions);

/// Features as the model uses them: projected from norm(x), or as they are.
at::Tensor project_image(const Model& model, const at::Tensor& image);
at::Tensor project_text(const Model& model, const at::Tensor& text);

/// The whole combiner. Shape: text [B, dim] (projected), conditions [B, label_dim].
kernels::Rotated modulate(const Model& model, const at::Tensor& text, const at::Tensor& conditions);

/// Seeds for the different uses of one run's seed; no two share a random number.
enum class Purpose : std::uint64_t { kModel = 1, kRows, kOrder, kSplit, kClassifier, kNoise };
[[nodiscard]] std::uint64_t seed_for(std::uint64_t seed, Purpose purpose) noexcept;

}  // namespace plimsoll::cosir
