// SPDX-License-Identifier: Apache-2.0
//
// AioTransfers: many direct reads and writes with one system call, where the kernel offers Linux
// AIO.
//
// Against a thread per transfer: no thread has to wake, and the disk is told once of a whole batch.
// For direct I/O alone, because the kernel carries out buffered transfers within io_submit, one by
// one; so it does writes to where a file has no room yet. One that failed, ended short or was never
// reported is left to other means; nothing is reported before the kernel has let go of its memory.
// What the caller does with one that has ended it does while the next ones are under way.
// Source: io_setup(2), io_submit(2), io_getevents(2); measured in docs/decisions/0008.
//
// Threads: thread-safe; up to kContexts batches at a time.
// Memory:  a ring of kUnderWay events per context in the kernel, 8 KiB; 15 KiB of the caller's
//          stack.
#pragma once

#include <array>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <span>

#include "base/mutex.h"

namespace plimsoll {

struct IoRequest;

class AioTransfers {
 public:
  static constexpr std::size_t kUnderWay = 128;  ///< Of one batch at the disk at once.
  static constexpr int kContexts = 8;

  /// `patience`: when none has ended for so long, those under way count as lost.
  explicit AioTransfers(std::chrono::milliseconds patience = std::chrono::seconds(30)) noexcept
      : patience_(patience) {}
  ~AioTransfers();
  AioTransfers(const AioTransfers&) = delete;
  AioTransfers& operator=(const AioTransfers&) = delete;

  /// Carries out reads and writes of direct files, syncs nothing, and returns true; or begins none
  /// and returns false, because the kernel refuses or all contexts are in use. `ended(i, whole)` is
  /// called on this thread for each request, with others under way; one that was not transferred
  /// whole has to be tried by other means. It must not throw.
  bool run(std::span<const IoRequest> requests,
           const std::function<void(std::size_t, bool)>& ended);

 private:
  struct Context {
    std::uint64_t id{0};  // The kernel's; 0: not made yet.
    bool taken{false};
  };
  struct UnderWay;
  std::size_t submit(std::uint64_t context, std::span<const IoRequest> requests, std::size_t first,
                     UnderWay& under_way);
  Context* take();
  void give_back(Context& context);

  const std::chrono::milliseconds patience_;
  Mutex mutex_;
  std::array<Context, kContexts> contexts_ PLIMSOLL_GUARDED_BY(mutex_){};
  bool refused_ PLIMSOLL_GUARDED_BY(mutex_){false};
};

}  // namespace plimsoll
