// SPDX-License-Identifier: Apache-2.0
//
// See memory.h. Order here: torch's allocator of the device, what kernels of the CPU allocate,
// pinned memory.
#include <ATen/core/CachingHostAllocator.h>
#include <c10/core/CPUAllocator.h>
#include <c10/util/Exception.h>
#include <sys/mman.h>

#include <cstring>

#include "tests/device/memory.h"
#include "tests/device/streams.h"

namespace sim {
namespace {

// By either address.
void free_block(void* data) {
  if (is_kernel_address(data)) {
    data = device_address(data);
  }
  if (data != nullptr) {
    memory(device_of(data)).free(data);
  }
}

struct Allocator final : c10::DeviceAllocator {
  c10::DataPtr allocate(std::size_t bytes) override {
    const int device = current_device();
    void* data = memory(device).allocate(bytes, current_stream(device));
    return {data, data, &free_block, c10::Device(kSim, c10::DeviceIndex(device))};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &free_block; }
  void copy_data(void* to, const void* from, std::size_t bytes) const override {
    drain(device_of(to), current_stream(device_of(to)));
    std::memcpy(host_address(to), host_address(from), bytes);
  }
  bool initialized() override { return true; }
  void emptyCache(c10::MempoolId_t) override {
    for (int device = 0; device < kDevices; ++device) {
      memory(device).empty_cache();
    }
  }
  void recordStream(const c10::DataPtr& data, c10::Stream stream) override {
    if (data.get() != nullptr) {
      memory(device_of(data.get())).record(data.get(), int(stream.id()));
    }
  }
  c10::CachingDeviceAllocator::DeviceStats getDeviceStats(c10::DeviceIndex device) override {
    return memory(device).stats();
  }
  void resetAccumulatedStats(c10::DeviceIndex device) override {
    memory(device).reset_accumulated();
  }
  void resetPeakStats(c10::DeviceIndex device) override { memory(device).reset_peak(); }
  std::pair<std::size_t, std::size_t> getMemoryInfo(c10::DeviceIndex device) override {
    return memory(device).info();
  }
};
Allocator device_allocator;
REGISTER_ALLOCATOR(kSim, &device_allocator)

// ---- What kernels of the CPU allocate ----

thread_local int inside_device = -1;
c10::Allocator* cpu_allocator = nullptr;  // The one that ours stands before.

// Libraries keep what a kernel allocated, and free it within another one, or outside of all.
void free_of_kernel(void* data) {
  if (is_kernel_address(data)) {
    free_block(data);
  } else {
    cpu_allocator->raw_deleter()(data);
  }
}

struct KernelAllocator final : c10::Allocator {
  c10::DataPtr allocate(std::size_t bytes) override {
    if (inside_device < 0 || bytes <= 16) {  // A number is an argument of a device's kernel.
      return cpu_allocator->allocate(bytes);
    }
    void* data =
        memory(inside_device).allocate(bytes, current_stream(inside_device), /*ordered=*/false);
    if (data != nullptr) {
      data = host_address(data);
    }
    return {data, data, &free_of_kernel, c10::Device(c10::DeviceType::CPU)};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &free_of_kernel; }
  void copy_data(void* to, const void* from, std::size_t bytes) const override {
    std::memcpy(to, from, bytes);
  }
};
KernelAllocator kernel_allocator;

}  // namespace

Inside::Inside(int device) : before(inside_device) {
  // Whoever set the CPU's allocator meanwhile stays behind ours.
  if (auto* now = c10::GetCPUAllocator(); now != &kernel_allocator) {
    cpu_allocator = now;
    c10::SetCPUAllocator(&kernel_allocator, 255);
  }
  inside_device = device;
}
Inside::~Inside() {
  inside_device = before;
}

// ---- Pinned memory of the host ----

namespace {

std::mutex pinned_mutex;
std::map<const char*, std::size_t> pinned_blocks;  // Bytes by address; those of programs, too.
at::HostStats pinned_stats;

void free_pinned(void* data) {
  const std::lock_guard lock(pinned_mutex);
  const auto it = pinned_blocks.find(static_cast<char*>(data));
  if (it == pinned_blocks.end()) {
    return;
  }
  pinned_stats.allocated_bytes.decrease(it->second);
  pinned_stats.active_bytes.decrease(it->second);
  munmap(data, it->second);
  pinned_blocks.erase(it);
}

struct HostAllocator final : at::HostAllocator {
  c10::DataPtr allocate(std::size_t bytes) override {
    void* data = nullptr;
    if (bytes > 0) {
      data = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
      TORCH_CHECK(data != MAP_FAILED, "sim: no memory for ", bytes, " pinned bytes");
      const std::lock_guard lock(pinned_mutex);
      pinned_blocks[static_cast<char*>(data)] = bytes;
      pinned_stats.allocated_bytes.increase(bytes);
      pinned_stats.active_bytes.increase(bytes);
    }
    return {data, data, &free_pinned, c10::Device(c10::DeviceType::CPU)};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &free_pinned; }
  void copy_data(void* to, const void* from, std::size_t bytes) const override {
    std::memcpy(to, from, bytes);
  }
  // A copy keeps its source until it is made.
  bool record_event(void*, void*, c10::Stream) override { return true; }
  void empty_cache() override {}
  at::HostStats get_stats() override {
    const std::lock_guard lock(pinned_mutex);
    return pinned_stats;
  }
  void reset_accumulated_stats() override {}
  void reset_peak_stats() override {
    const std::lock_guard lock(pinned_mutex);
    pinned_stats.allocated_bytes.reset_peak();
  }
};
HostAllocator host_allocator;

}  // namespace

bool is_pinned(const void* data) {
  const std::lock_guard lock(pinned_mutex);
  const auto it = pinned_blocks.upper_bound(static_cast<const char*>(data));
  return it != pinned_blocks.begin() &&
         static_cast<const char*>(data) < std::prev(it)->first + std::prev(it)->second;
}
bool register_pinned(std::uintptr_t address, std::size_t bytes) {
  const std::lock_guard lock(pinned_mutex);
  const auto* begin = reinterpret_cast<const char*>(address);
  const auto after = pinned_blocks.lower_bound(begin);
  const bool meets_next = after != pinned_blocks.end() && after->first < begin + bytes;
  const bool meets_last =
      after != pinned_blocks.begin() && std::prev(after)->first + std::prev(after)->second > begin;
  if (bytes == 0 || meets_next || meets_last) {
    return false;
  }
  pinned_blocks[begin] = bytes;
  return true;
}
bool unregister_pinned(std::uintptr_t address) {
  const std::lock_guard lock(pinned_mutex);
  return pinned_blocks.erase(reinterpret_cast<const char*>(address)) > 0;
}
std::pair<std::uintptr_t, std::uintptr_t> host_driver() {
  int (*const add)(void*, std::size_t, unsigned) = [](void* data, std::size_t size, unsigned) {
    return register_pinned(reinterpret_cast<std::uintptr_t>(data), size) ? 0 : 712;
  };
  int (*const remove)(void*) = [](void* data) {
    return unregister_pinned(reinterpret_cast<std::uintptr_t>(data)) ? 0 : 713;
  };
  return {reinterpret_cast<std::uintptr_t>(add), reinterpret_cast<std::uintptr_t>(remove)};
}
at::HostAllocator* pinned_allocator() {
  return &host_allocator;
}

}  // namespace sim
namespace at {
REGISTER_HOST_ALLOCATOR(sim::kSim, sim::pinned_allocator())
}
