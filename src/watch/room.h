// SPDX-License-Identifier: Apache-2.0
//
// least_room: how much more a process tree may hold, and which bound it meets first.
//
// The bounds are the run's limit, every memory cgroup the process is in, and what the machine has
// available. In a cgroup others may be charged as well: its own figures say how much is taken.
//
// Threads: pure functions over files.   Memory: a few short strings.
#pragma once

#include <cstdint>
#include <filesystem>
#include <string>

#include "plimsoll/result.h"

namespace plimsoll {

struct Room {
  std::string source{};         ///< "limit of the run", "cgroup v2 memory.max", "available".
  std::int64_t limit_bytes{0};  ///< The bound.
  std::int64_t left_bytes{0};   ///< Of it, for this tree; 0 where it is passed already.

  /// Seconds until it is passed at that growth; infinite where nothing grows.
  [[nodiscard]] double seconds_left(double bytes_per_second) const noexcept;
};

/// `pid`: a process of the tree. `held_bytes`: what the tree holds that no file stands behind.
/// `run_limit_bytes`: 0 for none. The roots exist so that tests can lay out trees.
/// Errors: kIo when /proc cannot be read.
[[nodiscard]] Result<Room> least_room(int pid, std::int64_t held_bytes,
                                      std::int64_t run_limit_bytes,
                                      const std::filesystem::path& proc_root = "/proc",
                                      const std::filesystem::path& cgroup_root = "/sys/fs/cgroup");

}  // namespace plimsoll
