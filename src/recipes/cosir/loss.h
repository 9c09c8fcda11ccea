// SPDX-License-Identifier: Apache-2.0
//
// The loss of `cosir`: symmetric InfoNCE and five terms that shape the space of conditions.
//
// docs/recipes/cosir.md states each formula; a term whose weight is 0 is not computed.
// Reading order: this file, loss.cpp, kernels/contrast.h.
//
// Threads: as torch operators.
// Memory:  one [B, B] matrix while InfoNCE is computed, and about eight [B, dim] tensors.
#pragma once

#include <array>
#include <cstdint>
#include <span>

#include "kernels/contrast_loops.h"
#include "recipes/cosir/config.h"
#include "recipes/cosir/model.h"

namespace plimsoll::cosir {

/// What InfoNCE holds per pair of rows, in bytes: one float, and the partial sums of its columns.
inline constexpr double kPairBytes = 4.0 * (1.0 + 1.0 / static_cast<double>(kernels::kPairBlock));

enum Term : int { kInfoNce, kLaplacian, kAngular, kRadius, kRotation, kBoundary };
inline constexpr int kTerms = 6;
inline constexpr std::array<const char*, kTerms> kTermNames{"infonce", "laplacian", "angular",
                                                            "radius",  "rotation",  "boundary"};

struct LossOptions {
  std::array<double, kTerms> weights{};
  double temperature{0.07};
  std::uint64_t seed{0};
};
LossOptions loss_options(const CosirConfig& config);

struct LossInput {
  at::Tensor image;       ///< Raw features [B, image_dim].
  at::Tensor text;        ///< Raw features [B, text_dim].
  at::Tensor conditions;  ///< [B, label_dim]; requires grad when trained.
  std::span<const std::int64_t> ids;
  at::Tensor groups;  ///< int64 [B].
  std::int64_t epoch{0};
};

struct Loss {
  at::Tensor total;                     ///< Scalar, differentiable.
  std::array<double, kTerms> values{};  ///< Unweighted; 0 where not computed.
};

/// What the rows are before they are compared with each other: row by row, of any batch the same.
struct Encoded {
  at::Tensor text;    ///< Projected, [B, dim]; for compare() its first kRotationTexts rows will do.
  at::Tensor radius;  ///< Of the conditions, [B].
  kernels::Rotated turned;
  at::Tensor image;  ///< Projected, of norm 1, [B, dim]; undefined when nothing compares it.
};
inline constexpr std::int64_t kRotationTexts = 64;
Encoded encode(const Model& model, const LossInput& in, const LossOptions& options);

/// The loss of encoded rows; of `in` only conditions, ids, groups and epoch are looked at.
Loss compare(const Model& model, const LossInput& in, const Encoded& rows,
             const LossOptions& options);

/// Both, of the whole batch at once: what a step's tiles (cosir_step.h) come to. Requires: B >= 2
/// (in-batch losses are undefined otherwise).
Loss compute_loss(const Model& model, const LossInput& in, const LossOptions& options);

/// Which of each row's nearest neighbours the Laplacian term looks at in this epoch: int64 [B].
at::Tensor pick_neighbours(const at::Tensor& nearest, std::span<const std::int64_t> ids,
                           std::uint64_t seed, std::int64_t epoch);

}  // namespace plimsoll::cosir
