// SPDX-License-Identifier: Apache-2.0
//
// Evaluation of `cosir`: recall and ranks in both directions, raw and under the best condition.
//
// docs/recipes/cosir.md defines each figure. Reading order: this file, cosir_ranks.h.
//
// Threads: as torch operators.   Memory: that of cosir_ranks.h; it does not grow with the gallery.
#pragma once

#include <cstdint>
#include <functional>
#include <string>

#include "plimsoll/result.h"
#include "recipes/cosir/ranks.h"

namespace plimsoll::cosir {

/// Quality of one direction of search. Recall in percent.
struct Retrieval {
  double r1{0}, r5{0}, r10{0};
  double mean_rank{0}, median_rank{0};
  double map{0};
};
Retrieval summarise(const std::vector<std::int32_t>& ranks, const std::vector<float>& precision);

struct Evaluation {
  Retrieval raw_t2i, raw_i2t;
  Retrieval oracle_t2i, oracle_i2t;
  double chance_t2i{0}, chance_i2t{0};  ///< Mean rank of a random order.
  std::int64_t pairs{0};
  double train_mean_rank{0};  ///< 0 when no training rows were looked at.

  /// {"raw": {"t2i", "i2t"}, "oracle", "diff", "chance", "pairs", "train_mean_rank"}.
  [[nodiscard]] std::string to_json() const;
  /// A table of a few lines.
  [[nodiscard]] std::string to_text() const;
};

/// Rows of the training set with their conditions as they are now.
struct TrainedRows {
  std::int64_t rows{0};
  /// Raw features and conditions of rows by rank, [n, …] float32.
  struct Block {
    at::Tensor image, text, conditions;
  };
  std::function<Result<Block>(const std::vector<std::int64_t>& ranks)> read;
  /// Conditions alone, [n, label_dim].
  std::function<Result<at::Tensor>(const std::vector<std::int64_t>& ranks)> conditions;
};

struct EvalOptions {
  std::int64_t angles{12};
  std::int64_t batch_rows{2048};  ///< For train_mean_rank.
  std::int64_t train_batches{25};
  std::uint64_t seed{0};
};

inline constexpr std::int64_t kFinalAngles = 30;  ///< Before the first and after the last epoch.
inline constexpr std::int64_t kRadiusSample = 65'536;  ///< Rows looked at for r_max.
inline constexpr std::int64_t kTrainBatchRowsMax = 2048;

/// Errors: those of the sources. With no held-out pairs every figure of theirs is 0.
Result<Evaluation> evaluate(const Model& model, const PairSource& held_out,
                            const TrainedRows& trained, const EvalOptions& options);

/// The `share` quantile of ‖c‖ (the value at floor(share·(n−1)) in ascending order) over at most
/// kRadiusSample rows, evenly spaced.
Result<double> radius_quantile(const TrainedRows& trained, double share);

/// Angles × radii around the origin of the plane (e0, e1): [angles × radii.size(), label_dim].
at::Tensor polar_grid(std::int64_t angles, const std::vector<double>& radii,
                      std::int64_t label_dim);

}  // namespace plimsoll::cosir
