// SPDX-License-Identifier: Apache-2.0
//
// Memory cgroups: which ones this process is in, and one of its own for a child.
//
// Versions 1 and 2 and the mixed layout are read; the memory controller is looked for in version 1
// first, as the kernel gives it to one version only.
//
// Threads: pure functions over files; MemoryCgroup: thread-compatible, join() in a forked child.
// Memory:  a few short strings and a descriptor.
#pragma once

#include <cstdint>
#include <filesystem>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "plimsoll/result.h"

namespace plimsoll {

/// One line of /proc/self/cgroup that matters to memory.
struct CgroupLine {
  bool version2{false};
  std::string path;  ///< Below the mount, as the kernel names it.
};

/// Of `proc_root`/PID/cgroup; 0: of this process. Empty: a kernel without cgroups.
[[nodiscard]] std::vector<CgroupLine> read_cgroup_lines(const std::filesystem::path& proc_root,
                                                        int pid = 0);

/// Where version 2 is mounted below `cgroup_root`, or version 1's memory controller.
[[nodiscard]] std::filesystem::path cgroup_mount(const CgroupLine& line,
                                                 const std::filesystem::path& cgroup_root);

/// The counter `name` of a file of lines "NAME NUMBER"; nothing when there is none.
[[nodiscard]] std::optional<std::int64_t> read_counter(const std::filesystem::path& path,
                                                       std::string_view name);

/// Anonymous and shared memory charged to the cgroup of this folder and to those below it, by its
/// memory.stat; 0 when that cannot be read.
[[nodiscard]] std::int64_t unbacked_bytes(const std::filesystem::path& folder);

/// The folder of the cgroup that a process's memory is charged to (0: this one's); empty where
/// there is none.
[[nodiscard]] std::filesystem::path memory_cgroup(
    int pid, const std::filesystem::path& proc_root = "/proc",
    const std::filesystem::path& cgroup_root = "/sys/fs/cgroup");

/// Processes that the kernel killed for memory in the cgroup of this folder; nothing where it does
/// not tell.
[[nodiscard]] std::optional<std::int64_t> oom_kills_in(const std::filesystem::path& folder);

/// The least limit of the cgroup of this folder and of those above it; 0: there is none.
[[nodiscard]] std::int64_t least_limit_in(std::filesystem::path folder);

/// The same on the whole machine, since it started; 0 where the kernel does not tell.
[[nodiscard]] std::int64_t machine_oom_kills();

/// What the kernel counts for a memory cgroup; 0 where it does not tell.
struct CgroupUse {
  std::int64_t bytes{0};       ///< Charged to it now, page cache included.
  std::int64_t peak_bytes{0};  ///< The most that was charged at once (version 2: since Linux 5.19).
  std::int64_t major_faults{0};  ///< Pages that had to be read from a disk.
  double stalled_seconds{0};     ///< Some task waited for memory (PSI); version 1: on the machine.
};

class MemoryCgroup {
 public:
  /// Makes a cgroup below this process's own that may hold `limit_bytes`, and no swap.
  /// Errors: kIo, saying which folder and why: often that this user may not, or (version 2) that
  /// the process's own cgroup has other processes in it.
  /// Those that earlier processes left there are removed before.
  static Result<MemoryCgroup> create(std::int64_t limit_bytes);

  /// Removes those of create() below this process's own cgroup that are empty and whose maker has
  /// ended: it was killed.
  static void remove_left_behind() noexcept;

  MemoryCgroup(MemoryCgroup&& other) noexcept;
  MemoryCgroup& operator=(MemoryCgroup&& other) noexcept;
  MemoryCgroup(const MemoryCgroup&) = delete;
  MemoryCgroup& operator=(const MemoryCgroup&) = delete;
  ~MemoryCgroup();  ///< Removes it; it must be empty by then.

  /// Moves the calling process in. For between fork and exec: async-signal-safe. False: errno.
  [[nodiscard]] bool join() const noexcept;

  /// Processes the kernel killed in it so far. Errors: kIo.
  [[nodiscard]] Result<std::int64_t> oom_kills() const;
  /// Whether its own limit was ever met; else who was killed in it was killed for another's.
  [[nodiscard]] bool met_limit() const;
  [[nodiscard]] CgroupUse use() const;
  [[nodiscard]] const std::filesystem::path& folder() const noexcept { return folder_; }

 private:
  MemoryCgroup() = default;
  Result<void> limit(std::int64_t bytes) const;

  bool version2_{false};
  std::filesystem::path folder_;  // Empty: none is held.
  int processes_{-1};             // Its cgroup.procs.
};

}  // namespace plimsoll
