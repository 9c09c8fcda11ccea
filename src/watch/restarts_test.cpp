// SPDX-License-Identifier: Apache-2.0
#include "watch/restarts.h"

#include <gtest/gtest.h>

namespace plimsoll {
namespace {

TEST(Restarts, PausesGrowToAMinute) {
  Restarts restarts{.most = 9};
  for (const int seconds : {1, 2, 4, 8, 16, 32, 60, 60, 60}) {
    const auto next = decide_restart({.status = 137}, restarts);
    EXPECT_TRUE(next.again);
    EXPECT_EQ(next.pause.count(), seconds);
  }
  const auto last = decide_restart({.status = 137}, restarts);
  EXPECT_FALSE(last.again);
  EXPECT_EQ(last.why, "not started again: that was the last of --restarts 9");
  EXPECT_EQ(restarts.done, 9);
}

TEST(Restarts, WhoEndedWellOrWasAskedToIsLeft) {
  Restarts restarts{.most = 9};
  EXPECT_FALSE(decide_restart({.status = 0}, restarts).again);
  EXPECT_FALSE(decide_restart({.status = 143, .asked = true}, restarts).again);
  EXPECT_FALSE(decide_restart({.status = 2}, restarts).again);
  EXPECT_TRUE(decide_restart({.status = 0, .stopped = true}, restarts).again);
  EXPECT_EQ(restarts.done, 1);
}

TEST(Restarts, TwoEndsAtOnePlaceAreTheLast) {
  Restarts restarts{.most = 9};
  EXPECT_TRUE(decide_restart({.status = 1, .progress = "run: step 3"}, restarts).again);
  EXPECT_TRUE(decide_restart({.status = 1, .progress = "run: step 4"}, restarts).again);
  const auto last = decide_restart({.status = 1, .progress = "run: step 4"}, restarts);
  EXPECT_FALSE(last.again);
  EXPECT_EQ(last.why, "ended twice without getting further (run: step 4): not started again");
  EXPECT_TRUE(decide_restart({.status = 1}, restarts).again);  // Who tells nothing is only counted.
}

}  // namespace
}  // namespace plimsoll
