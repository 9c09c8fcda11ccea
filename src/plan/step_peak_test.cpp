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

TEST(StepPeakTest, ACurveThatBendsDownIsExtendedByItsLastLine) {
  const std::array<StepSample, 3> samples{StepSample{100, 1000}, StepSample{200, 1900},
                                          StepSample{400, 2900}};
  const auto peak = fit_step_peak(samples).or_throw();
  EXPECT_EQ(peak.gamma, 0.0);
  EXPECT_EQ(peak.bytes_at(400), 2900);
  EXPECT_EQ(peak.bytes_at(800), 4900);
}

TEST(StepPeakTest, KnownMatricesAreCountedThoughSmallBatchesHideThem) {
  // A step's measured peaks; the [B, B] matrix begins to rule between 600 and 1200 rows.
  // Source: plimsoll train cosir, features of 32 and 24, dim 256, at these batch sizes.
  const std::array<StepSample, 3> samples{StepSample{150, 4'386'816}, StepSample{300, 5'853'184},
                                          StepSample{600, 8'617'984}};
  constexpr std::int64_t kMeasured = 16'797'696;  // At 1200 rows.
  const std::int64_t blind = fit_step_peak(samples).or_throw().bytes_at(1200);
  const std::int64_t knowing = fit_step_peak(samples, 4.125).or_throw().bytes_at(1200);
  EXPECT_LT(blind, kMeasured * 9 / 10);
  EXPECT_GT(knowing + knowing / 16, kMeasured);
  EXPECT_LT(knowing, kMeasured * 11 / 10);
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
