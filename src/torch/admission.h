// SPDX-License-Identifier: Apache-2.0
//
// What a step's tensors are promised: what was measured or predicted, and room above it.
//
// Reading order: plan/batch_plan.h, this file.
//
// Threads: pure functions.   Memory: none.
#pragma once

#include <cstdint>

#include "plan/batch_plan.h"

namespace plimsoll {

/// What a phase of the run needs, with room for what sizes rounded to pages may add: a sixteenth.
[[nodiscard]] std::int64_t with_margin(std::int64_t peak_bytes) noexcept;

/// The same for a peak under a limit that is not this one: where there is more room the arena
/// caches more.
[[nodiscard]] std::int64_t with_cache_and_margin(std::int64_t peak_bytes) noexcept;

/// The same for a step that was not done.
[[nodiscard]] std::int64_t to_admit(const StepPrediction& step) noexcept;

}  // namespace plimsoll
