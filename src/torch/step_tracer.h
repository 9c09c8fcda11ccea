// SPDX-License-Identifier: Apache-2.0
//
// trace_step: runs a step twice and says, block by block, what the second one allocated.
//
// Every event carries the operator that was running, from torch's own record functions, and the
// phase: backward where autograd evaluates its nodes, optimizer inside "Optimizer.step…".
// Reading order: plan/step_trace.h, plan/batch_plan.h, this file.
//
// Threads: one trace at a time, on the thread that trains.
// Memory:  a ring of events (plan/trace_ring.h) and the names of operators, while it runs.
#pragma once

#include <functional>

#include "plan/batch_plan.h"
#include "plan/step_trace.h"
#include "plimsoll/governor.h"

namespace plimsoll {

/// Runs `step` two times; the second is what the trace tells. A refusal inside torch
/// (c10::OutOfMemoryError) becomes a kOverBudget Error with its text.
/// Requires: the arena is attached. Errors: of `step`; kInvalidArgument when nothing is attached,
/// or when another trace runs; trace_too_long() when the two have more events than `events_max`.
Result<StepTrace> trace_step(const StepSize& size, const std::function<Result<void>()>& step,
                             std::int64_t events_max = TraceRing::kEventsDefault);

/// plan_batch() over real steps in the arena: `step` runs one whole step of a size. What tensors
/// may have is what the governor's limit leaves for them, unless options.available_bytes says.
/// Errors: as plan_batch() and trace_step().
Result<BatchPlan> plan_batch(const Governor& governor, PlanOptions options,
                             const std::function<Result<void>(const StepSize&)>& step);

/// What a limit leaves for tensors: what is free, and what they hold or were promised already.
[[nodiscard]] std::int64_t left_for_tensors(const LedgerState& state) noexcept;

/// Runs `work`; a refusal inside torch becomes a kOverBudget Error with its text and `advice`.
Result<void> without_refusal(const std::function<Result<void>()>& work, const char* advice);

}  // namespace plimsoll
