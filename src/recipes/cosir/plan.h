// SPDX-License-Identifier: Apache-2.0
//
// plan_cosir: the largest batch that a run of these options can train with inside its limit.
//
// Everything that grows with the batch is counted: the step and the evaluation (tensors), the
// loader's ring, the rows' buffers. Small steps are traced on real batches and replayed
// (plan/batch_plan.h); the answer's data is opened and its step and evaluation really run.
// Reading order: plan/batch_plan.h, torch/step_tracer.h, this file.
//
// Threads: one run at a time per process.   Memory: within the limit, as a run.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "plan/batch_plan.h"
#include "plan/device_choice.h"
#include "plimsoll/result.h"
#include "recipes/cosir/config.h"
#include "run/plan_choice.h"

namespace plimsoll {

/// An epoch has at least so many steps: a batch of everything is no training.
inline constexpr std::int64_t kAutoStepsMin = 32;
/// The largest batch that "auto" chooses.
inline constexpr std::int64_t kAutoRowsMax = 8192;

struct CosirPlan {
  BatchPlan batch{};
  std::int64_t limit_bytes{0};
  std::int64_t baseline_bytes{0};
  std::int64_t store_bytes{0};
  std::int64_t cache_bytes{0};
  std::int64_t queue_bytes{0};
  std::int64_t foreign_bytes{0};
  std::int64_t eval_peak_bytes{0};  ///< Of an evaluation's tensors at this size; 0: none held out.
  std::int64_t train_rows{0};
  std::vector<PlanChoice> choices{};  ///< The fastest first; empty unless weighed.

  /// One line of JSON.
  [[nodiscard]] std::string to_json() const;
  /// The same for a reader: a table.
  [[nodiscard]] std::string to_text() const;
};

/// Chooses among multiples of 16 up to kAutoRowsMax that leave kAutoStepsMin steps an epoch.
/// Data is opened in a folder of its own beside config().out, or in the current folder; it is
/// removed again. config().batch_size is not looked at. With `weigh_choices` both ways of
/// gradient_caching are planned and timed; one that does not fit is left out. With a `device` the
/// step must fit it too (device_plan.h); the evaluation is counted on the host alone.
///
/// Requires: settings resolved; MKL_CBWR set.
/// Errors: kOverBudget when not even two pairs fit, naming the smallest limit that would do, of the
/// process or of the device; those of train_cosir() and open_device().
Result<CosirPlan> plan_cosir(const CosirSettings& settings, bool weigh_choices = false,
                             const DeviceChoice& device = {});

}  // namespace plimsoll
