// SPDX-License-Identifier: Apache-2.0
//
// Goal: a leak is told from a large batch and from more processes, however fast it is.
#include "watch/climb.h"

#include <gtest/gtest.h>

#include "plimsoll/bytes.h"

namespace plimsoll {
namespace {

using namespace plimsoll::literals;

// A trainer of `trainer` bytes, and three workers of `worker` bytes each.
TreeUse tree_of(std::int64_t trainer, std::int64_t worker) {
  TreeUse tree{.bytes = trainer + 3 * worker, .processes = 4};
  tree.largest.push_back({.pid = 10, .parent = 1, .name = "python", .bytes = trainer});
  for (int i = 0; i < 3; ++i) {
    tree.largest.push_back({.pid = 11 + i, .parent = 10, .name = "worker", .bytes = worker});
  }
  return tree;
}

TEST(R61Climb, AFastLeakIsGrowth) {
  Climb climb;
  double now = 0;
  for (std::int64_t held = 200_MiB; held <= 500_MiB; held += 20_MiB, now += 0.25) {
    climb.add(now, tree_of(held, 1_MiB));
  }
  for (int i = 0; i < 1000; ++i, now += 1) {
    climb.add(now, tree_of(495_MiB, 1_MiB));  // At its limit it thrashes for long.
  }
  const Growth growth = climb.growth();
  EXPECT_GE(growth.bytes, 100_MiB);
  EXPECT_NEAR(static_cast<double>(growth.bytes) / growth.seconds, 80.0 * (1 << 20),
              8.0 * (1 << 20));
  EXPECT_LT(growth.ended_at, 5);
  EXPECT_EQ(growth.name, "python");
  EXPECT_EQ(growth.processes, 1);
  EXPECT_EQ(climb.peak().bytes, 503_MiB);
}

TEST(R61Climb, ASlowLeakIsGrowthToo) {
  Climb climb;
  for (int i = 0; i < 100'000; ++i) {
    climb.add(i, tree_of(1_GiB + i * 40'000LL, 1_MiB));
  }
  EXPECT_GE(climb.growth().bytes, 1_GiB);
  EXPECT_GE(climb.growth().seconds, 20'000);
}

TEST(R61Climb, WorkersThatLeakAreNamed) {
  Climb climb;
  for (int i = 0; i < 40; ++i) {
    climb.add(i, tree_of(200_MiB, 50_MiB + i * 4_MiB));
  }
  const Growth growth = climb.growth();
  EXPECT_EQ(growth.name, "worker");
  EXPECT_EQ(growth.processes, 3);
  EXPECT_EQ(growth.group_bytes, growth.bytes);
  EXPECT_GE(growth.bytes, 150_MiB);
}

TEST(R61Climb, ALargeBatchIsNoGrowth) {
  Climb climb;
  climb.add(0, tree_of(100_MiB, 1_MiB));
  climb.add(1, tree_of(300_MiB, 1_MiB));
  climb.add(2, tree_of(700_MiB, 1_MiB));
  climb.add(3, tree_of(750_MiB, 1_MiB));
  EXPECT_EQ(climb.growth().bytes, 0);
  EXPECT_EQ(Climb{}.growth().bytes, 0);
}

TEST(R61Climb, MoreProcessesAreNoGrowth) {
  Climb climb;
  TreeUse tree = tree_of(100_MiB, 50_MiB);
  for (int i = 0; i < 12; ++i) {
    tree.largest.push_back({.pid = 100 + i, .parent = 10, .name = "late", .bytes = 50_MiB});
    tree.bytes += 50_MiB;
    climb.add(i, tree);
  }
  EXPECT_EQ(climb.growth().bytes, 0);
}

}  // namespace
}  // namespace plimsoll
