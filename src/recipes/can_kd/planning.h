// SPDX-License-Identifier: Apache-2.0
//
// What the tasks of a run need: their work made untrained, to be rehearsed, and the largest batch
// that a step of each fits with, its teacher included (K5).
//
// Reading order: plan/batch_plan.h, training.h, this file.
//
// Threads: the thread that trains.
// Memory:  one task's model, teacher and step at a time; that of plan/batch_plan.h.
#pragma once

#include <filesystem>
#include <memory>
#include <vector>

#include "plan/batch_plan.h"
#include "plimsoll/governor.h"
#include "plimsoll/result.h"
#include "recipes/can_kd/config.h"
#include "recipes/can_kd/data.h"
#include "recipes/can_kd/task.h"
#include "recipes/can_kd/teacher.h"
#include "recipes/can_kd/training.h"
#include "torch/device_backend.h"

namespace plimsoll::can_kd {

/// Steps that an epoch has at least with a batch that "auto" chooses.
inline constexpr std::int64_t kAutoStepsMin = 32;

/// A governor for a run with these options, and its data. A limit below what either takes is told
/// together with what the tasks need at most. Errors: those of plimsoll::settle(); of Data::open().
Result<Governor> settle(const CanKdConfig& config, const std::filesystem::path& directory);
Result<std::unique_ptr<Data>> open_data(const Governor& governor, const CanKdConfig& config);

/// The refusal of a run that does not even open, with a limit under which it begins: estimated.
/// `baseline_bytes`: the process before the run.
Error refused_before_start(const CanKdConfig& config, std::int64_t baseline_bytes, Error error);

/// The refusal of a step, the limit it names raised by the set where that would then stay in memory
/// (cache_bytes = -1).
Error beside_the_set(const Governor& governor, const CanKdConfig& config, const Data& data,
                     Error error);

/// A task's work, and the teacher it asks, both untrained.
struct Rehearsal {
  std::unique_ptr<Teacher> teacher{};
  std::unique_ptr<Training> work{};
};

/// Whether a task has steps whose memory is rehearsed. Fusion and evaluation answer as validation
/// does, and need less than the tasks before them.
[[nodiscard]] bool has_rehearsal(const Task& task) noexcept;

/// As large as the real ones. Requires: has_rehearsal(task).
Result<Rehearsal> prepare_rehearsal(const Governor& governor, const CanKdConfig& config,
                                    const Data& data, const Task& task);

/// The peak of the task's largest step of so many graphs, its validation included.
/// Errors: as rehearse_step() and prepare_rehearsal().
Result<std::int64_t> rehearse_task(const Governor& governor, const CanKdConfig& config,
                                   const Data& data, const Task& task, std::int64_t graphs);

struct TaskPlan {
  Task task{};
  BatchPlan batch{};
};

/// The plan of one task; `timed`: its step_seconds is the fastest of three training steps without
/// validation, which are run for it; `device`: what it must fit too (device_plan.h), or nullptr;
/// `most_graphs`: of the answer, 0: as batch_size_max and kAutoStepsMin say. Errors: as
/// plan_tasks().
Result<TaskPlan> plan_task(const Governor& governor, const CanKdConfig& config, const Data& data,
                           const Task& task, bool timed, const DeviceBackend* device = nullptr,
                           std::int64_t most_graphs = 0);

/// A plan for each task of wanted_tasks() with a rehearsal, in their order.
/// Errors: kOverBudget naming the task and the smallest limit that would do.
Result<std::vector<TaskPlan>> plan_tasks(const Governor& governor, const CanKdConfig& config,
                                         const Data& data, bool timed,
                                         const DeviceBackend* device = nullptr);

/// That of the smallest batch: it holds for every task. Requires: not empty.
[[nodiscard]] const TaskPlan& tightest(const std::vector<TaskPlan>& plans);

}  // namespace plimsoll::can_kd
