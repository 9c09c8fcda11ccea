// SPDX-License-Identifier: Apache-2.0
//
// Rehearsal and admission.
//
// Threads: the thread that trains.   Memory: see admission.h.
#include "torch/admission.h"

#include <fmt/format.h>

#include <algorithm>
#include <memory>
#include <span>
#include <vector>

#include "base/check.h"
#include "plan/step_peak.h"
#include "plimsoll/bytes.h"
#include "plimsoll/torch.h"
#include "run/control.h"
#include "torch/arena_pages.h"
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

Error with_limit(Error error, std::int64_t limit_bytes) {
  std::string text = error.detail != nullptr ? *error.detail : error.to_string();
  for (const char* named : {"; a limit of ", ": this takes a limit of at least"}) {
    text.resize(std::min(text.size(), text.find(named)));
  }
  error.smallest_limit_bytes = smallest_limit(limit_bytes, 0, 0);
  error.detail = std::make_shared<const std::string>(
      fmt::format("{}; a limit of {} MiB would do", text, error.smallest_limit_bytes >> 20));
  error.advice = kAdmissionAdvice;
  return error;
}

Error refused_bytes(const Governor& governor, const std::string& what, std::int64_t needed_bytes) {
  const std::int64_t left = left_for_tensors(governor.state());
  return refused(governor, std::max(needed_bytes, left + kLeastStep), what);
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

std::int64_t with_cache_and_margin(std::int64_t peak_bytes) noexcept {
  return with_margin(arena_leased_bytes(peak_bytes));
}

std::int64_t to_admit(const StepPrediction& step) noexcept {
  return std::max(arena_leased_bytes(step.bound_bytes), with_cache_and_margin(step.peak.bytes));
}

namespace {

// Smaller steps, as many as fit: their traces, and their peaks for when the traces say nothing.
class SmallerSteps {
 public:
  SmallerSteps(const StepHints& hints, const DoStep& step) : hints_(hints), step_(step) {}

  // Errors: of the step, but for refusals, which end the ascent.
  Result<void> climb(std::int64_t rows) {
    std::int64_t last = 0;
    for (const std::int64_t parts : {64, 48, 32, 24, 16, 12, 8, 6, 4, 3, 2}) {
      const std::int64_t smaller = rows / parts;
      if (smaller < hints_.least_rows || smaller <= last) {
        continue;
      }
      last = smaller;
      const Result<void> done = look_at(smaller);
      if (!done && done.error().code == ErrorCode::kOverBudget) {
        break;
      }
      PLIMSOLL_TRY_VOID(done);
    }
    TensorArena::purge();
    return {};
  }

  // One size says nothing of others.
  [[nodiscard]] bool tells() const noexcept { return peaks_.size() >= 2; }

  [[nodiscard]] Result<std::int64_t> need(std::int64_t rows) const {
    const auto replayed = regions_.predict(size_of(rows));
    if (replayed && hints_.size_of) {
      return to_admit(*replayed);
    }
    // Two traces that are alike make lines of what is a parabola, and larger steps may be too long
    // to trace: the peaks of all sizes have their say too.
    PLIMSOLL_TRY(const std::int64_t fitted, fit(rows));
    return replayed ? std::max(to_admit(*replayed), fitted) : fitted;
  }

 private:
  [[nodiscard]] Result<std::int64_t> fit(std::int64_t rows) const {
    const std::size_t used = std::min<std::size_t>(3, peaks_.size());  // The largest say most.
    PLIMSOLL_TRY(const StepPeak curve,
                 fit_step_peak(std::span(peaks_).last(used), hints_.pair_bytes));
    const std::int64_t fitted = curve.bytes_at(rows);
    // Small steps hide below other peaks: a sixteenth of the way from the largest of them more.
    return with_margin(fitted) + std::max<std::int64_t>(0, fitted - peaks_.back().peak_bytes) / 16 +
           kFitSlack;
  }

  [[nodiscard]] StepSize size_of(std::int64_t rows) const {
    return hints_.size_of ? hints_.size_of(rows) : StepSize{rows, 0, 0};
  }

  Result<void> look_at(std::int64_t rows) {
    // Done once before it is traced: the first one of all makes what they all use.
    PLIMSOLL_TRY(const std::int64_t peak, measure_peak([&] { return step_(rows); }));
    peaks_.push_back({rows, peak});
    auto traced = trace_step(size_of(rows), [&] { return step_(rows); });
    if (traced) {
      return regions_.add(std::move(*traced));
    }
    // Too many events, or a trace that runs already: the peak is known all the same.
    return traced.error().code == ErrorCode::kInvalidArgument && !was_given_up(traced.error())
               ? Result<void>{}
               : tl::unexpected(std::move(traced).error());
  }

  const StepHints& hints_;
  const DoStep& step_;
  StepRegions regions_{&arena_block_bytes};
  std::vector<StepSample> peaks_;
};

}  // namespace

Result<std::int64_t> rehearse_step(const Governor& governor, std::int64_t rows,
                                   const StepHints& hints, const DoStep& step) {
  auto peak = measure_peak([&] { return step(rows); });
  if (peak || peak.error().code != ErrorCode::kOverBudget) {
    return peak;
  }
  SmallerSteps smaller(hints, step);
  PLIMSOLL_TRY_VOID(smaller.climb(rows));
  const std::int64_t left = left_for_tensors(governor.state());
  std::int64_t needed = 0;
  if (smaller.tells()) {
    PLIMSOLL_TRY(needed, smaller.need(rows));
  }
  // What was refused needs more than what is left: a lower answer is wrong, and counts for nothing.
  if (needed <= left && hints.estimate) {
    PLIMSOLL_TRY(needed, hints.estimate(rows));
  }
  needed = needed > left ? needed : 2 * left;
  return tl::unexpected(refused_bytes(governor, fmt::format("a step of {} rows", rows), needed));
}

Result<std::int64_t> Refusals::note(Result<std::int64_t> result, std::int64_t otherwise) {
  if (result || result.error().code != ErrorCode::kOverBudget) {
    return result;
  }
  if (!worst_ || worst_->smallest_limit_bytes < result.error().smallest_limit_bytes) {
    worst_ = std::move(result).error();
  }
  return otherwise;
}

Result<void> Refusals::note(const Result<void>& result) {
  if (result) {
    return {};
  }
  const auto noted = note(Result<std::int64_t>(tl::unexpected(result.error())));
  return noted ? Result<void>{} : result;
}

Result<void> Refusals::outcome() const {
  return worst_ ? tl::unexpected(*worst_) : Result<void>{};
}

Result<void> admit_tensors(Governor& governor, std::int64_t peak_bytes, const std::string& what) {
  const std::int64_t floor_bytes = with_margin(peak_bytes);
  TensorArena::purge();
  const LedgerState state = governor.state();
  const std::int64_t now = state.pools[static_cast<std::size_t>(Tag::kTensor)].floor_bytes;
  if (floor_bytes <= now) {
    return {};
  }
  if (!governor.admit({.tag = Tag::kTensor, .floor_bytes = floor_bytes - now})) {
    return tl::unexpected(refused(governor, with_cache_and_margin(peak_bytes), what));
  }
  return {};
}

std::string resume_with(std::int64_t limit_bytes, const WholeLimit& whole) {
  const std::int64_t limit = whole ? whole(limit_bytes) : limit_bytes;
  return fmt::format("resume with --memory-limit {}MiB", (limit + (1 << 20) - 1) >> 20);
}

std::string larger_limit(const Governor& governor, const WholeLimit& whole) {
  const std::int64_t limit = governor.state().limit_bytes;
  return resume_with(smallest_limit(limit, 0, limit / 8), whole);
}

}  // namespace plimsoll
