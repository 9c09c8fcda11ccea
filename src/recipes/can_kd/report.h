// SPDX-License-Identifier: Apache-2.0
//
// What a can-kd run tells beside what every run does: tasks, steps, epochs.
//
// Reading order: run_report.h, work.h, this file.
//
// Threads: single-owner.   Memory: fixed.
#pragma once

#include <cstdint>
#include <string>

#include "recipes/can_kd/config.h"
#include "recipes/can_kd/task.h"
#include "recipes/can_kd/work.h"
#include "torch/run_report.h"

namespace plimsoll::can_kd {

class Report : public RunReport {
 public:
  Report(RunFolder* folder, Metrics metrics, const ProgressOptions& progress,
         const CanKdConfig& config, Governor governor);

  /// A task begins or goes on: names it in events and on the terminal.
  Result<void> begin_task(const Task& task, std::int64_t step, const Work& work, bool resumed);
  Result<void> end_task(const Task& task, std::int64_t step, const Work& work);

  /// One line in events.jsonl per step; metrics and status at their own pace.
  Result<void> step(const Task& task, std::int64_t step, const StepNews& news);
  Result<void> epoch(const Task& task, std::int64_t step, const EpochNews& news);

 private:
  std::int64_t log_every_{50};
};

}  // namespace plimsoll::can_kd
