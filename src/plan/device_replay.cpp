// SPDX-License-Identifier: Apache-2.0
//
// See device_replay.h.
#include "plan/device_replay.h"

#include <algorithm>
#include <utility>

#include "base/check.h"
#include "plan/device_allocator.h"

namespace plimsoll {
namespace {

using Block = DeviceAllocator::Block;
constexpr Block kNowhere{-1};
constexpr std::int64_t kBytesPerMiB = 1LL << 20;

class DeviceReplay {
 public:
  DeviceReplay(const StepTrace& shape, std::vector<std::int64_t> sizes)
      : shape_(shape), sizes_(std::move(sizes)), at_(sizes_.size(), kNowhere) {}

  // Before begin(): a block that stays.
  void place_other(std::int64_t bytes) {
    if (bytes > 0) {
      static_cast<void>(device_.allocate(bytes).or_throw());  // There is no limit.
    }
  }

  // What the first step finds.
  void begin() {
    for (std::size_t block = 0; block < carried(); ++block) {
      place(block);
    }
  }

  void step() {
    for (const std::int32_t event : shape_.events) {
      if (event >= 0) {
        place(static_cast<std::size_t>(event));
      } else {
        give_back(static_cast<std::size_t>(-1 - event));
      }
    }
    hand_over();
  }

  [[nodiscard]] DeviceMemoryStats stats() const { return device_.stats(); }

 private:
  [[nodiscard]] std::size_t carried() const { return static_cast<std::size_t>(shape_.carried); }

  void place(std::size_t block) {
    if (sizes_[block] > 0) {
      at_[block] = device_.allocate(sizes_[block]).or_throw();
    }
  }
  void give_back(std::size_t block) {
    if (at_[block] != kNowhere) {
      device_.free(at_[block]);
      at_[block] = kNowhere;
    }
  }

  // What this step leaves is what the next one finds: gradients are those that zero_grad() frees.
  // Where their sizes differ, what was found is placed anew.
  void hand_over() {
    std::vector<std::size_t> left;   // Born in the step, alive at its end.
    std::vector<std::size_t> found;  // Alive when it began, freed in it.
    for (std::size_t block = 0; block < sizes_.size(); ++block) {
      const bool old = block < carried();
      if (sizes_[block] > 0 && old == (at_[block] == kNowhere)) {
        (old ? found : left).push_back(block);
      }
    }
    const auto bytes = [this](std::size_t block) { return device_block_bytes(sizes_[block]); };
    const auto smaller = [&bytes](std::size_t x, std::size_t y) { return bytes(x) < bytes(y); };
    std::stable_sort(left.begin(), left.end(), smaller);
    std::stable_sort(found.begin(), found.end(), smaller);
    const bool same =
        std::equal(left.begin(), left.end(), found.begin(), found.end(),
                   [&bytes](std::size_t x, std::size_t y) { return bytes(x) == bytes(y); });
    for (std::size_t k = 0; k < left.size(); ++k) {
      if (same) {
        at_[found[k]] = at_[left[k]];
        at_[left[k]] = kNowhere;
      } else {
        give_back(left[k]);
      }
    }
    if (!same) {
      std::sort(found.begin(), found.end());
      for (const std::size_t block : found) {
        place(block);
      }
    }
  }

  const StepTrace& shape_;
  std::vector<std::int64_t> sizes_;
  std::vector<Block> at_;
  DeviceAllocator device_;
};

}  // namespace

std::int64_t device_bytes_at_most(std::int64_t bytes) noexcept {
  if (bytes <= 0) {
    return 0;
  }
  // One segment of each pool that they can use may be nearly empty; a block above 1 MiB uses both.
  const std::int64_t nearly_empty = bytes <= kBytesPerMiB ? 2 * kBytesPerMiB : 22 * kBytesPerMiB;
  return (2 * bytes + nearly_empty + kSegmentUnit - 1) / kSegmentUnit * kSegmentUnit;
}

DevicePeak replay_on_device(const StepModel& model, const StepSize& size,
                            const DeviceMemory& memory) {
  const StepTrace& shape = model.shape();
  const std::int64_t unlisted =
      std::max<std::int64_t>(0, shape.static_bytes - memory.static_listed_bytes);
  const std::int64_t apart =
      device_bytes_at_most(unlisted) + device_bytes_at_most(shape.other_threads_bytes);
  DeviceReplay replay(shape, model.block_sizes(size));
  for (const std::int64_t bytes : memory.static_blocks) {
    replay.place_other(bytes);
  }
  if (memory.batch_bytes) {
    replay.place_other(memory.batch_bytes(size.rows));
  }
  DevicePeak peak;
  peak.name = memory.name;
  peak.limit_bytes = memory.limit_bytes;
  std::int64_t reserved = replay.stats().reserved_bytes;
  peak.static_bytes = reserved + apart;
  replay.begin();
  reserved = replay.stats().reserved_bytes;
  while (!peak.steady && peak.steps < kDeviceSteps) {
    replay.step();
    ++peak.steps;
    const std::int64_t before = std::exchange(reserved, replay.stats().reserved_bytes);
    peak.steady = reserved == before;
  }
  const DeviceMemoryStats stats = replay.stats();
  peak.allocated_bytes = stats.allocated_peak_bytes + unlisted + shape.other_threads_bytes;
  peak.reserved_bytes = stats.reserved_peak_bytes + apart;
  peak.fragmentation_bytes =
      stats.fragmentation_bytes + apart - unlisted - shape.other_threads_bytes;
  return peak;
}

}  // namespace plimsoll
