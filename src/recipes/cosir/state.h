// SPDX-License-Identifier: Apache-2.0
//
// What a `cosir` run is made of between two steps: model, optimizers, and how far it has come.
//
// All of it is written by a checkpoint, together with the rows' commit of the same step, and read
// back bit for bit. Reading order: cosir_model.h, checkpoint.h, this file.
//
// Threads: single-owner.   Memory: the tensors; saving and loading stream.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "plimsoll/embedding_store.h"
#include "plimsoll/result.h"
#include "recipes/cosir/config.h"
#include "recipes/cosir/model.h"
#include "recipes/cosir/phase2.h"
#include "run/run_folder.h"
#include "torch/checkpoint.h"
#include "torch/dense_adam.h"

namespace plimsoll::cosir {

/// How far a run has come. Everything here survives a checkpoint.
struct Position {
  std::int64_t step{0};  ///< Steps done.
  LoaderState loader{};  ///< Where the next batch begins.
  double loss_sum{0.0};  ///< Of the current epoch's steps so far.
  std::int64_t loss_steps{0};
  std::int64_t rows_skipped{0};  ///< In batches of a single row.
  std::int64_t eval_peak{0};     ///< Bytes the first evaluation held at most.
  std::string recall_before{"{}"};

  [[nodiscard]] double mean_loss() const {
    return loss_steps == 0 ? 0.0 : loss_sum / static_cast<double>(loss_steps);
  }
};

class State {
 public:
  /// Builds model and optimizer state from the seed; nothing is allocated later.
  State(const CosirConfig& config, const ModelShape& shape);

  Model model;
  Classifier classifier;  ///< Empty (dim 0) without phase 2.
  DenseAdam combiner;
  DenseAdam projections;
  DenseAdam labeller;  ///< The classifier's.
  Position at;

  /// Every tensor of the run, in the order of its digest.
  [[nodiscard]] std::vector<NamedTensor> tensors() const;

  /// Writes checkpoint, commits the rows, then names the step in the run's manifest.
  Result<void> save(RunFolder& folder, EmbeddingStore& rows, std::int64_t keep) const;

  /// What checkpoints come to fill when `keep` of them are kept and one more is being written.
  [[nodiscard]] std::int64_t disk_bytes(std::int64_t keep) const;

  /// Reads the checkpoint of `step`.
  Result<void> load(const RunFolder& folder, std::int64_t step);

  /// SHA-256 over every tensor, the step, and every row in the order of the ids.
  Result<std::string> digest(EmbeddingStore& rows) const;
};

}  // namespace plimsoll::cosir
