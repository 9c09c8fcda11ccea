// SPDX-License-Identifier: Apache-2.0
//
// Hands: ranks that answer graphs for the one that has the run (decision 0052): validation,
// difficulties, looks at the test files.
//
//   rank 0   lays out the model → order → its chunks of the graphs → all answers
//   others        wait for an order     → their chunks
//
// A graph's answer has the bits of that graph alone (learner.h), whoever gives it.
//
// Reading order: torch/rank_crew.h, learner.h, this file, training.h.
//
// Threads: the thread that trains.
// Memory:  4 bytes a graph and the largest model, shared, and leased by each rank; each has the set
//          open, and a model.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <vector>

#include "plimsoll/governor.h"
#include "plimsoll/result.h"
#include "recipes/can_kd/data.h"
#include "recipes/can_kd/learner.h"
#include "recipes/can_kd/task.h"
#include "torch/rank_crew.h"

namespace plimsoll::can_kd {

/// Which graphs.
enum class Asked : std::int64_t { kHeldOut, kNormals, kTests };
/// What of each: Learner::losses() or Learner::scores().
enum class Answer : std::int64_t { kLoss, kScore };

[[nodiscard]] std::span<const std::int64_t> graphs_of(const Data& data, Asked asked);

/// One number for each graph, scoring_chunk of them at a time, as one process finds them.
/// Shape: float32 [graphs]. Errors: of Data::for_each().
Result<at::Tensor> answers_of(const Learner& learner, const Data& data, const CanKdConfig& config,
                              Asked asked, Answer answer);

class Hands {
 public:
  /// On all ranks at once. Borrows all but the governor. Errors: kOverBudget; of the crew.
  static Result<std::unique_ptr<Hands>> open(RankCrew& crew, const CanKdConfig& config,
                                             const Data& data, Governor& governor);

  // ---- Of rank 0 ----

  /// The others are let go.
  ~Hands();
  Hands(const Hands&) = delete;
  Hands& operator=(const Hands&) = delete;

  /// answers_of() a learner of `task`'s model, from all ranks. Errors: as that; as
  /// RankCrew::agree().
  Result<at::Tensor> ask(const Learner& learner, const Task& task, Asked asked, Answer answer);
  /// The others rehearse the largest chunks of these tasks and have them admitted.
  /// Errors: kOverBudget naming the rank; as agree().
  Result<void> admit(std::span<const Task> tasks);

  // ---- Of the others ----

  /// Gives answers until rank 0 lets them go. Errors: as agree(), where a rank has ended.
  Result<void> serve();

 private:
  Hands(RankCrew& crew, const CanKdConfig& config, const Data& data, Governor governor,
        RankRows room);
  Result<void> answer_own(const Learner& learner, Asked asked, Answer answer);
  Result<void> rehearse(const Task& task);
  const Learner& learner_of(const Task& task);
  [[nodiscard]] at::Tensor answers(Asked asked) const;
  /// The room's tensors for a model.
  [[nodiscard]] std::vector<at::Tensor> laid(const Learner& learner) const;

  RankCrew& crew_;
  const CanKdConfig& config_;
  const Data& data_;
  Governor governor_;
  std::shared_ptr<RankRows> room_;  // Shared with tensors over it.
  Task task_{};                     // Of learner_.
  std::unique_ptr<Learner> learner_;
};

/// The run of a rank that is not the first, within with_crew(). Errors: of settling, of the set, of
/// Hands.
Result<void> lend_a_hand(RankCrew& crew, const CanKdConfig& config);

}  // namespace plimsoll::can_kd
