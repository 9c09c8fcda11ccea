// SPDX-License-Identifier: Apache-2.0
//
// What every run does around its steps, whatever it trains.
//
// Functions that may end a run return a Stop, or nothing: then it goes on.
// Reading order: control.h, limit_requests.h, run_report.h, this file, cosir.cpp.
//
// Threads: the thread that trains.   Memory: none.
#pragma once

#include <cstdint>
#include <functional>
#include <optional>
#include <string>

#include "plimsoll/governor.h"
#include "plimsoll/result.h"
#include "run/control.h"
#include "run/limit_requests.h"
#include "run/run_folder.h"
#include "run/stop.h"
#include "torch/run_report.h"

namespace plimsoll {

/// Does `work`, which becomes step number `step`: refused memory, once more after a purge. Refused
/// twice, nothing of it was applied and the run ends. Errors: of `work` other than refusals.
Result<std::optional<Stop>> try_step(const Governor& governor, RunReport& report, std::int64_t step,
                                     const std::function<Result<void>()>& work);

/// Writes down what became of changed limits.
Result<void> report_limits(LimitRequests& limits, RunReport& report, std::int64_t step);

/// Changed limits, signals and the files in the run's folder; waits here while paused, after
/// `save`.
Result<std::optional<Stop>> look_for_requests(RunControl& control, LimitRequests& limits,
                                              RunReport& report, std::int64_t step,
                                              const std::function<Result<void>()>& save);

/// "memory pressure", or which limit was asked for and cannot be kept.
[[nodiscard]] std::string pressure_in_words(const Governor& governor);

/// Leaves the folder of a run that ended with `error` as it should be: emptied when there is
/// nothing to resume, so that a new run may take it; else with the error in its status.
void leave_failed(RunFolder& folder, const Error& error);

}  // namespace plimsoll
