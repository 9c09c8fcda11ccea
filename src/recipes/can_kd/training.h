// SPDX-License-Identifier: Apache-2.0
//
// Training: the epochs of an autoencoder or a classifier.
//
//   choose the epoch's graphs → batches in keyed order → gradients, accumulated and clipped → Adam
//   → validation at the epoch's end: the best weights so far are kept, patience counts the rest
//
// The curriculum's difficulty is the autoencoder's error, which no epoch changes, or (with
// use_vgae_mining = false) the classifier's own loss, scored again every difficulty_cache_update
// epochs. Both graph by graph, so the size of a chunk does not change them.
// Reading order: work.h, learner.h, curriculum.h, this file.
//
// Threads: single-owner.
// Memory:  the learner, two moments and a copy of the best weights; 8 bytes a graph of an epoch and
//          4 a normal graph; a step's tensors.
#pragma once

#include <cstdint>
#include <filesystem>
#include <map>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "recipes/can_kd/config.h"
#include "recipes/can_kd/data.h"
#include "recipes/can_kd/hands.h"
#include "recipes/can_kd/learner.h"
#include "recipes/can_kd/work.h"
#include "torch/dense_adam.h"

namespace plimsoll::can_kd {

struct TrainingOptions {
  Task task{};
  Teacher* teacher{nullptr};       ///< None: no distillation. Outlives the work.
  std::filesystem::path scorer{};  ///< The autoencoder that finds difficult graphs, …
  bool rehearsal{false};           ///< … untrained when nothing is to be trained.
  Hands* hands{nullptr};           ///< Ranks that answer graphs, too. Outlives the work.
};

class Training final : public Work {
 public:
  /// Errors: of the scorer's file.
  static Result<std::unique_ptr<Training>> make(const CanKdConfig& config, const Data& data,
                                                const TrainingOptions& options);

  /// Does the largest step that `rows` graphs can make, and the largest answer to `chunk` graphs
  /// (validation, evaluation; 0: none), for their memory alone: nothing is changed. Errors:
  /// kOverBudget when refused.
  Result<void> rehearse(std::int64_t rows, std::int64_t chunk);

  Result<StepNews> step() override;
  Result<EpochNews> end_epoch() override;
  [[nodiscard]] bool epoch_over() const override { return epoch_over_; }
  [[nodiscard]] bool finished() const override;
  [[nodiscard]] std::int64_t epochs() const override { return config_.max_epochs; }
  [[nodiscard]] std::int64_t steps() const override;
  [[nodiscard]] std::vector<NamedTensor> tensors() const override;
  [[nodiscard]] std::map<std::string, double> numbers() const override;
  Result<void> restore(const std::map<std::string, double>& numbers) override;
  Result<void> save_model(const std::filesystem::path& path) const override;
  [[nodiscard]] std::int64_t parameters() const override;

 private:
  Training(const CanKdConfig& config, const Data& data, const TrainingOptions& options);
  Result<void> begin_epoch();
  Result<void> score_difficulty();
  Result<Graded> grade_batches(GraphBatch& last, std::int64_t& graphs);
  Result<at::Tensor> answers(const Learner& learner, Stage stage, Asked asked, Answer answer) const;
  Result<double> validate() const;
  Result<void> look_at_tests(EpochNews& news) const;
  void tell_curriculum(EpochNews& news) const;
  [[nodiscard]] std::span<const std::int64_t> candidates() const;
  [[nodiscard]] double rate_scale() const;
  [[nodiscard]] std::int64_t patience() const;
  [[nodiscard]] bool curriculum() const { return options_.task.stage == Stage::kCurriculum; }

  const CanKdConfig& config_;
  const Data& data_;
  TrainingOptions options_;
  std::unique_ptr<Learner> learner_;
  std::unique_ptr<Learner> scorer_;
  std::optional<DenseAdam> adam_;
  std::vector<NamedTensor> best_;  // "best.NAME", copies of the model's.
  at::Tensor difficulty_;          // float32 [normals], with a curriculum.
  std::int64_t scored_epoch_{-1};
  double scoring_seconds_{0.0};                   // In this epoch.
  std::pair<std::int64_t, std::int64_t> chosen_;  // Attacks and normal graphs of this epoch, …
  float threshold_{0};  // … these from this difficulty on, as long as there are enough.
  std::optional<GraphBatches> batches_;
  std::int64_t epoch_{0};
  std::int64_t position_{0};  // Graphs of this epoch behind us.
  bool epoch_over_{false};    // Its last step is done, and end_epoch() is not.
  double best_loss_{0.0};
  std::int64_t best_epoch_{-1};
  double loss_sum_{0.0};
  std::int64_t loss_steps_{0};
};

}  // namespace plimsoll::can_kd
