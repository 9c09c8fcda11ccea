// SPDX-License-Identifier: Apache-2.0
//
// Plimsoll inside LibTorch: the tensor arena, and tensors over leased bytes without copying.
//
// The arena is a c10 CPU allocator in one reserved address range. While a governor is attached
// every tensor byte is leased (Tag::kTensor); otherwise it passes through to the allocator it
// displaced. It is immortal: never uninstalled, only switched.
//
// Threads: thread-safe, except install() and attach(), which want no torch operator running.
// Memory:  address space, a page table of 0.4 % of the bytes in use, and the leased bytes.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <string>

#include <torch/types.h>

#include "plimsoll/arena_stats.h"
#include "plimsoll/governor.h"
#include "plimsoll/result.h"

namespace plimsoll {

class TensorArena {
 public:
  /// Installs the arena as torch's CPU allocator (once per process) and verifies that a new
  /// tensor comes from it. Errors: kIo (address space), kInternal (torch did not take it).
  static Result<void> install();

  /// From now on tensors are leased from `governor`. `cap_bytes` bounds them.
  /// A refusal is thrown as c10::OutOfMemoryError (torch.OutOfMemoryError) carrying our text.
  /// Installs the arena first where that has not been done. Ends an earlier attachment; when the
  /// governor ends first, new tensors pass through. A forked child always passes through.
  /// Errors: as install(); kInvalidArgument for an empty governor or in a forked child.
  static Result<void> attach(Governor governor, std::int64_t cap_bytes = kUncapped);

  /// New tensors pass through again; those alive keep their leases.
  static void detach() noexcept;

  [[nodiscard]] static bool installed() noexcept;
  [[nodiscard]] static bool owns(const void* pointer) noexcept;
  [[nodiscard]] static ArenaStats stats() noexcept;
  static void reset_peak() noexcept;

  /// Gives every free page back to the system; returns the bytes.
  static std::int64_t purge() noexcept;
};

/// What clean_up() gave back.
struct CleanUp {
  std::int64_t arena_bytes{0};            ///< Free pages of the arena.
  std::int64_t resident_before_bytes{0};  ///< Of the whole process.
  std::int64_t resident_after_bytes{0};
  double seconds{0.0};

  [[nodiscard]] std::int64_t freed_bytes() const noexcept {
    return resident_before_bytes - resident_after_bytes;
  }
};

/// Gives back to the system what nobody uses: the arena's free pages, and the heap's
/// (malloc_trim). Tensors alive are not touched, gradients among them; no result changes.
/// Errors: kIo when the process's own counters cannot be read.
Result<CleanUp> clean_up();

/// Fixes what makes torch's results depend on the run: deterministic algorithms on, memory not
/// filled, `compute_threads` threads. MKL_CBWR must be set before the process first multiplies.
/// Errors: kInvalidArgument: it is not set, or OpenMP makes a team of another size.
Result<void> make_deterministic(int compute_threads);

/// Fixes glibc's thresholds and number of heaps, and caps oneDNN's cache of primitives (256,
/// unless DNNL_PRIMITIVE_CACHE_CAPACITY is set): what torch allocates beside tensors then goes
/// back to the system. Call it before the first operator; oneDNN reads its cap once.
void fix_heap() noexcept;

/// A CPU tensor over `bytes`, which `owner` keeps alive. Copies nothing.
/// Requires: bytes.size() == product(shape) × the size of dtype.
at::Tensor tensor_over(std::span<std::byte> bytes, at::IntArrayRef shape, at::ScalarType dtype,
                       std::shared_ptr<void> owner);

}  // namespace plimsoll
