// SPDX-License-Identifier: Apache-2.0
//
// What a process and all its descendants hold, each shared page counted once over its sharers.
//
// The proportional share (PSS, /proc/PID/smaps_rollup) and not the resident size, which counts what
// forked workers share once for each of them. A large process that shares with no other, by its
// resident sizes (/proc/PID/status): walking its pages would hold it up, for 10 ms a gigabyte. What
// has been forked and made no exec since shares; its stack stands where its parent's does.
//
// Threads: pure functions over files.
// Memory:  16 bytes a process of the machine while one call lasts, 80 of each that is read; the
// answer names kNamedMost.
#pragma once

#include <cstdint>
#include <filesystem>
#include <optional>
#include <string>
#include <vector>

#include "plimsoll/result.h"

namespace plimsoll {

/// Bytes of PSS, and what they are. The kinds are 0 where the kernel does not tell (before 5.4).
struct ProcessUse {
  int pid{0};
  int parent{0};
  std::string name{};  ///< At most 15 characters, as the kernel keeps it.
  std::int64_t bytes{0};
  std::int64_t anonymous{0};
  std::int64_t file{0};
  std::int64_t shared{0};         ///< Shared memory and tmpfs: a DataLoader's batches in flight.
  std::int64_t page_tables{0};    ///< Beside `bytes`: what the kernel needs to map them (VmPTE).
  std::int64_t resident_peak{0};  ///< Highest resident size so far (VmHWM).

  /// What no file stands behind, so that the kernel cannot take it back: anonymous and shared
  /// memory. All of it where the kernel does not tell the kinds.
  [[nodiscard]] std::int64_t unbacked() const noexcept {
    return anonymous + shared > 0 ? anonymous + shared : bytes;
  }
};

struct TreeUse {
  static constexpr std::size_t kNamedMost = 64;
  std::int64_t bytes{0};
  std::int64_t anonymous{0};
  std::int64_t file{0};
  std::int64_t shared{0};
  std::int64_t page_tables{0};
  std::int64_t resident_peak{0};  ///< Highest resident size any one of them has had since exec.
  int processes{0};
  std::vector<ProcessUse> largest{};  ///< Up to kNamedMost of them, largest first.

  /// As ProcessUse::unbacked().
  [[nodiscard]] std::int64_t unbacked() const noexcept {
    return anonymous + shared > 0 ? anonymous + shared : bytes;
  }
};

/// Every living descendant of `root`, itself left out; those reparented to it are among them. From
/// the kernel's lists of children, or by looking at all processes where it keeps none.
/// Errors: kIo when /proc cannot be listed.
[[nodiscard]] Result<std::vector<int>> descendants(int root,
                                                   const std::filesystem::path& proc = "/proc");

/// One process; nothing when it has ended. Who may not be read counts with its resident size.
[[nodiscard]] std::optional<ProcessUse> read_process(int pid,
                                                     const std::filesystem::path& proc = "/proc");

/// Adds up these processes. Who has ended is left out; who may not be read counts with its resident
/// size. Of a process above 64 MiB that shares with none of them, nor with its parent, `file` is
/// what is resident.
[[nodiscard]] TreeUse read_tree(const std::vector<int>& pids,
                                const std::filesystem::path& proc = "/proc");

/// When a process began, in the kernel's ticks since the machine did: with the pid, which one it
/// is. Nothing when it has ended.
[[nodiscard]] std::optional<std::int64_t> process_began(
    int pid, const std::filesystem::path& proc = "/proc");

/// Whether a process is stopped: by SIGSTOP or another such signal, or by a debugger.
[[nodiscard]] bool process_stopped(int pid, const std::filesystem::path& proc = "/proc");

/// Where its stack begins: kept by fork(), random at each exec, so that it is the same of processes
/// that share pages. 0 where the kernel does not tell, or it has ended.
[[nodiscard]] std::uint64_t process_stack(int pid, const std::filesystem::path& proc = "/proc");

}  // namespace plimsoll
