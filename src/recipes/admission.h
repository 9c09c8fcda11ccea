// SPDX-License-Identifier: Apache-2.0
//
// Admission of a training step: rehearse it for real, then ask for what it needed.
//
// Reading order: plan/step_peak.h, this file, cosir.cpp or can_kd/can_kd.cpp.
//
// Threads: the thread that trains.   Memory: that of the rehearsed step.
#pragma once

#include <cstdint>
#include <functional>
#include <string>

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

/// Rehearses a step of `rows` rows through `step(rows)` and returns its peak. When it is refused,
/// rehearses smaller ones, fits their peaks, and says what the real one would need. `pair_bytes` is
/// what the step is known to hold per pair of rows; no fewer than `least_rows` make a step;
/// `known_bytes` is what it surely holds whatever its rows (the model), for when not even that
/// fits. Errors: kOverBudget naming the smallest limit that would do and the options to change.
Result<std::int64_t> rehearse_step(const Governor& governor, std::int64_t rows, double pair_bytes,
                                   const std::function<Result<void>(std::int64_t)>& step,
                                   std::int64_t least_rows = 2, std::int64_t known_bytes = 0);

/// The refusal of something whose need is not known, only that it is above what is left, and what
/// of it is known: names a limit that leaves twice as much, or what is known and as much again as
/// is left now.
Error refused_anew(const Governor& governor, const std::string& what, std::int64_t known_bytes);

/// Promises the tensors' pool at least `floor_bytes` in all.
/// Errors: kOverBudget as rehearse_step(), `what` naming the phase: "a step of 2048 rows".
Result<void> admit_tensors(Governor& governor, std::int64_t floor_bytes, const std::string& what);

/// "resume with --memory-limit 864MiB": an eighth more than now, for a refusal that no rehearsal
/// foresaw.
std::string larger_limit(const Governor& governor);

}  // namespace plimsoll
