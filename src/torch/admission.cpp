// SPDX-License-Identifier: Apache-2.0
#include "torch/admission.h"

#include <algorithm>

#include "torch/arena_pages.h"

namespace plimsoll {

std::int64_t with_margin(std::int64_t peak_bytes) noexcept {
  return peak_bytes + peak_bytes / 16;
}

std::int64_t with_cache_and_margin(std::int64_t peak_bytes) noexcept {
  return with_margin(arena_leased_bytes(peak_bytes));
}

std::int64_t to_admit(const StepPrediction& step) noexcept {
  return std::max(arena_leased_bytes(step.bound_bytes), with_cache_and_margin(step.peak.bytes));
}

}  // namespace plimsoll
