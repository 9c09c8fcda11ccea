// SPDX-License-Identifier: Apache-2.0
//
// replay_on_device: what a training step would make a device's allocator reserve.
//
// The blocks of a modelled step, at any size, go through DeviceAllocator in the order of its
// events: first what stays from step to step, then the step again and again until one of them buys
// no segment. A block that outlives its step is, in the next one, a block that it finds.
// What is not known is counted from above, in segments of its own: of what stays, the blocks that
// nobody listed are known as a sum (StepTrace::static_bytes), as are other threads' blocks. The sum
// is the arena's, which rounds blocks below some KiB less than a device does: list what can be.
//
// The blocks are those that the step asks for on this machine. A device's kernels ask for other
// scratch; neither that, nor a library's workspace, nor the device's context is in here.
// Reading order: device_allocator.h, step_model.h, this file, batch_plan.h.
//
// Threads: pure functions.
// Memory:  that of the allocator (device_allocator.h), 4 bytes a block for where it is and 8 for
//          its size; at most 66 MiB for a step of 262,144 blocks.
#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "plan/step_model.h"

namespace plimsoll {

/// A device as the planner is told of it.
struct DeviceMemory {
  std::string name{};           ///< "simulated", "cuda:0".
  std::int64_t limit_bytes{0};  ///< What its allocator may reserve.
  /// Blocks known to stay from step to step (parameters, optimizer states), as asked for.
  std::vector<std::int64_t> static_blocks{};
  /// What those are of StepTrace::static_bytes: the sum of the allocator's bytes of those that it
  /// handed out.
  std::int64_t static_listed_bytes{0};
  /// Bytes of a batch of so many rows that is copied to the device, where the step does not make
  /// it itself; one block.
  std::function<std::int64_t(std::int64_t)> batch_bytes{};
};

/// What a step of one size would hold on a device.
struct DevicePeak {
  std::string name{};
  std::int64_t limit_bytes{0};
  std::int64_t allocated_bytes{0};      ///< Highest, as rounded by the device's allocator.
  std::int64_t reserved_bytes{0};       ///< Highest, in segments.
  std::int64_t bound_bytes{0};          ///< Reserved, and room for what kernels do otherwise.
  std::int64_t fragmentation_bytes{0};  ///< Reserved − allocated, when reserved reached its peak.
  std::int64_t static_bytes{0};         ///< Of reserved: bought for what stays and the batch.
  std::int64_t steps{0};                ///< Replayed until one bought nothing.
  bool steady{false};  ///< Whether one did, within kDeviceSteps; else it may reserve more.
  std::int64_t pinned_bytes{0};  ///< Of the host's limit: see Tag::kPinned. By the recipe.
};

inline constexpr std::int64_t kDeviceSteps = 8;

/// Without a limit: a step that fits only by giving cached segments back in its middle is one that
/// does not fit. bound_bytes is left at 0.
[[nodiscard]] DevicePeak replay_on_device(const StepModel& model, const StepSize& size,
                                          const DeviceMemory& memory);

/// The most that blocks of so many bytes in all, as the device rounds them, can make it reserve
/// when they are made one after another: all but one of the shared segments of a pool are then more
/// than half full, and a segment of one block is at most a fifth larger than it.
[[nodiscard]] std::int64_t device_bytes_at_most(std::int64_t bytes) noexcept;

}  // namespace plimsoll
