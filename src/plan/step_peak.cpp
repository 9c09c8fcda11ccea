// SPDX-License-Identifier: Apache-2.0
//
// Newton's divided differences through at most three points.
//
// Threads: pure functions.   Memory: none.
#include "plan/step_peak.h"

#include <algorithm>
#include <array>
#include <cmath>

#include <fmt/format.h>

namespace plimsoll {
namespace {

constexpr std::int64_t kLimitStep = 1LL << 20;

double slope(const StepSample& x, const StepSample& y) {
  return static_cast<double>(y.peak_bytes - x.peak_bytes) / static_cast<double>(y.rows - x.rows);
}

// γ given, and the line through what it leaves of two samples; never falling.
StepPeak with_gamma(const StepSample& x, const StepSample& y, double gamma) {
  const double slope_left = slope(x, y) - gamma * static_cast<double>(x.rows + y.rows);
  const double beta = std::max(0.0, slope_left);
  const auto rows = static_cast<double>(y.rows);
  return {static_cast<double>(y.peak_bytes) - beta * rows - gamma * rows * rows, beta, gamma};
}

}  // namespace

std::int64_t StepPeak::bytes_at(std::int64_t rows) const noexcept {
  const auto b = static_cast<double>(rows);
  return static_cast<std::int64_t>(std::ceil(std::max(0.0, alpha + beta * b + gamma * b * b)));
}

Result<StepPeak> fit_step_peak(std::span<const StepSample> samples, double gamma_least) {
  if (samples.empty() || samples.size() > 3) {
    return fail(ErrorCode::kInvalidArgument,
                fmt::format("a step's peak is fitted through one to three samples, not {}",
                            samples.size()));
  }
  std::array<StepSample, 3> s{};
  std::copy(samples.begin(), samples.end(), s.begin());
  std::sort(s.begin(), s.begin() + static_cast<std::ptrdiff_t>(samples.size()),
            [](const StepSample& x, const StepSample& y) { return x.rows < y.rows; });
  for (std::size_t k = 1; k < samples.size(); ++k) {
    if (s[k].rows == s[k - 1].rows) {
      return fail(ErrorCode::kInvalidArgument,
                  fmt::format("two samples of a step of {} rows", s[k].rows));
    }
  }
  if (samples.size() == 1) {
    return with_gamma({0, s[0].peak_bytes}, s[0], gamma_least);
  }
  if (samples.size() == 2) {
    return with_gamma(s[0], s[1], gamma_least);
  }
  const double first = slope(s[0], s[1]);
  const double second = (slope(s[1], s[2]) - first) / static_cast<double>(s[2].rows - s[0].rows);
  if (second <= gamma_least) {
    return with_gamma(s[1], s[2], gamma_least);
  }
  // p(b) = y0 + first·(b − x0) + second·(b − x0)(b − x1).
  const auto x0 = static_cast<double>(s[0].rows);
  const auto x1 = static_cast<double>(s[1].rows);
  return StepPeak{static_cast<double>(s[0].peak_bytes) - first * x0 + second * x0 * x1,
                  first - second * (x0 + x1), second};
}

std::int64_t smallest_limit(std::int64_t limit_bytes, std::int64_t free_bytes,
                            std::int64_t tensor_bytes) noexcept {
  const std::int64_t needed = limit_bytes - free_bytes + tensor_bytes;
  return (needed + kLimitStep - 1) / kLimitStep * kLimitStep;
}

}  // namespace plimsoll
