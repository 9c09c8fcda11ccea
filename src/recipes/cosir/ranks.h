// SPDX-License-Identifier: Apache-2.0
//
// Ranks by counting: how many gallery items are at least as similar as the right one, under many
// conditions at once.
//
// A text turned by a condition is f·(cosθ·t̂ + sinθ·p), so its similarity to an image is
// f·(cosθ·(t̂·img) + sinθ·(p·img)): one product of texts and images serves every condition.
// Nothing is sorted, and memory depends on the block sizes alone.
// Reading order: this file, cosir_ranks.cpp, cosir_eval.h.
//
// Threads: as torch operators.
// Memory:  one query block, one gallery block, their similarities, kConditionBlock rows of factors,
//          and 16 bytes per pair.
#pragma once

#include <cstdint>
#include <functional>
#include <vector>

#include "plimsoll/result.h"
#include "recipes/cosir/model.h"

namespace plimsoll::cosir {

inline constexpr std::int64_t kQueryBlock = 512;
inline constexpr std::int64_t kGalleryBlock = 2048;
inline constexpr std::int64_t kConditionBlock = 128;

/// Image-text pairs, those of one group (one image) next to each other.
struct PairSource {
  std::int64_t pairs{0};
  std::function<std::int64_t(std::int64_t pair)> group;  ///< Any number; equal within a group.
  /// Raw features of pairs, [n, width] float32, contiguous.
  std::function<Result<at::Tensor>(const std::vector<std::int64_t>& pairs)> images;
  std::function<Result<at::Tensor>(const std::vector<std::int64_t>& pairs)> texts;
};

/// Conditions as the combiner applies them. Row 0 may be raw: no condition at all.
struct TurnSet {
  at::Tensor course;  ///< p = norm(direction), [K, dim].
  at::Tensor cosine;  ///< [K] each.
  at::Tensor sine;
  at::Tensor scale;
  bool raw_first{false};
  [[nodiscard]] std::int64_t size() const { return cosine.size(0); }
};
/// With `raw_first`, raw precedes the conditions. Shape: conditions [K, label_dim].
TurnSet turn_set(const Model& model, const at::Tensor& conditions, bool raw_first);

/// Best rank of each query over the conditions, and the rank under row 0.
struct Ranks {
  std::vector<std::int32_t> first;     ///< Under row 0 (raw).
  std::vector<std::int32_t> best;      ///< Least over all rows.
  std::vector<float> first_precision;  ///< Average precision; for one positive, 1 / rank.
  std::vector<float> best_precision;
};

/// Each text looks for its image among one image per group (the group's first pair's).
Result<Ranks> rank_images(const Model& model, const PairSource& source, const TurnSet& turns);

/// Each image (one per group) looks for its texts among all: the rank is its best text's.
Result<Ranks> rank_texts(const Model& model, const PairSource& source, const TurnSet& turns);

/// Sum over rows i of the rank of b_i among all b for a_i, by dot product; 1 is best.
/// Shape: a, b [n, dim].
double diagonal_rank_sum(const at::Tensor& a, const at::Tensor& b);

}  // namespace plimsoll::cosir
