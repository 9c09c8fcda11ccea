// SPDX-License-Identifier: Apache-2.0
//
// Threads: the thread that trains.   Memory: none.
#include "torch/run_loop.h"

#include <fmt/format.h>

#include "base/check.h"
#include "plimsoll/bytes.h"
#include "plimsoll/torch.h"
#include "torch/admission.h"

namespace plimsoll {

Result<std::optional<Stop>> try_step(const Governor& governor, RunReport& report, std::int64_t step,
                                     const std::function<Result<void>()>& work) {
  for (const bool again : {false, true}) {
    const auto done = without_refusal(work);
    if (done) {
      return std::optional<Stop>{};
    }
    if (done.error().code != ErrorCode::kOverBudget) {
      return tl::unexpected(done.error());
    }
    PLIMSOLL_TRY_VOID(report.refusal(step, done.error(), again));
    if (!again) {
      TensorArena::purge();  // The only move there is inside a step; then the same step again.
    }
  }
  return Stop{Stop::Cause::kMemory,
              fmt::format("memory refused twice in step {}; {}", step, larger_limit(governor))};
}

Result<void> report_limits(LimitRequests& limits, RunReport& report, std::int64_t step) {
  for (const LimitOutcome& outcome : limits.take()) {
    PLIMSOLL_TRY_VOID(report.limit(step, outcome));
  }
  return {};
}

Result<std::optional<Stop>> look_for_requests(RunControl& control, LimitRequests& limits,
                                              RunReport& report, std::int64_t step,
                                              const std::function<Result<void>()>& save) {
  PLIMSOLL_TRY_VOID(report_limits(limits, report, step));
  Request request = control.poll();
  if (request == Request::kPause) {
    const RunReport::Aside aside{report};
    PLIMSOLL_TRY_VOID(save());
    Result<void> told{};
    request = control.wait_while_paused([&] {
      told = report_limits(limits, report, step);
      told = told ? report.phase("paused") : told;
    });
    PLIMSOLL_TRY_VOID(told);
  }
  return request == Request::kStop ? std::optional(Stop{Stop::Cause::kAsked, control.reason()})
                                   : std::nullopt;
}

std::string pressure_in_words(const Governor& governor) {
  const LedgerState ledger = governor.state();
  return ledger.asked_bytes < ledger.limit_bytes
             ? fmt::format("memory limit: {} is asked for, and {} cannot be given up",
                           format_bytes(ledger.asked_bytes), format_bytes(ledger.limit_bytes))
             : std::string("memory pressure");
}

void leave_failed(RunFolder& folder, const Error& error) {
  if (const auto saved = folder.published_step(); saved && !saved->has_value()) {
    folder.abandon();
  }
  if (RunFolder::is_run(folder.root())) {
    RunStatus status;
    status.status = "failed";
    status.message = error.to_string();
    static_cast<void>(folder.write_status(status, /*force=*/true));
  }
}

}  // namespace plimsoll
