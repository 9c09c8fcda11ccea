// SPDX-License-Identifier: Apache-2.0
//
// Steps through a device's allocator: by hand, and random ones against replays of what really ran.
#include "plan/device_replay.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <random>
#include <string>
#include <vector>

#include "plan/batch_plan.h"
#include "plan/device_allocator.h"
#include "plan/random_step.h"

namespace plimsoll {
namespace {

constexpr std::int64_t kMiB = 1LL << 20;

StepModel model_of(StepTrace trace) {
  return StepModel::fit(std::array{std::move(trace)}).or_throw();
}

// A step that finds its predecessor's gradient, frees it, makes two activations, and the gradient.
StepTrace small_step() {
  StepTrace trace;
  trace.size = {8, 0, 0};
  trace.ops = {""};
  trace.carried = 1;
  trace.blocks = {{4 * kMiB, 0, StepPhase::kBackward},  // The gradient found.
                  {6 * kMiB, 0, StepPhase::kForward},
                  {15 * kMiB, 0, StepPhase::kForward},
                  {4 * kMiB, 0, StepPhase::kBackward}};  // The gradient made.
  trace.events = {-1, 1, 2, 3, -2, -3};
  return trace;
}

TEST(DeviceReplayTest, AStepIsRepeatedUntilItBuysNothing) {
  const DevicePeak peak = replay_on_device(model_of(small_step()), {8, 0, 0}, {});
  // The first step: 20 MiB hold gradient or activation of 6, 16 are bought for that of 15. The
  // gradient made sits behind the 6, and is what the second step frees and makes again.
  EXPECT_EQ(peak.reserved_bytes, 36 * kMiB);
  EXPECT_EQ(peak.allocated_bytes, (6 + 16 + 4) * kMiB);  // 1 MiB of the 16 is no piece of its own.
  EXPECT_EQ(peak.fragmentation_bytes, (36 - 6 - 16) * kMiB);
  EXPECT_TRUE(peak.steady);
  EXPECT_EQ(peak.steps, 2);
  EXPECT_EQ(peak.static_bytes, 0);
}

TEST(DeviceReplayTest, WhatStaysIsPlacedFirstAndWhatIsNotListedIsCountedFromAbove) {
  StepTrace trace = small_step();
  trace.static_bytes = 30 * kMiB;
  DeviceMemory memory;
  memory.static_blocks = {12 * kMiB, 12 * kMiB, 6 * kMiB};
  memory.static_listed_bytes = 30 * kMiB;
  const DevicePeak listed = replay_on_device(model_of(trace), {8, 0, 0}, memory);
  EXPECT_EQ(listed.static_bytes, (12 + 12 + 20) * kMiB);
  // The gradient found goes behind the static 6; the activation of 6 takes its place and all of
  // the 14 but 4, where the gradient made goes; that of 15 buys 16.
  EXPECT_EQ(listed.reserved_bytes, (12 + 12 + 20 + 16) * kMiB);
  const DevicePeak unlisted = replay_on_device(model_of(trace), {8, 0, 0}, {});
  EXPECT_EQ(unlisted.static_bytes, device_bytes_at_most(30 * kMiB));
  EXPECT_GT(unlisted.reserved_bytes, listed.reserved_bytes);
  EXPECT_EQ(unlisted.allocated_bytes, 30 * kMiB + 26 * kMiB);
}

TEST(DeviceReplayTest, ABatchThatIsCopiedToTheDeviceIsABlockOfIt) {
  DeviceMemory memory;
  memory.batch_bytes = [](std::int64_t rows) { return rows * 2 * kMiB; };
  const DevicePeak peak = replay_on_device(model_of(small_step()), {8, 0, 0}, memory);
  EXPECT_EQ(peak.static_bytes, 16 * kMiB);
  EXPECT_EQ(peak.reserved_bytes, (16 + 36) * kMiB);
}

TEST(DeviceReplayTest, AStepThatLeavesOtherThanItFoundIsPlacedAnew) {
  StepTrace trace = small_step();
  trace.blocks[3].bytes = 9 * kMiB;
  const DevicePeak peak = replay_on_device(model_of(trace), {8, 0, 0}, {});
  EXPECT_TRUE(peak.steady);
  EXPECT_EQ(peak.reserved_bytes, 36 * kMiB);  // 6 and 9 share the 20.
}

TEST(DeviceReplayTest, NoOrderOfBlocksReservesMoreThanTheMostSaid) {
  for (std::uint64_t seed = 0; seed < 300; ++seed) {
    std::mt19937_64 random(seed);
    DeviceAllocator device;
    std::int64_t sum = 0;
    const std::uint64_t blocks = 1 + random() % 60;
    const std::array<std::uint64_t, 4> scales{1 << 12, 1 << 20, 10 << 20, 40 << 20};
    const std::uint64_t kinds = 1 + random() % scales.size();
    for (std::uint64_t k = 0; k < blocks; ++k) {
      const auto bytes = 1 + static_cast<std::int64_t>(random() % scales[random() % kinds]);
      sum += device_block_bytes(bytes);
      static_cast<void>(device.allocate(bytes).or_throw());
    }
    EXPECT_LE(device.stats().reserved_bytes, device_bytes_at_most(sum)) << "seed " << seed;
  }
  EXPECT_EQ(device_bytes_at_most(0), 0);
  EXPECT_EQ(device_bytes_at_most(512), 4 * kMiB);
}

// Straight through the allocator, forty steps of it.
std::int64_t reserved_after_many(const StepTrace& trace, const DeviceMemory& memory) {
  DeviceAllocator device;
  for (const std::int64_t bytes : memory.static_blocks) {
    static_cast<void>(device.allocate(bytes).or_throw());
  }
  std::vector<DeviceAllocator::Block> at(trace.blocks.size());
  const auto carried = static_cast<std::size_t>(trace.carried);
  for (std::size_t k = 0; k < carried; ++k) {
    at[k] = device.allocate(trace.blocks[k].bytes).or_throw();
  }
  for (int step = 0; step < 40; ++step) {
    std::vector<std::size_t> left;
    for (const std::int32_t event : trace.events) {
      if (event >= 0) {
        const auto k = static_cast<std::size_t>(event);
        at[k] = device.allocate(trace.blocks[k].bytes).or_throw();
        left.push_back(k);
      } else {
        const auto k = static_cast<std::size_t>(-1 - event);
        device.free(at[k]);
        left.erase(std::remove(left.begin(), left.end(), k), left.end());
      }
    }
    // RandomStep keeps the same blocks in the same order, step after step.
    const auto order = [&](std::size_t x, std::size_t y) {
      return device_block_bytes(trace.blocks[x].bytes) < device_block_bytes(trace.blocks[y].bytes);
    };
    std::stable_sort(left.begin(), left.end(), order);
    std::vector<std::size_t> found(carried);
    for (std::size_t k = 0; k < carried; ++k) {
      found[k] = k;
    }
    std::stable_sort(found.begin(), found.end(), order);
    EXPECT_EQ(left.size(), carried);
    for (std::size_t k = 0; k < carried; ++k) {
      at[found[k]] = at[left[k]];
    }
  }
  return device.stats().reserved_bytes;
}

TEST(DeviceReplayTest, ASizeNeverRunIsPredictedAsItWouldReserve) {
  for (std::uint64_t seed = 0; seed < 60; ++seed) {
    SCOPED_TRACE(seed);
    const RandomStep step(seed);
    const std::array traces{step.trace(16), step.trace(24), step.trace(32), step.trace(48)};
    const StepModel model = StepModel::fit(traces).or_throw();
    DeviceMemory memory;
    memory.static_blocks = {RandomStep::kStatic};
    memory.static_listed_bytes = RandomStep::kStatic;
    for (const std::int64_t rows : {20, 300, 1000}) {
      const DevicePeak peak = replay_on_device(model, {rows, 0, 0}, memory);
      const DevicePeak truth = replay_on_device(model_of(step.trace(rows)), {rows, 0, 0}, memory);
      EXPECT_EQ(peak.reserved_bytes, truth.reserved_bytes);
      EXPECT_EQ(peak.allocated_bytes, truth.allocated_bytes);
      EXPECT_GE(peak.allocated_bytes, RandomStep::kStatic);
      EXPECT_GE(peak.reserved_bytes, peak.allocated_bytes);
      EXPECT_EQ(peak.reserved_bytes % kSegmentUnit, 0);
      EXPECT_TRUE(peak.steady);
      EXPECT_EQ(peak.reserved_bytes, reserved_after_many(step.trace(rows), memory));
    }
  }
}

// ---- The planner over it ----

class Machine {
 public:
  explicit Machine(std::uint64_t seed, std::int64_t other_algorithm_from = INT64_MAX)
      : step_(seed, other_algorithm_from) {
    options.available_bytes = 1LL << 40;
    options.limit_bytes = 2LL << 40;
    options.most_rows = 3000;
    options.block_bytes = &rounded_to_64;
    options.leased_bytes = [](std::int64_t live) { return live; };
  }
  void limit_device(std::int64_t bytes) {
    DeviceMemory memory;
    memory.limit_bytes = bytes;
    memory.static_blocks = {RandomStep::kStatic};
    memory.static_listed_bytes = RandomStep::kStatic;
    options.device = memory;
  }
  Result<BatchPlan> plan() {
    return plan_batch(
        [this](const StepSize& size) -> Result<StepTrace> { return step_.trace(size.rows); },
        options);
  }
  [[nodiscard]] DevicePeak truth(std::int64_t rows) const {
    return replay_on_device(model_of(step_.trace(rows)), {rows, 0, 0}, *options.device);
  }
  PlanOptions options;

