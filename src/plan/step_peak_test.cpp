// SPDX-License-Identifier: Apache-2.0
#include "plan/step_peak.h"

#include <gtest/gtest.h>

#include <array>
#include <random>

namespace plimsoll {
namespace {

TEST(StepPeakTest, ReproducesAnyParabolaItIsGiven) {
  std::mt19937_64 random{7};
  for (int round = 0; round < 200; ++round) {
    const auto alpha = static_cast<std::int64_t>(random() % 100'000'000);
    const auto beta = static_cast<std::int64_t>(random() % 100'000);
    const auto gamma = static_cast<std::int64_t>(random() % 64);
    const auto at = [&](std::int64_t b) { return alpha + beta * b + gamma * b * b; };
    const std::array<StepSample, 3> samples{StepSample{1024, at(1024)}, StepSample{256, at(256)},
                                            StepSample{512, at(512)}};
    const auto peak = fit_step_peak(samples).or_throw();
    for (const std::int64_t b : {1, 256, 2048, 8192}) {
      EXPECT_NEAR(static_cast<double>(peak.bytes_at(b)), static_cast<double>(at(b)),
                  2.0 + 1e-9 * static_cast<double>(at(b)))
          << "round " << round << ", b " << b;
    }
  }
}

TEST(StepPeakTest, StaysAboveACurveThatBendsDown) {
  const std::array<StepSample, 3> samples{StepSample{100, 1000}, StepSample{200, 1900},
                                          StepSample{400, 2900}};
  const auto peak = fit_step_peak(samples).or_throw();
  EXPECT_EQ(peak.gamma, 0.0);
  for (const auto& [rows, bytes] : samples) {
    EXPECT_GE(peak.bytes_at(rows), bytes);
  }
  EXPECT_GE(peak.bytes_at(800), 4900);
}

TEST(StepPeakTest, FallsBackToALineAndAConstant) {
  const std::array<StepSample, 2> two{StepSample{10, 1000}, StepSample{20, 1500}};
  EXPECT_EQ(fit_step_peak(two).or_throw().bytes_at(40), 2500);
  const std::array<StepSample, 1> one{StepSample{10, 1000}};
  EXPECT_EQ(fit_step_peak(one).or_throw().bytes_at(40), 1000);
}

TEST(StepPeakTest, RefusesNoSamplesAndEqualSizes) {
  EXPECT_FALSE(fit_step_peak({}).has_value());
  const std::array<StepSample, 2> same{StepSample{10, 1000}, StepSample{10, 1500}};
  EXPECT_FALSE(fit_step_peak(same).has_value());
}

TEST(StepPeakTest, SmallestLimitIsWhatIsMissingRoundedUpToAMebibyte) {
  constexpr std::int64_t kMiB = 1 << 20;
  EXPECT_EQ(smallest_limit(100 * kMiB, 10 * kMiB, 30 * kMiB), 120 * kMiB);
  EXPECT_EQ(smallest_limit(100 * kMiB, 10 * kMiB, 30 * kMiB + 1), 121 * kMiB);
}

}  // namespace
}  // namespace plimsoll
