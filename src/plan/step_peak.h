// SPDX-License-Identifier: Apache-2.0
//
// StepPeak: the peak of a training step as a function of its batch, from a few measured steps.
//
// An in-batch loss holds [B, B] matrices, so the peak is α + β·b + γ·b². Fitted through three
// rehearsed sizes, it says what a limit that refused the real size would have had to be.
// Reading order: this file, step_peak.cpp; torch/admission.h uses it.
//
// Threads: pure functions.   Memory: none.
#pragma once

#include <cstdint>
#include <span>

#include "plimsoll/result.h"

namespace plimsoll {

/// One rehearsed step: its rows, and the peak of what it held, in bytes.
struct StepSample {
  std::int64_t rows{0};
  std::int64_t peak_bytes{0};
};

/// α + β·b + γ·b², in bytes.
struct StepPeak {
  double alpha{0.0};
  double beta{0.0};
  double gamma{0.0};

  /// Rounded up to a byte; never below what a negative coefficient would make of a larger batch.
  [[nodiscard]] std::int64_t bytes_at(std::int64_t rows) const noexcept;
};

/// Fits a parabola through three samples, a line through two, a constant through one.
///
/// `gamma_least` is what the step is known to hold per pair of rows, in bytes: in small batches the
/// matrices it pays for hide below other peaks and the rounding of allocations. A curve that bends
/// less than that gets this γ, and the line that the two largest samples leave.
/// Requires: samples of different sizes; gamma_least >= 0.
/// Errors: kInvalidArgument for none, or for two of one size.
Result<StepPeak> fit_step_peak(std::span<const StepSample> samples, double gamma_least = 0.0);

/// The smallest limit under which `tensor_bytes` would be admitted beside what is admitted now:
/// rounded up to 1 MiB. `free_bytes` is what the present limit still has.
[[nodiscard]] std::int64_t smallest_limit(std::int64_t limit_bytes, std::int64_t free_bytes,
                                          std::int64_t tensor_bytes) noexcept;

}  // namespace plimsoll
