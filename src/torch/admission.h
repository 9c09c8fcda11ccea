// SPDX-License-Identifier: Apache-2.0
//
// Admission of a training step: rehearse it for real, then ask for what it needed.
//
// Reading order: plan/batch_plan.h, plan/step_peak.h, this file, cosir.cpp or can_kd/can_kd.cpp.
//
// Threads: the thread that trains.
// Memory:  that of the rehearsed step; after a refusal also eleven traces (plan/batch_plan.h).
#pragma once

#include <cstdint>
#include <functional>
#include <optional>
#include <string>

#include "plan/batch_plan.h"
#include "plan/step_trace.h"
#include "plimsoll/governor.h"
#include "plimsoll/result.h"

namespace plimsoll {

/// What to change when a run is refused memory.
inline constexpr const char* kAdmissionAdvice =
    "raise --memory-limit, or lower batch_size or cache_bytes (of cosir also store_bytes, "
    "queue_bytes)";

/// Runs `work`; a refusal inside torch becomes a kOverBudget Error with its text.
Result<void> without_refusal(const std::function<Result<void>()>& work);

/// Runs `work` and returns the highest number of bytes the arena had leased meanwhile, parameters
/// included. Errors: of `work`; kOverBudget when torch was refused.
Result<std::int64_t> measure_peak(const std::function<Result<void>()>& work);

/// What a phase of the run needs, with room for what sizes rounded to pages may add: a sixteenth.
[[nodiscard]] std::int64_t with_margin(std::int64_t peak_bytes) noexcept;

/// The same for a peak under a limit that is not this one: where there is more room the arena
/// caches more.
[[nodiscard]] std::int64_t with_cache_and_margin(std::int64_t peak_bytes) noexcept;

/// The same for a step that was not done.
[[nodiscard]] std::int64_t to_admit(const StepPrediction& step) noexcept;

/// What is known of a step before it is rehearsed, for when it does not fit.
struct StepHints {
  double pair_bytes{0.0};      ///< What it holds per pair of rows.
  std::int64_t least_rows{2};  ///< Fewer make no step.
  /// The size of a step of so many rows. None: rows alone.
  std::function<StepSize(std::int64_t)> size_of{};
  /// Bytes that a step of so many rows needs at most, for when smaller steps do not tell.
  /// None: twice what is left.
  std::function<Result<std::int64_t>(std::int64_t)> estimate{};
};

/// Does one whole step of so many rows.
using DoStep = std::function<Result<void>(std::int64_t)>;

/// Rehearses a step of `rows` rows and returns its peak. When it is refused, traces smaller ones,
/// replays them at the real size (plan/batch_plan.h), and says what that would need.
/// Errors: kOverBudget naming a limit that will do and the options to change.
Result<std::int64_t> rehearse_step(const Governor& governor, std::int64_t rows,
                                   const StepHints& hints, const DoStep& step);

/// The same refusal with another limit named as the one that would do.
Error with_limit(Error error, std::int64_t limit_bytes);

/// The refusal of `what`, which needs about `needed_bytes` of tensors, and more than what is left.
Error refused_bytes(const Governor& governor, const std::string& what, std::int64_t needed_bytes);

/// Several things that are admitted together: goes on after a refusal, so that the one limit which
/// is named at the end does for all of them.
class Refusals {
 public:
  /// The value of `result`, or `otherwise` after a refusal, which is remembered.
  /// Errors: those of `result` other than kOverBudget.
  Result<std::int64_t> note(Result<std::int64_t> result, std::int64_t otherwise = 0);
  Result<void> note(const Result<void>& result);
  /// Errors: the refusal that names the largest limit.
  Result<void> outcome() const;

 private:
  std::optional<Error> worst_;
};

/// Promises the tensors' pool what was rehearsed at `peak_bytes`, with its margin.
/// Errors: kOverBudget as rehearse_step(), `what` naming the phase: "a step of 2048 rows". Where
/// there is more room the arena caches more: the limit named is enough for that too.
Result<void> admit_tensors(Governor& governor, std::int64_t peak_bytes, const std::string& what);

/// Where processes share a limit: the one for all of them when each may hold so many bytes. Empty:
/// a process's limit is its own.
using WholeLimit = std::function<std::int64_t(std::int64_t)>;

/// "resume with --memory-limit 864MiB": the limit in whole MiB, rounded up.
std::string resume_with(std::int64_t limit_bytes, const WholeLimit& whole = {});

/// The same: an eighth more than now, for a refusal that no rehearsal
/// foresaw.
std::string larger_limit(const Governor& governor, const WholeLimit& whole = {});

}  // namespace plimsoll
