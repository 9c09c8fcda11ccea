// SPDX-License-Identifier: Apache-2.0
//
// The recipe `can-kd`: graphs from CAN-bus traffic, teacher to student, inside a memory limit.
//
// Reading order: docs/recipes/can-kd.md, config.h (options), task.h, can_kd.cpp (the whole run).
//
// Threads: one run at a time per process.
// Memory:  within the limit; every task's step is rehearsed before the first one.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "plan/batch_plan.h"
#include "plan/device_choice.h"
#include "plimsoll/result.h"
#include "recipes/can_kd/config.h"
#include "run/plan_choice.h"
#include "run/stop.h"
#include "run/train_options.h"

namespace plimsoll {

class RankCrew;

/// A finished task's model.
struct CanKdModel {
  std::string name{};
  std::int64_t parameters{0};
  std::int64_t epochs{0};
  double held_out_loss{0.0};
};

/// What a run came to; its JSON form is the last line that `--json` prints.
struct CanKdSummary : RunEnd {
  std::vector<CanKdModel> models{};  ///< In the order of the tasks.
  double graphs_per_second{0.0};
  std::string evaluation_json{"{}"};  ///< docs/recipes/can-kd.md names its keys.
  std::string evaluation_text{};

  /// One line of JSON. Numbers that are not finite become null.
  [[nodiscard]] std::string to_json() const;
  /// The same for a reader.
  [[nodiscard]] std::string to_text() const;
};

/// Does the tasks that `stage` and `model_size` choose, those of the run that are not done yet; a
/// task that was interrupted is finished first.
///
/// Requires: settings resolved; MKL_CBWR set.
/// Errors: kOverBudget before the first step, naming the smallest limit that would do and the
///         options to change; kNotFound when a task needs the model of another that is not there,
///         naming the stage that makes it; those of the graph set. After an error the last
///         checkpoint is whole.
/// crew: nullptr, or the ranks that this one is the first of; the others lend_a_hand() (hands.h).
/// The limit is for all of them then, in equal shares.
Result<CanKdSummary> train_can_kd(const CanKdSettings& settings, const TrainOptions& options,
                                  RankCrew* crew = nullptr);

/// What a run's steps need; `plimsoll plan can-kd`.
struct CanKdPlan {
  std::int64_t batch_size_max{0};  ///< As the option.
  std::int64_t batch_size{0};      ///< The smallest of the tasks' batches, …
  std::string task{};              ///< … and whose it is.
  std::vector<std::pair<std::string, BatchPlan>> tasks{};
  std::int64_t limit_bytes{0};
  std::int64_t baseline_bytes{0};
  std::int64_t foreign_bytes{0};
  std::int64_t set_bytes{0};
  bool set_cached{false};  ///< The whole set is in memory.
  std::int64_t train_graphs{0};
  std::vector<PlanChoice> choices{};  ///< For `task`, the fastest first; empty unless weighed.

  /// One line of JSON.
  [[nodiscard]] std::string to_json() const;
  /// The same for a reader: a table.
  [[nodiscard]] std::string to_text() const;
};

/// The largest batch that every task of `stage` and `model_size` trains with inside the limit, as
/// batch_size = "auto" chooses it: small steps are traced, larger ones replayed, the answer run.
/// config().batch_size and out are not looked at; nothing is written. With `weigh_choices` the
/// tightest task is planned and timed with every choice of gradient_checkpointing, precision and,
/// for a student, offload_teacher_to_cpu; those that do not fit are left out. With a `device` every
/// step must fit it too (device_plan.h). With `effective_graphs` each choice is planned for so many
/// graphs an optimizer step: at once where that fits, else in the fewest micro-batches.
///
/// Requires: settings resolved; MKL_CBWR set.
/// Errors: kOverBudget when not even one graph fits, naming the task and the smallest limit that
///         would do, of the process or of the device; kInvalidArgument for a stage without steps;
///         those of the graph set and of open_device().
Result<CanKdPlan> plan_can_kd(const CanKdSettings& settings, bool weigh_choices = false,
                              const DeviceChoice& device = {}, std::int64_t effective_graphs = 0);

/// Evaluates a run's finished models, changing nothing in it. Returns a JSON object.
Result<RecipeReport> eval_can_kd(const CanKdSettings& settings);

/// describe_can_kd() and what it does; registry.h collects it.
Recipe can_kd_recipe();

}  // namespace plimsoll
