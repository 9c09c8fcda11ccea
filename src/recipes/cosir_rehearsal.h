// SPDX-License-Identifier: Apache-2.0
//
// Admission of a training step: rehearse it for real, then ask for what it needed.
//
// Reading order: plan/step_peak.h, this file, cosir.cpp.
//
// Threads: the thread that trains.   Memory: that of the rehearsed step.
#pragma once

#include <cstdint>
#include <functional>
#include <string>

#include "plimsoll/governor.h"
#include "plimsoll/result.h"
#include "recipes/cosir_data.h"

namespace plimsoll::cosir {

/// Runs `work`; a refusal inside torch becomes a kOverBudget Error with its text.
Result<void> without_refusal(const std::function<Result<void>()>& work);

/// Runs `work` and returns the highest number of bytes the arena had leased meanwhile, parameters
/// included. Errors: of `work`; kOverBudget when torch was refused.
Result<std::int64_t> measure_peak(const std::function<Result<void>()>& work);

/// What a phase of the run needs, with room for what sizes rounded to pages may add: a sixteenth.
[[nodiscard]] std::int64_t with_margin(std::int64_t peak_bytes) noexcept;

/// Rehearses a step of `rows` rows through `step(rows)` and returns its peak. When it is refused,
/// rehearses smaller ones, fits their peaks, and says what the real one would need. `pair_bytes` is
/// what the step is known to hold per pair of rows.
/// Errors: kOverBudget naming the smallest limit that would do and the options to change.
Result<std::int64_t> rehearse_step(const Governor& governor, std::int64_t rows, double pair_bytes,
                                   const std::function<Result<void>(std::int64_t)>& step);

/// Promises the tensors' pool at least `floor_bytes` in all.
/// Errors: kOverBudget as rehearse_step(), `what` naming the phase: "a step of 2048 rows".
Result<void> admit_tensors(Governor& governor, std::int64_t floor_bytes, const std::string& what);

/// "resume with --memory-limit 864MiB": an eighth more than now, for a refusal that no rehearsal
/// foresaw.
std::string larger_limit(const Governor& governor);

/// The refusal of a run before its first step, with a limit under which it begins: tensors as
/// `error` says where a rehearsed step was refused, otherwise as tensors_at_most() does, beside all
/// parts (`shares`; nullptr while nothing is open). `baseline_bytes`: the process before the run.
Error refused_before_start(const CosirConfig& config, std::int64_t baseline_bytes,
                           const DataShares* shares, Error error);

/// The limit, in bytes, with which a run as this one, opened anew, has room for its tensors: what
/// they were promised, and `shares` of the rest.
std::int64_t limit_to_resume(const Governor& governor, const DataShares& shares);

/// The table printed before the first step: limit, baseline, and each part's promise and share.
std::string admitted_table(const Governor& governor, std::int64_t step_peak,
                           std::int64_t batch_rows);

}  // namespace plimsoll::cosir
