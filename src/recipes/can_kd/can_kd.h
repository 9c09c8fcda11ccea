// SPDX-License-Identifier: Apache-2.0
//
// The recipe `can-kd`: graphs from CAN-bus traffic, teacher to student, inside a memory limit.
//
// Reading order: docs/recipes/can-kd.md, config.h (options), this file.
//
// Threads: one run at a time per process.
// Memory:  within the limit.
#pragma once

#include <string>

#include "plimsoll/result.h"
#include "recipes/can_kd/config.h"
#include "recipes/train_options.h"

namespace plimsoll {

/// What a run came to; its JSON form is the last line that `--json` prints.
struct CanKdSummary {
  [[nodiscard]] std::string to_json() const;
  [[nodiscard]] std::string to_text() const;
};

/// Does the tasks that `stage` and `model_size` choose, those that are not done yet.
Result<CanKdSummary> train_can_kd(const CanKdSettings& settings, const TrainOptions& options);

/// Evaluates a run's models on the test files, changing nothing in it. Returns a JSON object.
Result<std::string> eval_can_kd(const CanKdSettings& settings);

}  // namespace plimsoll
