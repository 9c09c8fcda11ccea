// SPDX-License-Identifier: Apache-2.0
//
// Goal: each course is told from the others, and a leak's slope is right, however long it is
// watched. Method: series that are computed, with noise from (seed, series, step).
#include "watch/trend.h"

#include <cmath>
#include <functional>
#include <vector>

#include <gtest/gtest.h>

#include "base/philox.h"
#include "plimsoll/bytes.h"

namespace plimsoll {
namespace {

using namespace literals;

constexpr std::uint64_t kSeed = 20;

// Uniform in (0, 1): the same for a series and a step.
double noise(std::uint64_t series, int step) {
  return static_cast<double>(uniform01(philox(kSeed, series, static_cast<std::uint64_t>(step))[0]));
}

Judged judged(int steps, const std::function<double(int)>& bytes, double each = 1) {
  Trend trend;
  for (int step = 0; step < steps; ++step) {
    trend.add(each * step, static_cast<std::int64_t>(bytes(step)));
  }
  return trend.judge();
}

constexpr double kBase = 300e6;

TEST(TheilSen, IsTheMedianOfAllSlopesWithSensBounds) {
  // Slopes, sorted: 1 1 1.5 2 2 2 7/3 2.5 2.5 4; of 10, Sen's bounds for 5 points are the ends.
  const std::vector<Point> points{{0, 0}, {1, 2}, {2, 3}, {3, 7}, {4, 8}};
  const Slope slope = theil_sen(points);
  EXPECT_DOUBLE_EQ(slope.median, 2);
  EXPECT_DOUBLE_EQ(slope.lower, 1);
  EXPECT_DOUBLE_EQ(slope.upper, 4);
}

TEST(TheilSen, ManyPointsNarrowTheBoundsAndOneOutlierMovesNothing) {
  std::vector<Point> points;
  points.reserve(100);
  for (int i = 0; i < 100; ++i) {
    points.push_back({static_cast<double>(i), 3.0 * i + 10 * noise(1, i)});
  }
  const Slope slope = theil_sen(points);
  EXPECT_NEAR(slope.median, 3, 0.05);
  EXPECT_LT(slope.lower, slope.median);
  EXPECT_GT(slope.upper, slope.median);
  EXPECT_LT(slope.upper - slope.lower, 0.1);
  points[50].bytes = 1e9;
  EXPECT_NEAR(theil_sen(points).median, slope.median, 0.01);
}

TEST(M2Trend, ATrueLeakHasItsSlope) {
  for (const double slope : {20e3, 200e3, 5e6}) {
    const Judged leak =
        judged(900, [&](int step) { return kBase + slope * step + 3e6 * noise(2, step); });
    EXPECT_EQ(leak.course, Course::kLeak) << slope;
    EXPECT_NEAR(leak.slope, slope, 0.05 * slope + 2e3);
    EXPECT_LE(leak.slope_lower, leak.slope);
  }
}

TEST(M2Trend, ARampToAPlateauIsAWarmUp) {
  const auto ramp = [](int to) {
    return judged(
        300, [to](int step) { return kBase + 2e6 * std::min(step, to) + 1e6 * noise(3, step); });
  };
  EXPECT_EQ(ramp(10).course, Course::kWarmUp);
  EXPECT_NEAR(static_cast<double>(ramp(10).grown_bytes), 20e6, 1e6);
  EXPECT_EQ(ramp(40).course, Course::kWarmUp);
  EXPECT_NE(ramp(70).course, Course::kLeak);  // Into the second quarter.
  EXPECT_NE(ramp(150).course, Course::kLeak);
}

TEST(M2Trend, ASawtoothIsNoLeak) {
  for (const int period : {10, 30, 60}) {
    const Judged saw = judged(600, [&](int step) { return kBase + 1e6 * (step % period); });
    EXPECT_NE(saw.course, Course::kLeak) << period;
  }
  EXPECT_EQ(judged(600, [](int step) { return kBase + 1e6 * (step % 10); }).course,
            Course::kSawtooth);
}

TEST(M2Trend, SpikesOfACollectorAreNoLeak) {
  const Judged spikes = judged(300, [](int step) {
    return kBase + (noise(4, step) < 0.2 ? 80e6 * noise(5, step) : 0) + 1e5 * noise(6, step);
  });
  EXPECT_NE(spikes.course, Course::kLeak);
}

TEST(Trend, WhatSlowsDownSaturatesAndItsBoundIsSaid) {
  const Judged cache =
      judged(600, [](int step) { return kBase + 100e6 * (1 - std::exp(-step / 120.0)); });
  EXPECT_EQ(cache.course, Course::kSaturating);
  EXPECT_NEAR(static_cast<double>(cache.bound_bytes), kBase + 100e6, 3e6);
}

TEST(Trend, OneRiseIsAStep) {
  const Judged step =
      judged(300, [](int at) { return kBase + (at >= 150 ? 80e6 : 0) + 1e5 * noise(7, at); });
  EXPECT_EQ(step.course, Course::kStep);
  EXPECT_NEAR(static_cast<double>(step.grown_bytes), 80e6, 1e6);
}

TEST(Trend, NoiseAndTinyGrowthAreAPlateau) {
  EXPECT_EQ(judged(300, [](int step) { return kBase + 2e6 * noise(8, step); }).course,
            Course::kPlateau);
  EXPECT_EQ(judged(300, [](int step) { return kBase + 32.0 * step; }).course, Course::kPlateau);
  EXPECT_EQ(judged(300, [](int step) { return kBase - 1e5 * step; }).course, Course::kPlateau);
}

TEST(Trend, AFewStepsSayNothing) {
  EXPECT_EQ(Trend().judge().course, Course::kTooShort);
  EXPECT_EQ(judged(175, [](int step) { return kBase + 1e6 * step; }).course, Course::kTooShort);
  EXPECT_EQ(judged(180, [](int step) { return kBase + 1e6 * step; }).course, Course::kLeak);
}

// A day at one look a second: the windows grow longer, and their number does not.
TEST(Trend, IsBoundedHoweverLongItIsWatched) {
  Trend trend;
  for (int step = 0; step < 86'400; ++step) {
    trend.add(step, static_cast<std::int64_t>(kBase + 20e3 * step + 3e6 * noise(9, step)));
    ASSERT_LT(trend.windows(), Trend::kWindowsMost);
  }
  EXPECT_GE(trend.windows(), Trend::kWindowsMost / 2 - 1);
  EXPECT_DOUBLE_EQ(trend.width(), 25 * 32);
  const Judged leak = trend.judge();
  EXPECT_EQ(leak.course, Course::kLeak);
  EXPECT_NEAR(leak.slope, 20e3, 500);
}

TEST(Trend, ALeakThatBeginsAfterALongPlateauIsFound) {
  const auto late = [](int step) { return kBase + 200e3 * std::max(0, step - 5000); };
  EXPECT_NE(judged(5000, late).course, Course::kLeak);
  const Judged leak = judged(6400, late);
  EXPECT_EQ(leak.course, Course::kLeak);
  EXPECT_NEAR(leak.slope, 200e3, 20e3);
}

// Whenever it is loaded, and however unevenly the looks fall: neither half is steeper for it.
TEST(Trend, ALeakBesideWhatIsLoadedOnceIsALeak) {
  for (int loaded = 40; loaded <= 240; loaded += 5) {
    Trend trend;
    const auto series = static_cast<std::uint64_t>(loaded);
    for (int step = 0; step < 256; step += 1 + static_cast<int>(20 * noise(series, step))) {
      const double table = step < loaded ? 0 : 25e6;
      trend.add(step, static_cast<std::int64_t>(kBase + 300e3 * step + table));
    }
    const Judged leak = trend.judge();
    EXPECT_EQ(leak.course, Course::kLeak) << loaded << ": " << course_name(leak.course);
    EXPECT_NEAR(leak.slope, 300e3, 30e3) << loaded;
  }
}

TEST(Trend, ACacheThatFillsBesideWhatIsLoadedOnceIsNoLeak) {
  for (int loaded = 40; loaded <= 390; loaded += 10) {
    const Judged cache = judged(400, [&](int step) {
      return kBase + 60e6 * (1 - std::exp(-step / 80.0)) + (step < loaded ? 0 : 40e6);
    });
    EXPECT_NE(cache.course, Course::kLeak) << loaded;
    if (cache.course == Course::kSaturating && loaded <= 340) {     // In windows that are over.
      EXPECT_GT(cache.bound_bytes, kBase + 40e6 + 50e6) << loaded;  // What was loaded stays.
    }
  }
}

// Longer than its windows, an epoch's ramp is a leak until it ends; not in the epochs that follow.
TEST(Trend, TheSameRampAgainIsNoLeak) {
  for (int end = 2500; end <= 6000; end += 100) {
    EXPECT_NE(judged(end, [](int step) { return kBase + 100e3 * (step % 2000); }).course,
              Course::kLeak)
        << end;
  }
}

// Thirty samples at 2 s are 60 s, not 30: a rate is per unit of time, whatever the interval.
TEST(M3Trend, RatesDoNotDependOnTheInterval) {
  for (const double every : {0.5, 1.0, 2.0, 10.0}) {
    const Judged leak = judged(
        400, [&](int look) { return kBase + 200e3 * every * look; }, every);
    EXPECT_EQ(leak.course, Course::kLeak) << every;
    EXPECT_NEAR(leak.slope, 200e3, 1) << every;
  }
}

// Of 2,000 series, how many are called a leak.
int leaks_of(double slope, double jumps, int steps = 300) {
  int leaks = 0;
  for (std::uint64_t series = 100; series < 2100; ++series) {
    const Judged chance = judged(
        steps, [&](int step) { return kBase + slope * step + jumps * noise(series, step / 25); });
    leaks += chance.course == Course::kLeak ? 1 : 0;
  }
  return leaks;
}

// Levels that jump about with every window rise by chance now and then.
TEST(Trend, ChanceIsSeldomALeak) {
  EXPECT_LE(leaks_of(0, 50e6), 10);
  EXPECT_LE(leaks_of(Trend::kLeastSlope * 1.1, 300e3), 400);  // By its median, 788.
  EXPECT_GE(leaks_of(Trend::kLeastSlope * 4, 300e3, 900), 1900);
  EXPECT_GE(leaks_of(2 * Trend::kSoonSlope, 3e6), 1900);
}

// Caches of all kinds: what is put in is drawn from so many, or each once until all are there.
TEST(S50Trend, ACacheThatFillsSlowlyIsNoLeak) {
  for (const double each : {12e3, 45e3, 90e3, 400e3, 4e6}) {
    for (const int of : {60, 120, 200, 300, 450}) {
      for (const int steps : {300, 900}) {
        const Judged drawn = judged(steps, [&](int step) {
          return kBase + each * of * (1 - std::exp(-step / static_cast<double>(of))) +
                 0.5 * each * noise(11, step);
        });
        EXPECT_NE(drawn.course, Course::kLeak) << each << " drawn from " << of << ", " << steps;
      }
    }
  }
  for (const double each : {12e3, 45e3}) {
    for (const int of : {60, 150, 250, 290, 320}) {
      for (const int steps : {300, 900}) {
        const Judged full = judged(steps, [&](int step) {
          return kBase + each * std::min(step, of) + 2e4 * noise(12, step);
        });
        EXPECT_NE(full.course, Course::kLeak) << each << " until " << of << ", " << steps;
      }
    }
  }
}

TEST(S50Trend, GrowthLikeASquareRootFades) {
  for (const int steps : {300, 900, 5000}) {
    EXPECT_NE(judged(steps, [](int step) { return kBase + 2e6 * std::sqrt(step); }).course,
              Course::kLeak)
        << steps;
  }
}

// Where it stopped, before the windows that show it are many: nobody says leak any more.
TEST(S50Trend, WhatStandsStillAtItsEndIsToldLater) {
  const auto until = [](int of) {
    return [of](int step) { return kBase + 300e3 * std::min(step, of); };
  };
  EXPECT_EQ(judged(300, until(300)).course, Course::kLeak);
  EXPECT_NE(judged(300, until(200)).course, Course::kLeak);
  EXPECT_NE(judged(900, until(200)).course, Course::kLeak);
  const auto stairs = [](int step) {  // It stands still between two evaluations.
    const int evaluations = step / 75;
    return kBase + 10e6 * evaluations;
  };
  EXPECT_EQ(judged(300, stairs).course, Course::kLeak);
}

// The slower it is, the longer: as many bytes as the quick one comes to in the least windows.
TEST(S50Trend, ASlowLeakIsToldAfterMoreSteps) {
  const auto steps_until = [](double slope) {
    for (int steps = 175; steps < 2000; steps += 25) {
      const Judged slow = judged(
          steps + 1, [&](int step) { return kBase + slope * step + 10 * slope * noise(13, step); });
      if (slow.course == Course::kLeak) {
        return steps;
      }
      EXPECT_EQ(slow.course, Course::kTooShort) << slope << " at " << steps;
      EXPECT_GT(slow.windows_wanted, static_cast<std::size_t>(steps / 25)) << slope;
    }
    return 2000;
  };
  EXPECT_EQ(steps_until(400e3), 175);
  EXPECT_EQ(steps_until(105e3), 175);
  EXPECT_EQ(steps_until(52e3), 325);
  EXPECT_EQ(steps_until(8e3), 650);
}

// A leak beside a cache that fills at first is one.
TEST(S50Trend, ALeakBesideACacheThatIsFullIsALeak) {
  for (const double cache : {5e6, 20e6}) {
    const auto both = [&](int step) {
      return kBase + 300e3 * step + cache * (1 - std::exp(-step / 40.0)) + 1e5 * noise(14, step);
    };
    EXPECT_EQ(judged(400, both).course, Course::kLeak) << cache;
    EXPECT_EQ(judged(900, both).course, Course::kLeak) << cache;
  }
}

TEST(S20Trend, SaysTheRateSoFar) {
  Trend trend;
  trend.add(0, 1000);
  EXPECT_EQ(trend.so_far(), 0);
  for (int step = 1; step <= 60; ++step) {
    trend.add(step, 1000 + 100 * step);
  }
  EXPECT_NEAR(trend.so_far(), 100, 1);
  EXPECT_EQ(trend.judge().windows_wanted, Trend::kWindowsLeast);
}

// malloc() answers the later the more pieces it has, and is asked ever more rarely.
TEST(S15Trend, ALeakThatIsSeenEverMoreRarelyIsALeak) {
  const auto seen = [](const std::function<double(double)>& bytes) {
    Trend trend;
    for (double at = 0, pause = 1; at < 6000; at += pause, pause *= 1.02) {
      trend.add(at, static_cast<std::int64_t>(bytes(at)));
    }
    double pause = 1700;
    for (double at = 6000; at < 18000; at += pause, pause *= 2) {
      trend.add(at, static_cast<std::int64_t>(bytes(at)));
    }
    return trend;
  };
  const Trend leaking = seen([](double at) { return kBase + 270e3 * at; });
  EXPECT_EQ(leaking.judge().course, Course::kLeak);
  EXPECT_NEAR(leaking.judge().slope, 270e3, 27e3);
  EXPECT_GT(leaking.rise(), 0);
  const Trend once = seen([](double at) { return kBase + (at < 9000 ? 0 : 400e6); });
  EXPECT_EQ(once.judge().course, Course::kStep);
}

TEST(Trend, NamesItsCourses) {
  EXPECT_STREQ(course_name(Course::kTooShort), "too short");
  EXPECT_STREQ(course_name(Course::kCache), "cache");
}

}  // namespace
}  // namespace plimsoll
