// SPDX-License-Identifier: Apache-2.0
//
// See memory.h. Order here: addresses, handing out, taking back, segments, statistics.
// The rules are those of src/plan/device_allocator.h, with streams: a free block is of the stream
// that it was bought for.
#include "tests/device/memory.h"

#include <c10/util/Exception.h>
#include <sys/mman.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <string>

#include "tests/device/streams.h"

namespace sim {
namespace {

constexpr std::size_t kReach = std::size_t{1} << 38;  // Addresses of a device.
constexpr std::size_t kPage = 4096;

char* mapped(int protection) {
  void* at = mmap(nullptr, kReach * kDevices, protection,
                  MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  TORCH_CHECK(at != MAP_FAILED, "sim: no addresses for a device");
  madvise(at, kReach * kDevices, MADV_DONTFORK);  // A forked process has no device, as with CUDA.
  return static_cast<char*>(at);
}
char* seen() {
  static char* at = mapped(PROT_NONE);
  return at;
}
char* there() {
  static char* at = mapped(PROT_READ | PROT_WRITE);
  return at;
}
bool within(const void* data, const char* base) {
  return data >= base && data < base + kReach * kDevices;
}
std::size_t from(const char* base, const void* data) {
  return std::size_t(static_cast<const char*>(data) - base);
}

std::size_t rounded_up(std::size_t bytes, std::size_t unit) {
  return (bytes + unit - 1) / unit * unit;
}
std::string text(std::size_t bytes) {
  return c10::str(std::round(double(bytes) / double(kMiB) * 100) / 100, " MiB");
}

}  // namespace

bool is_device_address(const void* data) {
  return within(data, seen());
}
bool is_kernel_address(const void* data) {
  return within(data, there());
}
int device_of(const void* data) {
  return int(from(seen(), data) / kReach);
}
void* host_address(const void* data) {
  return there() + from(seen(), data);
}
void* device_address(const void* data) {
  return seen() + from(there(), data);
}
void* address_at(int device, std::size_t offset) {
  return seen() + kReach * std::size_t(device) + offset;
}
std::size_t offset_of(const void* data) {
  return from(seen(), data) % kReach;
}

// ---- Handing out ----

void* Memory::allocate(std::size_t bytes, int stream, bool ordered) {
  if (bytes == 0) {
    return nullptr;
  }
  const std::lock_guard lock(mutex_);
  look_at_waiting(false);
  const std::size_t block = rounded_up(bytes, settings_.exact ? 64 : 512);
  const bool small = block <= kMiB;
  const bool on_request = is_refused_on_request();
  auto at = on_request ? std::nullopt : find(block, stream, small);
  if (!at) {
    refuse(bytes, on_request);
  }
  take(*at, block, bytes);
  void* data = address_at(device_, *at);
  // NaN of every floating type. Late kernels of this stream may still read what was here before.
  const auto poison = [data, bytes] { std::memset(host_address(data), 0xff, bytes); };
  if (settings_.poison && idle(device_, stream)) {
    poison();
  } else if (settings_.poison && ordered) {
    enqueue(device_, stream, poison);
  }
  return data;
}

// A free block that is large enough, bought where there is none.
std::optional<std::size_t> Memory::find(std::size_t block, int stream, bool small) {
  const auto look = [&]() -> std::optional<std::size_t> {
    const auto it = free_.lower_bound({stream, small, block, 0, 0});
    const bool fits = it != free_.end() && std::get<0>(*it) == stream && std::get<1>(*it) == small;
    return fits ? std::optional(std::get<4>(*it)) : std::nullopt;
  };
  if (const auto at = look()) {
    return at;
  }
  const std::size_t segment = segment_bytes(block, small);
  if (!buy(segment, stream, small)) {
    ++stats_.num_alloc_retries;
    look_at_waiting(true);
    release_cached();
    buy(segment, stream, small);
  }
  return look();
}

std::size_t Memory::segment_bytes(std::size_t block, bool small) const {
  if (settings_.exact) {
    return block;
  }
  if (small) {
    return 2 * kMiB;
  }
  return block < 10 * kMiB ? 20 * kMiB : rounded_up(block, 2 * kMiB);
}

void Memory::refuse(std::size_t bytes, bool on_request) {
  ++stats_.num_ooms;
  const auto used = std::size_t(stats_.allocated_bytes[0].current);
  const std::size_t left = limit() - std::min(limit(), reserved());
  TORCH_CHECK_WITH(OutOfMemoryError, false, "SIM out of memory. Tried to allocate ", text(bytes),
                   ". Device ", device_, " has a total capacity of ", text(settings_.capacity),
                   ", of which ", text(left), " may still be reserved; ", text(used),
                   " are allocated by PyTorch, and ", text(reserved() - used),
                   " are reserved by PyTorch but unallocated.",
                   on_request ? " (Refused on request.)" : "");
}

// The block takes the front of a free one; what remains is free, unless it is too little.
void Memory::take(std::size_t at, std::size_t bytes, std::size_t asked) {
  Block& block = blocks_.at(at);
  free_.erase(key(at, block));
  const std::size_t left = block.bytes - bytes;
  if (!settings_.exact && left >= (block.small ? 512 : kMiB + 1)) {
    Block rest = block;
    rest.bytes = left;
    block.bytes = bytes;
    free_.insert(key(at + bytes, rest));
    blocks_.emplace(at + bytes, rest);
  }
  block.used = true;
  block.asked = asked;
  count_block(block, 1);
}

// ---- Taking back ----

void Memory::free(void* data) {
  if (data == nullptr) {
    return;
  }
  const std::lock_guard lock(mutex_);
  const std::size_t at = offset_of(data);
  Block& block = blocks_.at(at);
  TORCH_INTERNAL_ASSERT(block.used);
  count_block(block, -1);
  block.used = false;
  Waiting waiting{at, {}};
  for (int stream = 0; stream < kStreams; ++stream) {
    if ((block.streams >> stream & 1) != 0) {
      waiting.until.emplace_back(stream, queued(device_, stream));
    }
  }
  block.streams = 0;
  block.waiting = !waiting.until.empty();
  if (block.waiting) {
    waiting_.push_back(std::move(waiting));
  } else {
    settle(at);
  }
}

bool Memory::joins(Blocks::iterator left, Blocks::iterator right) {
  const auto open = [](const Block& one) { return !one.used && !one.waiting; };
  return open(left->second) && open(right->second) &&
         left->second.segment == right->second.segment &&
         left->first + left->second.bytes == right->first;
}

// A free block: joined to its neighbours, or given back.
void Memory::settle(std::size_t at) {
  auto it = blocks_.find(at);
  it->second.waiting = false;
  if (const auto next = std::next(it); next != blocks_.end() && joins(it, next)) {
    free_.erase(key(next->first, next->second));
    it->second.bytes += next->second.bytes;
    blocks_.erase(next);
  }
  if (it != blocks_.begin() && joins(std::prev(it), it)) {
    const auto before = std::prev(it);
    free_.erase(key(before->first, before->second));
    before->second.bytes += it->second.bytes;
    blocks_.erase(it);
    it = before;
  }
  free_.insert(key(it->first, it->second));
  if (settings_.exact) {
    return_segment(it->first);
  }
}

// Blocks that streams of record() had still to come past.
void Memory::look_at_waiting(bool wait) {
  for (std::size_t i = 0; i < waiting_.size();) {
    bool over = true;
    for (const auto& [stream, far] : waiting_[i].until) {
      if (wait) {
        drain(device_, stream, /*tells=*/false);
      }
      over = over && reached(device_, stream, far);
    }
    if (!over) {
      ++i;
      continue;
    }
    for (const auto& [stream, far] : waiting_[i].until) {
      host_waited(device_, stream);
    }
    const std::size_t at = waiting_[i].at;
    waiting_.erase(waiting_.begin() + std::ptrdiff_t(i));
    settle(at);
  }
}

void Memory::record(void* data, int stream) {
  const std::lock_guard lock(mutex_);
  Block& block = blocks_.at(offset_of(data));
  if (stream != block.stream) {
    block.streams |= 1u << stream;
  }
}

// ---- Segments ----

std::size_t Memory::limit() const {
  // As CUDA has it: the fraction is of what the allocator reserves, without the context.
  return std::min(std::size_t(double(settings_.capacity) * settings_.fraction),
                  settings_.capacity - std::min(settings_.capacity, settings_.context));
}

bool Memory::buy(std::size_t bytes, int stream, bool small) {
  if (reserved() + bytes > limit()) {
    return false;
  }
  const std::size_t at = place(bytes);
  segments_[at] = bytes;
  const Block block{.bytes = bytes, .segment = ++bought_, .stream = stream, .small = small};
  blocks_.emplace(at, block);
  free_.insert(key(at, block));
  count(stats_.reserved_bytes, small, std::int64_t(bytes));
  count(stats_.segment, small, 1);
  ++stats_.num_device_alloc;
  return true;
}

// Addresses for a segment: those of one that went back, or new ones.
std::size_t Memory::place(std::size_t bytes) {
  const auto hole = std::find_if(holes_.begin(), holes_.end(),
                                 [bytes](const auto& one) { return one.second >= bytes; });
  std::size_t at = top_;
  std::size_t had = rounded_up(bytes, kPage);
  if (hole != holes_.end()) {
    at = hole->first;
    had = hole->second;
    holes_.erase(hole);
  } else {
    TORCH_CHECK(top_ + had < kReach, "sim: no addresses left");
    top_ += had;
  }
  if (had > bytes) {
    holes_[at + bytes] = had - bytes;
  }
  return at;
}

void Memory::return_segment(std::size_t at) {
  const Block block = blocks_.at(at);
  free_.erase(key(at, block));
  blocks_.erase(at);
  segments_.erase(at);
  count(stats_.reserved_bytes, block.small, -std::int64_t(block.bytes));
  count(stats_.segment, block.small, -1);
  ++stats_.num_device_free;
  for (int stream = 0; stream < kStreams; ++stream) {
    drain(device_, stream, /*tells=*/false);  // As cudaFree() waits.
  }
  void* data = address_at(device_, at);
  if (block.bytes >= 2 * kMiB) {
    madvise(host_address(data), block.bytes & ~(kPage - 1), MADV_DONTNEED);
  }
  forget(std::size_t(data), std::size_t(data) + block.bytes);
  auto it = holes_.emplace(at, block.bytes).first;
  const auto touch = [](auto left, auto right) {
    return left->first + left->second == right->first;
  };
  if (const auto next = std::next(it); next != holes_.end() && touch(it, next)) {
    it->second += next->second;
    holes_.erase(next);
  }
  if (it != holes_.begin() && touch(std::prev(it), it)) {
    std::prev(it)->second += it->second;
    holes_.erase(it);
  }
}

void Memory::release_cached() {
  std::vector<std::size_t> whole;
  for (const auto& [stream, small, bytes, segment, at] : free_) {
    if (const auto it = segments_.find(at); it != segments_.end() && it->second == bytes) {
      whole.push_back(at);
    }
  }
  for (const std::size_t at : whole) {
    return_segment(at);
  }
}

void Memory::empty_cache() {
  const std::lock_guard lock(mutex_);
  look_at_waiting(true);
  release_cached();
}

void Memory::set(const MemorySettings& settings) {
  empty_cache();
  const std::lock_guard lock(mutex_);
  TORCH_CHECK(settings.exact == settings_.exact || segments_.empty(),
              "sim: blocks are there; choose the way to allocate before the first");
  settings_ = settings;
}

void Memory::refuse_after(std::int64_t granted, std::int64_t count) {
  const std::lock_guard lock(mutex_);
  granted_ = granted;
  refused_ = count;
}

bool Memory::is_refused_on_request() {
  if (refused_ > 0 && granted_ > 0) {
    --granted_;
    return false;
  }
  return refused_ > 0 && refused_-- > 0;
}

// ---- Statistics ----

void Memory::count(c10::CachingAllocator::StatArray& stat, bool small, std::int64_t amount) {
  for (const std::size_t kind : {std::size_t{0}, std::size_t{small ? 1u : 2u}}) {
    if (amount >= 0) {
      stat[kind].increase(std::size_t(amount));
    } else {
      stat[kind].decrease(std::size_t(-amount));
    }
  }
}

void Memory::count_block(const Block& block, std::int64_t sign) {
  count(stats_.allocated_bytes, block.small, sign * std::int64_t(block.bytes));
  count(stats_.active_bytes, block.small, sign * std::int64_t(block.bytes));
  count(stats_.requested_bytes, block.small, sign * std::int64_t(block.asked));
  count(stats_.allocation, block.small, sign);
}

c10::CachingDeviceAllocator::DeviceStats Memory::stats() {
  const std::lock_guard lock(mutex_);
  return stats_;
}

void Memory::reset_peak() {
  const std::lock_guard lock(mutex_);
  for (auto* stat : {&stats_.allocated_bytes, &stats_.reserved_bytes, &stats_.active_bytes,
                     &stats_.requested_bytes, &stats_.allocation, &stats_.segment}) {
    for (auto& one : *stat) {
      one.reset_peak();
    }
  }
}

void Memory::reset_accumulated() {
  const std::lock_guard lock(mutex_);
  for (auto* stat :
       {&stats_.allocated_bytes, &stats_.reserved_bytes, &stats_.allocation, &stats_.segment}) {
    for (auto& one : *stat) {
      one.reset_accumulated();
    }
  }
  stats_.num_alloc_retries = stats_.num_ooms = 0;
  stats_.num_device_alloc = stats_.num_device_free = 0;
}

std::pair<std::size_t, std::size_t> Memory::info() {
  const std::lock_guard lock(mutex_);
  const std::size_t used = reserved() + settings_.context;
  return {settings_.capacity - std::min(settings_.capacity, used), settings_.capacity};
}

Memory& memory(int device) {
  // Never destroyed: tensors of Python's modules go after it would.
  static auto* all = new std::array<Memory, kDevices>{Memory(0), Memory(1)};
  return (*all)[std::size_t(device)];
}

}  // namespace sim
