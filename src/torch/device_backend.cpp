// SPDX-License-Identifier: Apache-2.0
//
// See device_backend.h. Order here: torch's device, the simulated one, the planner, opening.
#include "torch/device_backend.h"

#include <ATen/Context.h>
#include <c10/core/CachingDeviceAllocator.h>
#include <fmt/format.h>
#include <torch/version.h>

#include <exception>
#include <type_traits>
#include <unordered_set>
#include <utility>

#include "base/check.h"
#include "plimsoll/bytes.h"
#include "plimsoll/torch.h"
#include "torch/arena_pages.h"

namespace plimsoll {
namespace {

Result<void> check_limit(const DeviceBackend& device, std::int64_t bytes) {
  if (bytes < 1 || bytes > device.total_bytes()) {
    return fail(ErrorCode::kInvalidArgument,
                fmt::format("a limit of {} for the device {}, which has {}", format_bytes(bytes),
                            device.name(), format_bytes(device.total_bytes())),
                "choose another --device-memory-limit");
  }
  return {};
}

// Calls into torch's allocator; what it throws becomes an Error.
template <class Call>
auto guarded(const std::string& name, Call&& call) -> Result<decltype(call())> {
  try {
    if constexpr (std::is_void_v<decltype(call())>) {
      call();
      return {};
    } else {
      return call();
    }
  } catch (const c10::Error& error) {
    return fail(ErrorCode::kInternal, name + ": " + error.what_without_backtrace());
  } catch (const std::exception& error) {
    return fail(ErrorCode::kInternal, name + ": " + error.what());
  }
}

class TorchDevice final : public DeviceBackend {
 public:
  TorchDevice(c10::DeviceAllocator& allocator, c10::DeviceIndex index, std::string name)
      : allocator_(allocator), index_(index), name_(std::move(name)) {}

  // What there is, and as limit what this process could have now: free, or its already.
  Result<void> measure() {
    PLIMSOLL_TRY(const auto memory,
                 guarded(name_, [this] { return allocator_.getMemoryInfo(index_); }));
    PLIMSOLL_TRY(const DeviceUse use, stats());
    total_bytes_ = static_cast<std::int64_t>(memory.second);
    limit_bytes_ = static_cast<std::int64_t>(memory.first) + use.reserved_bytes;
    return {};
  }

  [[nodiscard]] std::string name() const override { return name_; }
  [[nodiscard]] std::int64_t total_bytes() const override { return total_bytes_; }
  [[nodiscard]] std::int64_t limit_bytes() const override { return limit_bytes_; }

  [[nodiscard]] Result<DeviceUse> stats() const override {
    return guarded(name_, [this] {
      const auto stats = allocator_.getDeviceStats(index_);
      const auto all = static_cast<std::size_t>(c10::CachingAllocator::StatType::AGGREGATE);
      return DeviceUse{stats.allocated_bytes[all].current, stats.allocated_bytes[all].peak,
                       stats.reserved_bytes[all].current, stats.reserved_bytes[all].peak,
                       stats.segment[all].current};
    });
  }
  Result<void> reset_peak() override {
    return guarded(name_, [this] { allocator_.resetPeakStats(index_); });
  }
  Result<void> empty_cache() override {
    return guarded(name_, [this] { allocator_.emptyCache(); });
  }
  Result<void> set_limit(std::int64_t bytes) override {
    PLIMSOLL_TRY_VOID(check_limit(*this, bytes));
    limit_bytes_ = bytes;
    return {};
  }

 private:
  c10::DeviceAllocator& allocator_;
  c10::DeviceIndex index_;
  std::string name_;
  std::int64_t total_bytes_{0};
  std::int64_t limit_bytes_{0};
};

Result<std::unique_ptr<DeviceBackend>> open_cuda() {
  if (!at::globalContext().hasCUDA()) {
    return fail(ErrorCode::kInvalidArgument,
                "--device cuda: this torch (" TORCH_VERSION
                ") has no CUDA, or there is no device that it can use",
                "install a torch with CUDA (pytorch.org/get-started), or plan with --device "
                "simulated and --device-memory-limit");
  }
  PLIMSOLL_TRY(c10::DeviceAllocator * allocator, guarded("cuda:0", [] {
                 at::globalContext().lazyInitDevice(at::kCUDA);
                 return c10::getDeviceAllocator(at::kCUDA);
               }));
  return torch_device(*allocator, 0, "cuda:0");
}

}  // namespace

// ---- The simulated device ----

Result<DeviceUse> SimulatedDevice::stats() const {
  const DeviceMemoryStats now = allocator_.stats();
  return DeviceUse{now.allocated_bytes, now.allocated_peak_bytes, now.reserved_bytes,
                   now.reserved_peak_bytes, now.segments};
}

Result<void> SimulatedDevice::reset_peak() {
  allocator_.reset_peak();
  return {};
}

Result<void> SimulatedDevice::empty_cache() {
  allocator_.empty_cache();
  return {};
}

Result<void> SimulatedDevice::set_limit(std::int64_t bytes) {
  PLIMSOLL_TRY_VOID(check_limit(*this, bytes));
  allocator_.set_limit(bytes);
  return {};
}

// ---- For the planner ----

DeviceMemory device_memory(const DeviceBackend& device, std::span<const StayingBlock> staying) {
  DeviceMemory memory;
  memory.name = device.name();
  memory.limit_bytes = device.limit_bytes();
  std::unordered_set<const void*> seen;
  for (const auto& [data, bytes] : staying) {
    if (bytes == 0 || !seen.insert(data).second) {
      continue;
    }
    memory.static_blocks.push_back(bytes);
    memory.static_listed_bytes += TensorArena::owns(data) ? arena_block_bytes(bytes) : 0;
  }
  return memory;
}

// ---- Opening ----

Result<std::unique_ptr<DeviceBackend>> torch_device(c10::DeviceAllocator& allocator,
                                                    std::int8_t index, std::string name) {
  auto device = std::make_unique<TorchDevice>(allocator, index, std::move(name));
  PLIMSOLL_TRY_VOID(device->measure());
  return device;
}

Result<std::unique_ptr<DeviceBackend>> open_device(const DeviceChoice& choice) {
  PLIMSOLL_TRY_VOID(check_device(choice));
  if (choice.device == "cpu") {
    return nullptr;
  }
  if (choice.device == "simulated") {
    PLIMSOLL_TRY(const std::int64_t total, parse_bytes(choice.memory_limit));
    return std::make_unique<SimulatedDevice>(total);
  }
  PLIMSOLL_TRY(auto device, open_cuda());
  if (!choice.memory_limit.empty()) {
    PLIMSOLL_TRY(const std::int64_t limit, parse_bytes(choice.memory_limit, device->total_bytes()));
    PLIMSOLL_TRY_VOID(device->set_limit(limit));
  }
  return device;
}

}  // namespace plimsoll
