// SPDX-License-Identifier: Apache-2.0
//
// The arena as torch's CPU allocator.
//
// oneDNN frees through whichever allocator is current, so our deleter meets blocks that the
// displaced allocator made before us. It knows them by their address and hands them on. For the
// same reason a block's data pointer is its context, and every block we hand out, passed through
// or not, carries the one deleter.
#include <c10/core/Allocator.h>
#include <c10/core/CPUAllocator.h>
#include <c10/util/Exception.h>
#include <pthread.h>

#include <ATen/EmptyTensor.h>

#include <algorithm>
#include <utility>

#include "base/check.h"
#include "memory/look.h"
#include "plimsoll/torch.h"
#include "torch/arena_pages.h"
#include "torch/tensor_arena.h"
#include "watch/samples.h"

namespace plimsoll {
namespace {

// Immortal: tensors are freed by other objects' destructors at exit, in an order we do not choose.
struct Arena {
  ArenaPages pages;
  c10::Allocator* displaced{nullptr};
  c10::DeleterFnPtr displaced_delete{nullptr};
  std::atomic<std::int64_t> foreign_frees{0};
  std::atomic<bool> installed{false};
  Mutex installing;
};

Arena& arena() noexcept {
  static auto* const immortal = new Arena;
  return *immortal;
}

c10::Device host() {
  return c10::Device(c10::DeviceType::CPU);
}

// Reports a block of `bytes` (negative: freed) to torch's profiler, as its own allocators do.
void report(void* data, std::int64_t bytes) {
  if (c10::memoryProfilingEnabled()) {
    const ArenaStats stats = arena().pages.stats();
    c10::reportMemoryUsageToProfiler(data, bytes, static_cast<std::size_t>(stats.live_bytes),
                                     static_cast<std::size_t>(stats.leased_bytes), host());
  }
}

void delete_block(void* data) {
  if (data == nullptr) {
    return;
  }
  Arena& at = arena();
  if (!at.pages.owns(data)) {
    at.foreign_frees.fetch_add(1, std::memory_order_relaxed);
    at.displaced_delete(data);
    return;
  }
  if (Samples::tensors_shown()) {
    Samples::freed(data);
  }
  report(data, -at.pages.free(data));
}

class ArenaAllocator final : public c10::Allocator {
 public:
  c10::DataPtr allocate(std::size_t bytes) override {
    if (bytes == 0) {
      return {nullptr, nullptr, &delete_block, host()};
    }
    Arena& at = arena();
    if (at.pages.attached()) {
      constexpr auto kMax = static_cast<std::size_t>(INT64_MAX);
      const auto size = static_cast<std::int64_t>(std::min(bytes, kMax));
      auto block = at.pages.allocate(size);
      while (!block && room_made(block.error())) {  // It may take more: its cache has gone back.
        block = at.pages.allocate(size);
      }
      if (!block) {
        refuse(block.error());
      }
      if (block->data != nullptr) {
        report(block->data, block->bytes);
        if (Samples::tensors_shown()) {
          Samples::allocated(block->data, bytes);
        }
        return {block->data, block->data, &delete_block, host()};
      }
    }
    void* data = at.displaced->raw_allocate(bytes);
    return {data, data, &delete_block, host()};
  }

  c10::DeleterFnPtr raw_deleter() const override { return &delete_block; }

  void copy_data(void* to, const void* from, std::size_t bytes) const override {
    default_copy_data(to, from, bytes);
  }

 private:
  // Caches have given up memory for what was refused.
  static bool room_made(const Error& refusal) {
    const auto ledger = current_ledger();
    return ledger != nullptr && yield_caches(*ledger, refusal);
  }

  [[noreturn]] static void refuse(const Error& error) {
    const ArenaStats stats = arena().pages.stats();
    c10::reportOutOfMemoryToProfiler(error.requested_bytes,
                                     static_cast<std::size_t>(stats.live_bytes),
                                     static_cast<std::size_t>(stats.leased_bytes), host());
    // In the words of torch's own allocator too: those are what batch finders look for.
    C10_THROW_ERROR(OutOfMemoryError,
                    error.to_string() + " (DefaultCPUAllocator: can't allocate memory)");
  }
};

}  // namespace

ArenaPages& tensor_arena_pages() noexcept {
  return arena().pages;
}

Result<void> TensorArena::install() {
  Arena& at = arena();
  MutexLock lock(at.installing);
  if (at.installed) {
    return {};
  }
  c10::Allocator* current = c10::GetCPUAllocator();
  if (current == nullptr || current->raw_deleter() == nullptr) {
    return fail(ErrorCode::kInternal,
                "torch's CPU allocator has no raw deleter, so its blocks cannot be handed back",
                "import plimsoll before the library that replaced torch's allocator");
  }
  PLIMSOLL_TRY_VOID(at.pages.open(PageRuns::default_range_bytes()));
  at.displaced = current;
  at.displaced_delete = current->raw_deleter();
  // The child reads what is alive. The cache goes before: a page of it that is written to
  // afterwards would be there twice.
  ::pthread_atfork(
      [] {
        arena().pages.purge();
        arena().pages.before_fork();
      },
      [] { arena().pages.after_fork_in_parent(); }, [] { arena().pages.after_fork_in_child(); });
  // The highest priority: torch lets only an equal one displace us.
  static auto* const allocator = new ArenaAllocator;
  c10::SetCPUAllocator(allocator, 255);
  at.installed = true;
  const auto probe = at::detail::empty_cpu({16}, at::kFloat, false, std::nullopt);
  if (probe.storage().data_ptr().get_deleter() != &delete_block) {
    return fail(ErrorCode::kInternal, "torch did not take the tensor arena as its CPU allocator",
                "another library displaced it with the same priority");
  }
  return {};
}

Result<void> TensorArena::attach(Governor governor, std::int64_t cap_bytes) {
  PLIMSOLL_TRY_VOID(install());
  return arena().pages.attach(std::move(governor), cap_bytes);
}

void TensorArena::detach() noexcept {
  if (installed()) {
    arena().pages.detach();
  }
}

bool TensorArena::installed() noexcept {
  return arena().installed;
}

bool TensorArena::owns(const void* pointer) noexcept {
  return installed() && arena().pages.owns(pointer);
}

ArenaStats TensorArena::stats() noexcept {
  ArenaStats stats = arena().pages.stats();
  stats.foreign_frees = arena().foreign_frees.load(std::memory_order_relaxed);
  return stats;
}

void TensorArena::reset_peak() noexcept {
  arena().pages.reset_peak();
}

std::int64_t TensorArena::purge() noexcept {
  return installed() ? arena().pages.purge() : 0;
}

}  // namespace plimsoll
