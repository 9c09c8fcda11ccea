// SPDX-License-Identifier: Apache-2.0
//
// Rehearsal and admission.
//
// Threads: the thread that trains.   Memory: see admission.h.
#include "recipes/admission.h"

#include <fmt/format.h>

#include <algorithm>
#include <vector>

#include "base/check.h"
#include "plan/step_peak.h"
#include "plimsoll/bytes.h"
#include "plimsoll/torch.h"
#include "torch/step_tracer.h"

namespace plimsoll {
namespace {

constexpr std::int64_t kLeastStep = 1 << 20;  // Limits are named in whole MiB.
constexpr std::int64_t kFitSlack = 4 << 20;   // Pages partly used, which smaller steps do not show.

Error refused(const Governor& governor, std::int64_t needed, const std::string& what) {
  const LedgerState state = governor.state();
  const std::int64_t available = left_for_tensors(state);
  const std::int64_t limit = smallest_limit(state.limit_bytes, available, needed);
  Error error = make_error(
      ErrorCode::kOverBudget,
      fmt::format("{} needs {} of tensors, and {} of the limit of {} is left for them; a limit of "
                  "{} MiB would do",
                  what, format_bytes(needed), format_bytes(available),
                  format_bytes(state.limit_bytes), limit >> 20),
      kAdmissionAdvice);
  error.tag = Tag::kTensor;
  error.requested_bytes = needed;
  error.available_bytes = available;
  error.limit_bytes = state.limit_bytes;
  error.smallest_limit_bytes = limit;
  for (std::size_t k = 0; k < kTagCount; ++k) {
    error.held_bytes[k] = std::max(state.pools[k].floor_bytes, state.pools[k].leased_bytes);
  }
  return error;
}

}  // namespace

Error refused_anew(const Governor& governor, const std::string& what, std::int64_t known_bytes) {
  const std::int64_t left = left_for_tensors(governor.state());
  return refused(governor, with_margin(left + std::max(left, known_bytes)) + kLeastStep, what);
}

Result<void> without_refusal(const std::function<Result<void>()>& work) {
  return without_refusal(work, kAdmissionAdvice);
}

Result<std::int64_t> measure_peak(const std::function<Result<void>()>& work) {
  TensorArena::purge();
  TensorArena::reset_peak();
  PLIMSOLL_TRY_VOID(without_refusal(work));
  return TensorArena::stats().leased_peak_bytes;
}

std::int64_t with_margin(std::int64_t peak_bytes) noexcept {
  return peak_bytes + peak_bytes / 16;
}

Result<std::int64_t> rehearse_step(const Governor& governor, std::int64_t rows, double pair_bytes,
                                   const std::function<Result<void>(std::int64_t)>& step,
                                   std::int64_t least_rows, std::int64_t known_bytes) {
  auto peak = measure_peak([&] { return step(rows); });
  if (peak || peak.error().code != ErrorCode::kOverBudget) {
    return peak;
  }
  std::vector<StepSample> samples;
  for (const std::int64_t part : {64, 32, 16, 8, 4, 2}) {
    const std::int64_t smaller = rows / part;
    if (smaller < least_rows || (!samples.empty() && samples.back().rows == smaller)) {
      continue;
    }
    auto measured = measure_peak([&] { return step(smaller); });
    if (!measured) {
      break;
    }
    samples.push_back({smaller, *measured});
    if (samples.size() > 3) {  // The largest three say most about the real size.
      samples.erase(samples.begin());
    }
  }
  TensorArena::purge();
  if (samples.empty()) {
    return tl::unexpected(
        refused_anew(governor, fmt::format("a step of {} rows", least_rows), known_bytes));
  }
  PLIMSOLL_TRY(const StepPeak curve, fit_step_peak(samples, pair_bytes));
  // The step itself was refused, so it needs more than what is left, whatever the curve says.
  const std::int64_t needed = std::max(with_margin(curve.bytes_at(rows)) + kFitSlack,
                                       left_for_tensors(governor.state()) + kLeastStep);
  return tl::unexpected(refused(governor, needed, fmt::format("a step of {} rows", rows)));
}

Result<void> admit_tensors(Governor& governor, std::int64_t floor_bytes, const std::string& what) {
  TensorArena::purge();
  const LedgerState state = governor.state();
  const std::int64_t now = state.pools[static_cast<std::size_t>(Tag::kTensor)].floor_bytes;
  if (floor_bytes <= now) {
    return {};
  }
  if (!governor.admit({.tag = Tag::kTensor, .floor_bytes = floor_bytes - now})) {
    return tl::unexpected(refused(governor, floor_bytes, what));
  }
  return {};
}

std::string larger_limit(const Governor& governor) {
  const std::int64_t limit = governor.state().limit_bytes;
  return fmt::format("resume with --memory-limit {}MiB", smallest_limit(limit, 0, limit / 8) >> 20);
}

}  // namespace plimsoll
