// SPDX-License-Identifier: Apache-2.0
//
// DeviceBackend: the device a plan is made for, by what its allocator holds and may hold.
//
// One is simulated (plan/device_allocator.h behind the same interface), the other is whatever
// torch's device-neutral interface speaks for: no header of CUDA is needed, so this compiles, and
// its tests run, where there is none. The host ("cpu") is no device: its bytes are the governor's.
// Reading order: plan/device_allocator.h, this file, device_backend.cpp.
//
// Threads: single-owner.
// Memory:  the simulated one that of its DeviceAllocator, the other a few words; device_memory()
//          takes 8 bytes a storage, and a set of them while it counts.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <string>

#include "plan/device_allocator.h"
#include "plan/device_choice.h"
#include "plan/device_replay.h"
#include "plimsoll/result.h"

namespace c10 {
struct DeviceAllocator;
}

namespace plimsoll {

/// What a device's allocator holds, in bytes.
struct DeviceUse {
  std::int64_t allocated_bytes{0};
  std::int64_t allocated_peak_bytes{0};  ///< Highest since reset_peak().
  std::int64_t reserved_bytes{0};
  std::int64_t reserved_peak_bytes{0};  ///< Highest since reset_peak().
  std::int64_t segments{0};
};

class DeviceBackend {
 public:
  virtual ~DeviceBackend() = default;

  /// "simulated", "cuda:0".
  [[nodiscard]] virtual std::string name() const = 0;
  /// What the device has.
  [[nodiscard]] virtual std::int64_t total_bytes() const = 0;
  /// What its allocator may reserve: plans go by it.
  [[nodiscard]] virtual std::int64_t limit_bytes() const = 0;
  /// Errors: kInternal with torch's text, as of all below.
  [[nodiscard]] virtual Result<DeviceUse> stats() const = 0;
  virtual Result<void> reset_peak() = 0;
  /// Gives back to the device what is cached.
  virtual Result<void> empty_cache() = 0;
  /// The simulated device refuses what would pass the limit. Torch's device-neutral interface
  /// cannot be told of one: there only plans heed it, and
  /// torch.cuda.set_per_process_memory_fraction() makes the allocator refuse. Errors:
  /// kInvalidArgument for less than 1 byte or more than total_bytes().
  virtual Result<void> set_limit(std::int64_t bytes) = 0;
};

/// A device that is not there.
class SimulatedDevice final : public DeviceBackend {
 public:
  explicit SimulatedDevice(std::int64_t total_bytes)
      : allocator_(total_bytes), total_bytes_(total_bytes) {}

  [[nodiscard]] std::string name() const override { return "simulated"; }
  [[nodiscard]] std::int64_t total_bytes() const override { return total_bytes_; }
  [[nodiscard]] std::int64_t limit_bytes() const override { return allocator_.limit_bytes(); }
  [[nodiscard]] Result<DeviceUse> stats() const override;
  Result<void> reset_peak() override;
  Result<void> empty_cache() override;
  Result<void> set_limit(std::int64_t bytes) override;

  /// Where its blocks come from.
  [[nodiscard]] DeviceAllocator& allocator() noexcept { return allocator_; }

 private:
  DeviceAllocator allocator_;
  std::int64_t total_bytes_;
};

/// A device of torch's, through the allocator that torch has for it. Borrowed: torch's allocators
/// are never destroyed. Errors: kInternal when it cannot say what the device has.
Result<std::unique_ptr<DeviceBackend>> torch_device(c10::DeviceAllocator& allocator,
                                                    std::int8_t index, std::string name);

/// A storage that stays on a device from step to step.
struct StayingBlock {
  const void* data{nullptr};
  std::int64_t bytes{0};
};

/// The device as the planner is told of it, each of the storages once.
[[nodiscard]] DeviceMemory device_memory(const DeviceBackend& device,
                                         std::span<const StayingBlock> staying);

/// The device of a choice; nullptr for "cpu".
/// Errors: those of check_device(); kInvalidArgument for a device that is not here.
Result<std::unique_ptr<DeviceBackend>> open_device(const DeviceChoice& choice);

}  // namespace plimsoll
