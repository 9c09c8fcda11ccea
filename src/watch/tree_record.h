// SPDX-License-Identifier: Apache-2.0
//
// TreeRecord: judges the looks at a process tree, and keeps them in a file (look_history.h).
//
// For a run, by its own process (src/run/recorder.h); for any command, by its guard (guard.h).
//
// Threads: single-owner.   Memory: that of a Watch.
#pragma once

#include <filesystem>
#include <string>
#include <string_view>

#include "plimsoll/result.h"
#include "watch/look_history.h"
#include "watch/watch.h"

namespace plimsoll {

class TreeRecord {
 public:
  /// `steps`: looks are taken at steps; else at seconds. `command`: how the program was called.
  /// Errors: kIo.
  static Result<TreeRecord> open(const std::filesystem::path& file, int pid, bool steps,
                                 const std::string& command);

  /// Takes a look at step or second `at`. `more` has what the tree does not show: step, epoch,
  /// loss, limit. What cannot be written is lost, and the next look is tried again. Returns the
  /// verdict.
  Finding add(TreeLook seen, double at, const Inside& inside, std::string_view phase,
              KeptLook more);

  [[nodiscard]] Watch& watch() noexcept { return watch_; }

 private:
  TreeRecord(int pid, double width, LookHistory history, std::filesystem::path cgroup)
      : watch_(pid, width), history_(std::move(history)), cgroup_(std::move(cgroup)) {}
  Watch watch_;
  LookHistory history_;
  std::filesystem::path cgroup_;
  std::int64_t booted_{boot_seconds()};
};

}  // namespace plimsoll
