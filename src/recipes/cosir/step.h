// SPDX-License-Identifier: Apache-2.0
//
// One step of `cosir` in two halves: gradients, which change nothing, and their application.
//
// That is what makes a step a transaction: a refusal of memory can only strike in the first half.
// Rows are encoded in tiles, all of them compared, and the comparison's gradients taken through the
// tiles in turn; tiles are made here, or dealt to ranks (hands.h).
// Reading order: tiles.h, hands.h, phase2.h, this file, cosir.cpp.
//
// Threads: the thread that trains.   Memory: the first half's peak is what admission rehearses.
#pragma once

#include <array>
#include <memory>
#include <optional>
#include <vector>

#include "recipes/cosir/data.h"
#include "recipes/cosir/hands.h"
#include "recipes/cosir/loss.h"
#include "recipes/cosir/phase2.h"
#include "recipes/cosir/state.h"

namespace plimsoll::cosir {

/// A step's loss, and its gradients in the order of each optimizer's parameters.
struct Gradients {
  double loss{0};
  std::array<double, kTerms> terms{};
  at::Tensor conditions;
  std::vector<at::Tensor> combiner, projections, labeller;
};

/// Makes and applies the steps of a run; borrows its state and data.
class Stepper {
 public:
  /// hands: nullptr, or other ranks that make tiles of phase 1.
  Stepper(const CosirConfig& config, State* state, Data* data, Hands* hands = nullptr);

  /// Of phase 1 over the first `rows` rows of a batch. Requires: rows >= 2.
  Result<Gradients> phase1(const std::shared_ptr<Batch>& batch, std::int64_t rows);
  /// Of phase 2. The first call chooses the representatives from the rows as they are.
  Result<Gradients> phase2(const std::shared_ptr<Batch>& batch, std::int64_t rows);
  Result<const Representatives*> representatives();
  void forget_representatives() { representatives_.reset(); }

  /// Applies phase 1's to rows and model, with the learning rates of this step.
  Result<void> apply(const Batch& batch, const Gradients& gradients);
  /// Applies phase 2's to the classifier.
  void apply_labeller(const Gradients& gradients);

  /// The factor of the model's learning rates at a step: the cosine schedule.
  [[nodiscard]] double rate_scale(std::int64_t step) const;

 private:
  LossInput input(const std::shared_ptr<Batch>& batch, std::int64_t rows) const;
  Result<Loss> grade(const LossInput& in, const std::vector<at::Tensor>& inputs,
                     std::vector<at::Tensor>& gradients) const;

  const CosirConfig& config_;
  State* state_;
  Data* data_;
  Hands* hands_;
  LossOptions loss_;
  std::int64_t steps_;  // Of phase 1, all epochs.
  std::optional<Representatives> representatives_;
};

/// ½(1 + cos(π·step/steps)), such that rate times it is at least 1e-9.
[[nodiscard]] double cosine_scale(std::int64_t step, std::int64_t steps, double rate);

}  // namespace plimsoll::cosir
