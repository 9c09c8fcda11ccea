// SPDX-License-Identifier: Apache-2.0
//
// CommitPins: which commits of a table are being read by whom, told across processes.
//
// A reader pins a commit, the process that trains looks for pins when it replaces that commit in
// its superblock slot, and keeps the blocks of a pinned one. Both speak in locks on bytes far
// behind the end of `super`: a reader's is on the byte of its step, the writer's, while it replaces
// what is in a slot, on the byte of that slot. Each takes its own before it looks for the other's,
// so whatever their order at least one of them knows. The writer never waits; a reader waits at
// most for the commit under way. Locks end with who held them: a reader that was killed pins
// nothing.
//
// Reading order: docs/decisions/0007-pinned-commits.md, this file.
//
// Threads: single-owner.   Memory: a descriptor.
#pragma once

#include <cstdint>
#include <filesystem>

#include "os/range_locks.h"
#include "plimsoll/result.h"

namespace plimsoll {

class CommitPins {
 public:
  /// For the table whose superblocks are in `super`. Errors: kNotFound, kIo.
  static Result<CommitPins> open(const std::filesystem::path& super, bool writer);

  // ---- The writer ----

  /// Marks a slot as being replaced while it lives.
  class Replacing {
   public:
    Replacing(CommitPins& pins, int slot) noexcept;
    ~Replacing();
    Replacing(const Replacing&) = delete;
    Replacing& operator=(const Replacing&) = delete;
    /// Whether the commit of `step`, which the slot held, is pinned, or may be this moment.
    [[nodiscard]] bool pinned(std::int64_t step) const noexcept;

   private:
    CommitPins& pins_;
    int slot_;
    RangeLocks::Taken marked_;
  };
  [[nodiscard]] bool any() const noexcept;  ///< Whether any commit is pinned.

  // ---- A reader ----

  /// Pins the commit of `step`, whether there is one or not. On a file system without locks it does
  /// nothing: then nobody keeps the commit, and its reader finds pages that were written anew.
  void pin(std::int64_t step) noexcept;
  void unpin() noexcept;
  /// Waits until nobody is replacing what is in a slot. What it holds after that stays readable, if
  /// it is pinned.
  void await(int slot) noexcept;

 private:
  RangeLocks locks_;
  std::int64_t step_{-1};  // Pinned by this.
};

}  // namespace plimsoll
