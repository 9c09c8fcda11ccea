// SPDX-License-Identifier: Apache-2.0
//
// Where a memory limit comes from, and what the process holds now.
//
// The limit is the smallest of: the user's, every ancestor cgroup's (v2 memory.max and memory.high,
// v1 memory.limit_in_bytes), SLURM's, and the machine's available memory. With none given by the
// user it is 80 % of the smallest other candidate. Every candidate can be printed.
//
// Threads: pure functions over files.   Memory: a few short strings.
#pragma once

#include <cstdint>
#include <filesystem>
#include <functional>
#include <string>
#include <vector>

#include "plimsoll/result.h"

namespace plimsoll {

/// One thing that bounds the process.
struct LimitCandidate {
  std::string source;  ///< "user", "cgroup v2 memory.max", "SLURM_MEM_PER_NODE", "available", …
  std::string where;   ///< The file, the variable or the option it was read from.
  std::int64_t bytes{0};  ///< The bound in bytes.
};

/// All candidates, and the one that holds.
struct LimitReport {
  std::vector<LimitCandidate> candidates;  ///< In the order looked up; at least one.
  std::int64_t limit_bytes{0};
  std::size_t winner{0};  ///< Index into candidates.
  bool defaulted{false};  ///< True: no user limit, so limit_bytes is 80 % of the winner.

  /// One line: "768.0 MiB (user: --memory-limit)" or "18.4 GiB (80 % of available: /proc/meminfo)".
  [[nodiscard]] std::string explain() const;
};

/// Where to look. The roots exist so that tests can lay out fake trees.
struct LimitQuery {
  std::string user_limit{};                   ///< "", "6GiB", "25%" (of the machine).
  std::string user_source{"--memory-limit"};  ///< What to call it in the report.
  std::int64_t resident_bytes{0};             ///< Held already: no part of what is available.
  int pid{0};                                 ///< Whose cgroups; 0: this process's.
  std::filesystem::path proc_root{"/proc"};
  std::filesystem::path cgroup_root{"/sys/fs/cgroup"};
  std::function<const char*(const char*)> getenv{};  ///< Default: ::getenv.
};

/// Finds every bound that applies to this process, or to another of the machine.
/// Errors: kInvalidArgument for an unreadable user limit; kIo when /proc cannot be read.
[[nodiscard]] Result<LimitReport> find_limit(const LimitQuery& query);

/// What the operating system charges a process, in bytes.
struct Resident {
  std::int64_t anonymous{0};  ///< RssAnon: heap, stacks, arenas.
  std::int64_t file{0};       ///< RssFile: mapped files, code; the kernel can take these back.
  std::int64_t shared{0};     ///< RssShmem.
  std::int64_t swapped{0};    ///< VmSwap.
  std::int64_t peak{0};       ///< VmHWM: the highest total so far.
  [[nodiscard]] std::int64_t total() const noexcept { return anonymous + file + shared; }
};

/// Reads /proc/PID/status (PID 0: this process). Allocates nothing.
/// Errors: kIo.
[[nodiscard]] Result<Resident> read_resident(int pid = 0);

/// How much this process may map: the smaller one of RLIMIT_AS (ulimit -v) and RLIMIT_DATA
/// (ulimit -d), which counts what is private and writable; INT64_MAX where there is neither. A
/// reservation counts though nothing stands behind it. May be called from a terminate handler.
[[nodiscard]] std::int64_t address_limit_bytes() noexcept;

/// Free bytes for an ordinary user on the file system of `directory` (its nearest existing parent).
/// Errors: kIo.
[[nodiscard]] Result<std::int64_t> free_disk_bytes(const std::filesystem::path& directory);

}  // namespace plimsoll
