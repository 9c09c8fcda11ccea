// SPDX-License-Identifier: Apache-2.0
#include "os/pace.h"

#include <gtest/gtest.h>

namespace plimsoll {
namespace {

constexpr std::int64_t kMs = 1'000'000;

TEST(Pace, TheFirstReadingIsDueAtOnce) {
  EXPECT_TRUE(Pace().due(0, Pace::kCalm));
  EXPECT_TRUE(Pace(1000 * kMs).due(INT64_MIN + 1, Pace::kCalm));
}

// Whatever a reading takes, of ten minutes 1 % at most goes into readings: the clock is ours.
TEST(T11Pace, ReadingsOfAnySizeCostOnePerCentOfACore) {
  for (const std::int64_t took : {1'000L, 3 * kMs, 31 * kMs, 110 * kMs, 2'000 * kMs}) {
    Pace pace;
    std::int64_t spent = 0;
    const std::int64_t length = 600'000 * kMs;
    for (std::int64_t now = 0; now < length;) {
      if (pace.due(now, Pace::kCalm)) {
        now += took;
        spent += took;
        pace.record(now, took);
      }
      now = pace.next_ns(Pace::kCalm);
    }
    EXPECT_LE(spent, length / 100 + took) << took;
    EXPECT_GE(spent, length / 103 - took) << took;
  }
}

// A reading that waited long for its turn does not make the pause shorter.
TEST(T11Pace, ThePauseBeginsWhereTheReadingEnded) {
  Pace pace(50 * kMs);
  pace.record(1000 * kMs, kMs);
  EXPECT_FALSE(pace.due(1099 * kMs, Pace::kCalm));
  EXPECT_TRUE(pace.due(1100 * kMs, Pace::kCalm));
  EXPECT_FALSE(pace.due(1049 * kMs, Pace::kHurried));  // Not sooner than the least.
  EXPECT_TRUE(pace.due(1050 * kMs, Pace::kHurried));
}

TEST(Pace, AColdReadingIsMadeTwice) {
  Pace pace;
  int made = 0;
  pace.time_warm([&] { ++made; });
  EXPECT_EQ(made, 2);
  pace.time_warm([&] { ++made; });
  EXPECT_EQ(made, 3);
}

TEST(Pace, WhatAllReadingsTookIsAddedUp) {
  Pace pace;
  pace.record(0, 10 * kMs);
  pace.record(1, 20 * kMs);
  pace.record(2, 1000 * kMs);  // An outlier: it counts as four of the last, and is told whole.
  EXPECT_EQ(pace.took_ns(), 80 * kMs);
  EXPECT_EQ(pace.spent_ns(), 1030 * kMs);
}

TEST(Pace, MeasuresWhatItTimes) {
  Pace pace;
  const std::int64_t before = now_ns();
  volatile std::int64_t sum = 0;
  pace.time([&] {
    for (int i = 0; i < 100'000; ++i) {
      sum = sum + i;
    }
  });
  EXPECT_GT(pace.took_ns(), 0);
  EXPECT_GE(pace.ended_ns(), before);
}

}  // namespace
}  // namespace plimsoll
