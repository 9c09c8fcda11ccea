// SPDX-License-Identifier: Apache-2.0
//
// Phase 2 of `cosir`: a classifier that says which of twelve conditions suits a pair, also when
// its image or its text is missing. Combiner and projections are frozen.
//
// docs/recipes/cosir.md states the formulas. Reading order: this file, cosir_model.h.
//
// Threads: as torch operators.   Memory: about twelve [B, dim] tensors in a step.
#pragma once

#include <array>
#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "plimsoll/result.h"
#include "recipes/cosir/eval.h"
#include "recipes/cosir/loss.h"
#include "recipes/cosir/model.h"

namespace plimsoll::cosir {

inline constexpr std::int64_t kRepresentatives = 12;

/// What the classifier sees of a pair.
enum class Mode : int { kBoth, kImage, kText };
inline constexpr int kModes = 3;
inline constexpr std::array<const char*, kModes> kModeNames{"both", "img", "txt"};

/// Linear(dim, dim) → GELU → LayerNorm → Dropout(0.5) → Linear(dim, dim).
struct Encoder {
  at::Tensor in_weight, in_bias, norm_weight, norm_bias, out_weight, out_bias;
};

struct Classifier {
  std::int64_t dim{0};
  Encoder image;
  Encoder text;
  at::Tensor image_mask, text_mask;  ///< Stand in for a missing side, [dim].
  at::Tensor in_weight, in_bias, norm_weight, norm_bias, out_weight, out_bias;  ///< Fused head.
};

Classifier make_classifier(std::int64_t dim, std::uint64_t seed);
std::vector<NamedTensor> classifier_parameters(const Classifier& classifier);

/// Keys of the dropout masks and the Gumbel noise of one step.
struct NoiseKey {
  std::uint64_t seed{0};
  std::int64_t epoch{0};
};

/// Twelve angles at one radius, and each as the combiner applies it.
struct Representatives {
  at::Tensor conditions;  ///< [12, label_dim].
  at::Tensor directions;  ///< [12, dim].
  Turn turn;
};
Representatives make_representatives(const Model& model, double radius);

/// The representative under which each text lies nearest to its image: int64 [B].
at::Tensor targets(const Representatives& chosen, const at::Tensor& image_unit,
                   const at::Tensor& text);

/// Logits [B, 12]. `ids` and `key` give the dropout masks; with `key` null there is no dropout.
at::Tensor classify(const Classifier& classifier, Mode mode, const at::Tensor& image_unit,
                    const at::Tensor& text_unit, std::span<const std::int64_t> ids,
                    const NoiseKey* key);

/// Loss and gradients of one step, in the order of classifier_parameters(). One mode at a time, so
/// that only one mode's activations are held.
struct Phase2Step {
  double loss{0};
  std::vector<at::Tensor> gradients;
};
Phase2Step phase2_step(const Model& model, const Classifier& classifier,
                       const Representatives& chosen, const LossInput& in, double temperature,
                       const NoiseKey& key);

/// Accuracy in percent per mode on held-out pairs, and of always naming the commonest target.
struct Phase2Accuracy {
  std::array<double, kModes> accuracy{};
  double commonest{0};
  std::int64_t pairs{0};
  [[nodiscard]] std::string to_json() const;
};
Result<Phase2Accuracy> phase2_accuracy(const Model& model, const Classifier& classifier,
                                       const Representatives& chosen, const PairSource& source);

}  // namespace plimsoll::cosir