 private:
  RandomStep step_;
};

TEST(DevicePlanTest, TheBatchGrowsWithTheDevicesLimitAndFitsIt) {
  for (std::uint64_t seed = 0; seed < 12; ++seed) {
    SCOPED_TRACE(seed);
    Machine machine(seed);
    std::int64_t before = 0;
    for (const std::int64_t mib : {60, 90, 140, 200}) {
      machine.limit_device(mib * kMiB);
      const auto found = machine.plan();
      if (!found) {  // A step of one row of this seed may want more.
        EXPECT_TRUE(refused_by_device(found.error()));
        continue;
      }
      ASSERT_TRUE(found->device.has_value());
      EXPECT_EQ(found->label, PlanLabel::kBounded);
      EXPECT_EQ(found->device->limit_bytes, mib * kMiB);
      EXPECT_LE(found->device->bound_bytes, mib * kMiB);
      EXPECT_LE(found->device->reserved_bytes, found->device->bound_bytes);
      EXPECT_EQ(found->device->reserved_bytes, machine.truth(found->batch_size).reserved_bytes);
      EXPECT_GE(found->batch_size, before);
      if (!found->at_most_rows) {
        EXPECT_NE(found->advice.find("--device-memory-limit"), std::string::npos) << found->advice;
      }
      before = found->batch_size;
    }
    EXPECT_GT(before, 0);
  }
}

TEST(DevicePlanTest, TheHostsLimitHoldsTooAndWithoutADeviceNothingIsDifferent) {
  for (std::uint64_t seed = 0; seed < 12; ++seed) {
    Machine machine(seed);
    machine.options.available_bytes = 20 * kMiB;
    const BatchPlan host = machine.plan().or_throw();
    EXPECT_FALSE(host.device.has_value());
    machine.limit_device(1LL << 40);
    const BatchPlan both = machine.plan().or_throw();
    EXPECT_EQ(both.batch_size, host.batch_size) << "seed " << seed;
    EXPECT_EQ(both.peak.bytes, host.peak.bytes);
    EXPECT_EQ(both.traced_rows, host.traced_rows);
    EXPECT_EQ(both.advice, host.advice);
    EXPECT_EQ(host.label, PlanLabel::kExact);
    EXPECT_EQ(both.label, PlanLabel::kBounded);
  }
}

TEST(DevicePlanTest, ARefusalNamesADeviceLimitThatIsEnough) {
  for (std::uint64_t seed = 0; seed < 12; ++seed) {
    Machine machine(seed);
    machine.options.least_rows = 600;
    machine.limit_device(2 * kMiB);
    const auto refused = machine.plan();
    ASSERT_FALSE(refused);
    EXPECT_TRUE(refused_by_device(refused.error()));
    EXPECT_NE(refused.error().to_string().find("--device-memory-limit"), std::string::npos);
    machine.limit_device(refused.error().smallest_limit_bytes);
    EXPECT_TRUE(machine.plan()) << "seed " << seed;
    machine.limit_device(refused.error().smallest_limit_bytes - 2 * kMiB);
    EXPECT_FALSE(machine.plan()) << "seed " << seed;
  }
}

TEST(DevicePlanTest, TheHostsRefusalIsTheHosts) {
  Machine machine(3);
  machine.options.least_rows = 600;
  machine.options.available_bytes = kMiB;
  machine.limit_device(1LL << 40);
  const auto refused = machine.plan();
  ASSERT_FALSE(refused);
  EXPECT_FALSE(refused_by_device(refused.error()));
}

TEST(R25DeviceRefusal, IsKnownByWhoMadeItAndNotByItsWords) {
  Machine machine(3);
  machine.options.least_rows = 600;
  machine.limit_device(2 * kMiB);
  const auto plan = machine.plan();
  ASSERT_FALSE(plan);
  const Error& refused = plan.error();
  const std::string advice = refused.advice;
  const Error same_words = make_error(refused.code, *refused.detail, advice.c_str());
  EXPECT_EQ(same_words.to_string(), refused.to_string());
  EXPECT_TRUE(refused_by_device(refused));
  EXPECT_FALSE(refused_by_device(same_words));
}

TEST(DevicePlanTest, AStepThatDidSomethingElseIsJudgedByWhatItDid) {
  for (std::uint64_t seed = 0; seed < 20; ++seed) {
    Machine machine(seed, 100);
    machine.limit_device(120 * kMiB);
    const auto found = machine.plan();
    if (!found) {
      EXPECT_TRUE(refused_by_device(found.error())) << "seed " << seed;
      continue;
    }
    EXPECT_LE(machine.truth(found->batch_size).reserved_bytes, 120 * kMiB) << "seed " << seed;
    EXPECT_GE(found->device->bound_bytes, machine.truth(found->batch_size).reserved_bytes);
  }
}

}  // namespace
}  // namespace plimsoll
