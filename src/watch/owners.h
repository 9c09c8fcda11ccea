// SPDX-License-Identifier: Apache-2.0
//
// Whose memory it is: what a look saw, by owner.
//
// From outside a process's own anonymous memory is one owner, its heap. What it says of itself, in
// its process or by its run's status, parts the heap: tensors, other leases, Python's arenas, the
// native heap in use and what the allocator retains. Of the rest, what was there before the run is
// an owner: code, interpreter, libraries. What came since is unexplained.
//
// Threads: pure functions.   Memory: Holdings, 96 bytes.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>

#include "watch/tree_look.h"

namespace plimsoll {

enum class Owner : std::uint8_t {
  kTensors,      ///< Torch's, as the governor's ledger has them.
  kLeased,       ///< Other leases: rows, features, the loader's ring.
  kPython,       ///< Arenas of Python's objects.
  kNative,       ///< Allocated with malloc() and in use.
  kHeap,         ///< Anonymous memory of the process, where nothing parts it.
  kRetained,     ///< Freed, and kept by malloc().
  kUnexplained,  ///< Anonymous memory of the process that came since, and none of these has.
  kShared,       ///< Shared memory of the whole tree, batches in flight among it.
  kChildren,     ///< Anonymous memory of descendants, beside what they share with the process.
  kFiles,        ///< Mapped files: the kernel takes them back.
  kPageTables,   ///< What the kernel needs to map all that.
  kBefore        ///< Anonymous memory of the process that was there before the run.
};
inline constexpr std::size_t kOwnerCount = 12;

/// "tensors", "leased", "python", "native", "heap", "retained", "unexplained", "shared",
/// "children", "files", "page tables", "before the run".
[[nodiscard]] const char* owner_name(Owner owner) noexcept;

/// What a process says of itself, in bytes; −1 where it does not.
struct Inside {
  std::int64_t tensors{-1};
  std::int64_t leased{-1};
  std::int64_t python{-1};
  std::int64_t native{-1};
  std::int64_t retained{-1};
  std::int64_t before{-1};   ///< Beside what these have: there before the run.
  bool malloc_later{false};  ///< Of a look that did not ask: native and retained as they were.
};

/// Bytes by owner; −1 of one that is not known apart.
class Holdings {
 public:
  Holdings() { bytes_.fill(-1); }
  Holdings(const TreeLook& look, const Inside& inside);
  [[nodiscard]] std::int64_t of(Owner owner) const noexcept {
    return bytes_[static_cast<std::size_t>(owner)];
  }

 private:
  std::array<std::int64_t, kOwnerCount> bytes_{};
};

}  // namespace plimsoll
