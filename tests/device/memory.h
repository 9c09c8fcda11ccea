// SPDX-License-Identifier: Apache-2.0
//
// Memory of a simulated device: two addresses for each byte, and CUDA's rules for who gets which.
//
// Tensors carry the first address, where nothing is mapped: a host that reads through it dies at
// once, in any thread, at no cost. Kernels use the second, a constant distance away.
//
// Reading order: this file, memory.cpp, allocators.cpp, streams.h, call_tensors.h, kernels.cpp.
//
// Threads: thread-safe; current_device() and Inside are of the calling thread.
// Memory:  what tensors of the device take, as memory of this process; 150 bytes for each block.
#pragma once

#include <c10/core/CachingDeviceAllocator.h>

#include <array>
#include <cstddef>
#include <cstdint>
#include <map>
#include <mutex>
#include <optional>
#include <set>
#include <tuple>
#include <utility>
#include <vector>

namespace sim {

inline constexpr c10::DeviceType kSim = c10::DeviceType::PrivateUse1;
inline constexpr int kDevices = 2;
inline constexpr int kStreams = 8;  ///< Of a device; 0 is its default.
inline constexpr std::size_t kMiB = std::size_t{1} << 20;

// ---- Addresses ----

bool is_device_address(const void* data);
bool is_kernel_address(const void* data);
int device_of(const void* device_address);
void* host_address(const void* device_address);  ///< Where kernels find it.
void* device_address(const void* host_address);
void* address_at(int device, std::size_t offset);
std::size_t offset_of(const void* device_address);  ///< In its device.

// ---- The allocator of one device ----

/// What a test says about a device's memory.
struct MemorySettings {
  std::size_t capacity{std::size_t{1} << 30};  ///< Bytes.
  std::size_t context{0};                      ///< Bytes of these that nobody can have.
  double fraction{1};                          ///< Of the capacity, that may be reserved.
  bool exact{false};  ///< A segment of its own size for each block, instead of CUDA's rules.
  bool poison{true};  ///< Memory that nobody has written is NaN.
};

/// Segments, bought as CUDA's caching allocator buys them, and the blocks that are cut from them.
class Memory {
 public:
  explicit Memory(int device) : device_(device) {}

  /// ordered: what is written there first comes in `stream`, after what waits in it.
  /// Errors: c10::OutOfMemoryError, after what was cached has gone back.
  void* allocate(std::size_t bytes, int stream, bool ordered = true);
  void free(void* data);
  /// The block is not used again before `stream` has come as far as it will have when it is freed.
  void record(void* data, int stream);
  void empty_cache();
  /// Errors: c10::Error if blocks are there and `exact` is another.
  void set(const MemorySettings& settings);
  /// Refuses `count` allocations after the next `granted`.
  void refuse_after(std::int64_t granted, std::int64_t count);

  c10::CachingDeviceAllocator::DeviceStats stats();
  void reset_peak();
  void reset_accumulated();
  std::pair<std::size_t, std::size_t> info();  ///< Free bytes, all bytes.

 private:
  struct Block {
    std::size_t bytes{0};
    std::uint64_t segment{0};  // Its number: segments are bought one after another.
    std::size_t asked{0};
    int stream{0};
    bool small{false};
    bool used{false};
    bool waiting{false};
    std::uint32_t streams{0};  // Of record(), as bits.
  };
  struct Waiting {
    std::size_t at;
    std::vector<std::pair<int, std::uint64_t>> until;  // Stream, how much of it.
  };
  // Stream, small, bytes, segment, offset: of pieces of equal size that of the oldest segment is
  // first.
  using Key = std::tuple<int, bool, std::size_t, std::uint64_t, std::size_t>;
  using Blocks = std::map<std::size_t, Block>;

  static Key key(std::size_t at, const Block& b) {
    return {b.stream, b.small, b.bytes, b.segment, at};
  }
  static bool joins(Blocks::iterator left, Blocks::iterator right);
  bool is_refused_on_request();
  std::size_t limit() const;
  std::size_t reserved() const { return std::size_t(stats_.reserved_bytes[0].current); }
  std::size_t segment_bytes(std::size_t block, bool small) const;
  std::optional<std::size_t> find(std::size_t block, int stream, bool small);
  [[noreturn]] void refuse(std::size_t bytes, bool on_request);
  bool buy(std::size_t bytes, int stream, bool small);
  std::size_t place(std::size_t bytes);
  void take(std::size_t at, std::size_t block, std::size_t asked);
  void settle(std::size_t at);
  void look_at_waiting(bool wait);
  void release_cached();
  void return_segment(std::size_t at);
  static void count(c10::CachingAllocator::StatArray& stat, bool small, std::int64_t amount);
  void count_block(const Block& block, std::int64_t sign);

  const int device_;
  std::mutex mutex_;
  MemorySettings settings_;
  std::int64_t granted_{0}, refused_{0};  // Of refuse_after(): what is left.
  std::uint64_t bought_{0};
  std::size_t top_{0};  // No segment was ever above it.
  Blocks blocks_;
  std::set<Key> free_;
  std::map<std::size_t, std::size_t> segments_, holes_;  // Bytes by offset.
  std::vector<Waiting> waiting_;
  c10::CachingDeviceAllocator::DeviceStats stats_;
};

Memory& memory(int device);

// ---- Who allocates where ----

/// While it lives, what kernels of the CPU allocate in this thread is memory of `device`; −1: of
/// the host.
struct Inside {
  explicit Inside(int device);
  ~Inside();
  Inside(const Inside&) = delete;
  Inside& operator=(const Inside&) = delete;
  const int before;
};

/// Memory of the program's own, as cudaHostRegister() does it. False: some of it is pinned already.
bool register_pinned(std::uintptr_t address, std::size_t bytes);
bool unregister_pinned(std::uintptr_t address);  ///< False: none begins there.
bool is_pinned(const void* data);

}  // namespace sim
