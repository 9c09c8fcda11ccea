// SPDX-License-Identifier: Apache-2.0
//
// RangeLocks: locks on single bytes of a file, seen by every process that opens it.
//
// The bytes need not exist: what is behind the end of a file is a name for a lock. A lock belongs
// to this object (to its open file description), so two objects of one process exclude each other
// too, and it ends with the process that held it, however that ended: a child forked meanwhile has
// no part in it.
//
// Threads: thread-compatible.   Memory: a descriptor.
#pragma once

#include <cstdint>
#include <filesystem>

#include "os/fork.h"
#include "plimsoll/result.h"

namespace plimsoll {

class RangeLocks {
 public:
  enum class Kind : std::uint8_t { kShared, kExclusive /* needs a writable file */ };
  enum class Access : std::uint8_t { kRead, kReadWrite, kCreate /* where there is no file */ };
  enum class Taken : std::uint8_t { kYes, kHeldByOthers, kNoLocksThere };

  /// With kCreate a link is not followed. Errors: kNotFound, kIo.
  static Result<RangeLocks> open(const std::filesystem::path& path, Access access);

  RangeLocks() noexcept = default;
  RangeLocks(RangeLocks&&) noexcept = default;
  RangeLocks& operator=(RangeLocks&& other) noexcept;
  RangeLocks(const RangeLocks&) = delete;
  RangeLocks& operator=(const RangeLocks&) = delete;
  ~RangeLocks();  ///< Ends all of them.

  /// Takes the lock of a byte, if nobody's stands against it and the file system has locks.
  [[nodiscard]] Taken try_lock(std::int64_t byte, Kind kind) noexcept;
  /// As try_lock(), and waits for the others.
  Taken lock(std::int64_t byte, Kind kind) noexcept;
  void unlock(std::int64_t byte) noexcept;

  /// Whether somebody else holds a lock that stands against one of `kind` (kExclusive: any does) on
  /// one of `bytes` bytes, or with 0 on any from `first` on. False where the file system has none.
  [[nodiscard]] bool held_by_others(std::int64_t first, std::int64_t bytes,
                                    Kind kind = Kind::kExclusive) const noexcept;

  [[nodiscard]] int descriptor() const noexcept { return file_.get(); }  ///< −1: not open.

 private:
  void unlock_all() noexcept;

  OwnDescriptor file_;
};

}  // namespace plimsoll
