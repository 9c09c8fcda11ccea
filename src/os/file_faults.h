// SPDX-License-Identifier: Apache-2.0
//
// File faults: makes the n-th read, write, sync or change of a name fail, end short, or take long.
//
// For tests of what a caller does when the disk fails. File (file.cpp) asks before each system
// call, AioTransfers of each transfer that the kernel says has ended; with no fault set that costs
// one relaxed load.
//
// Threads: thread-safe.   Memory: one fixed record.
#pragma once

#include <cstddef>
#include <cstdint>

namespace plimsoll {

/// kRename: an exchange of two names, too. kRemove: of a file or a directory. kAioRead,
/// kAioWrite: one of a batch that goes to the kernel at once; while any other kind is armed there
/// are no such batches.
/// kOpenToWrite: opening a file to change it (a read-only disk); kLock: taking a lock (a file
/// system without them). kAny is none of these four.
enum class FileCall : std::uint8_t {
  kRead,
  kWrite,
  kSync,
  kRename,
  kMakeDirectory,
  kRemove,
  kAny,
  kAioRead,
  kAioWrite,
  kOpenToWrite,
  kLock
};

struct FileFault {
  FileCall call{FileCall::kWrite};
  std::int64_t nth{1};  ///< Which call of that kind fails, from 1, counted from set_file_fault().
  int os_errno{5};      ///< What it fails with (EIO); 0: a write or read ends short instead, and a
                        ///< sync of a file makes nothing durable (power_loss.h) but says it did.
  std::size_t short_bytes{0};  ///< With os_errno 0: how many bytes that call transfers.
  bool keeps_failing{false};   ///< Every later call of that kind fails too (a full disk).
  std::int64_t delay_us{0};    ///< Not 0: it succeeds, so many microseconds later (a slow disk).
  bool lost{false};            ///< kAioRead, kAioWrite: it ends, but nobody is ever told.
};

/// Arms one fault, replacing any other; counting begins at once.
void set_file_fault(const FileFault& fault) noexcept;
void clear_file_fault() noexcept;
/// Whether a fault of another kind than those of batches is.
[[nodiscard]] bool file_fault_armed() noexcept;

/// How many calls of the armed fault's kind have been made since it was set.
[[nodiscard]] std::int64_t file_fault_calls() noexcept;

/// What File must do instead of its system call.
struct FaultVerdict {
  bool fails{false};
  int os_errno{0};
  std::size_t bytes_max{SIZE_MAX};  ///< Transfer at most this many bytes.
  bool lost{false};
};
[[nodiscard]] FaultVerdict ask_file_fault(FileCall call) noexcept;

/// Sets and clears a fault with a scope.
class ScopedFileFault {
 public:
  explicit ScopedFileFault(const FileFault& fault) noexcept { set_file_fault(fault); }
  ~ScopedFileFault() { clear_file_fault(); }
  ScopedFileFault(const ScopedFileFault&) = delete;
  ScopedFileFault& operator=(const ScopedFileFault&) = delete;
};

}  // namespace plimsoll
