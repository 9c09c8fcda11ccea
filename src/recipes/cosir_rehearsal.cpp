// SPDX-License-Identifier: Apache-2.0
//
// Rehearsal and admission.
//
// Threads: the thread that trains.   Memory: see cosir_rehearsal.h.
#include "recipes/cosir_rehearsal.h"

#include <fmt/format.h>

#include <algorithm>
#include <memory>
#include <vector>

#include "base/check.h"
#include "plan/step_peak.h"
#include "plimsoll/bytes.h"
#include "plimsoll/torch.h"
#include "torch/step_tracer.h"

namespace plimsoll::cosir {
namespace {

constexpr const char* kAdvice =
    "raise --memory-limit, or lower batch_size, store_bytes, cache_bytes or queue_bytes";
constexpr std::int64_t kLeastRows = 2;             // The loss compares rows.
constexpr std::int64_t kLeastStep = 1 << 20;       // Limits are named in whole MiB.
constexpr std::int64_t kBaselineVaries = 8 << 20;  // From process to process.

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
      kAdvice);
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

// The refusal of something whose need is not known, only that it is above what is left: names a
// limit that leaves twice as much.
Error refused_anew(const Governor& governor, const std::string& what) {
  return refused(governor, with_margin(2 * left_for_tensors(governor.state())) + kLeastStep, what);
}

}  // namespace

Result<void> without_refusal(const std::function<Result<void>()>& work) {
  return plimsoll::without_refusal(work, kAdvice);
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
                                   const std::function<Result<void>(std::int64_t)>& step) {
  auto peak = measure_peak([&] { return step(rows); });
  if (peak || peak.error().code != ErrorCode::kOverBudget) {
    return peak;
  }
  std::vector<StepSample> samples;
  for (const std::int64_t part : {64, 32, 16, 8, 4, 2}) {
    const std::int64_t smaller = rows / part;
    if (smaller < kLeastRows || (!samples.empty() && samples.back().rows == smaller)) {
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
    return tl::unexpected(refused_anew(governor, fmt::format("a step of {} rows", kLeastRows)));
  }
  PLIMSOLL_TRY(const StepPeak curve, fit_step_peak(samples, pair_bytes));
  // The step itself was refused, so it needs more than what is left, whatever the curve says.
  const std::int64_t needed =
      std::max(with_margin(curve.bytes_at(rows)), left_for_tensors(governor.state()) + kLeastStep);
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

std::int64_t limit_to_resume(const Governor& governor, const DataShares& shares) {
  const LedgerState state = governor.state();
  const auto floor = [&](Tag tag) {
    return state.pools[static_cast<std::size_t>(tag)].floor_bytes;
  };
  const std::int64_t limit = state.baseline_bytes + floor(Tag::kForeign) +
                             shares.free_for(floor(Tag::kTensor)) + kBaselineVaries;
  return (limit + kLeastStep - 1) / kLeastStep * kLeastStep;
}

Error refused_before_start(const CosirConfig& config, std::int64_t baseline_bytes,
                           const DataShares* shares, Error error) {
  const auto guessed = shares_of(config);
  const auto needs = tensors_at_most(config);
  if (!guessed || !needs) {
    return error;
  }
  const bool measured = error.tag == Tag::kTensor && error.smallest_limit_bytes > 0;
  const std::int64_t tensors =
      std::max(measured ? error.requested_bytes : needs->step, needs->evaluation);
  const std::int64_t free = (shares != nullptr ? *shares : *guessed).free_for(tensors);
  const std::int64_t limit = std::max(
      smallest_limit(error.limit_bytes, 0, kLeastStep),
      smallest_limit(baseline_bytes + config.foreign_bytes + free + kBaselineVaries, 0, 0));
  std::string text = error.detail != nullptr ? *error.detail : error.to_string();
  if (const auto named = text.find("; a limit of "); named != std::string::npos) {
    text.resize(named);
  }
  error.detail = std::make_shared<const std::string>(
      fmt::format("{}; a limit of {} MiB would do", text, limit >> 20));
  error.advice = kAdvice;
  error.smallest_limit_bytes = limit;
  return error;
}

std::string admitted_table(const Governor& governor, std::int64_t step_peak,
                           std::int64_t batch_rows) {
  const LedgerState state = governor.state();
  std::string text = fmt::format("admitted under a limit of {}\n", governor.limit().explain());
  const auto line = [&text](const char* name, std::int64_t bytes, const std::string& note) {
    text += fmt::format("  {:<10}{:>12}   {}\n", name, format_bytes(bytes), note);
  };
  const auto promised = [&](Tag tag) {
    const PoolState& pool = state.pools[static_cast<std::size_t>(tag)];
    return std::max(pool.floor_bytes, pool.leased_bytes);
  };
  line("step", promised(Tag::kTensor),
       fmt::format("model, optimizer and a step of {} rows, rehearsed at {}", batch_rows,
                   format_bytes(step_peak)));
  line("store", promised(Tag::kEmbedding), "rows in memory (store_bytes)");
  line("features", promised(Tag::kFeature), "feature cache (cache_bytes)");
  line("ring", promised(Tag::kLoader), "batches ahead (queue_bytes)");
  line("foreign", promised(Tag::kForeign), "code and kernels' scratch (foreign_bytes)");
  if (promised(Tag::kOther) > 0) {
    line("other", promised(Tag::kOther), "split and buffers");
  }
  line("baseline", state.baseline_bytes, "the process before the run");
  line("headroom", state.free_bytes(), "free");
  text.pop_back();
  return text;
}

}  // namespace plimsoll::cosir
