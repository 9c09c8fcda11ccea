// SPDX-License-Identifier: Apache-2.0
//
// kernel_kills: whom the kernel killed for memory, by its own log, where that may be read.
//
// Threads: pure functions.   Memory: the newest kKillsMost lines that say so.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

namespace plimsoll {

struct KernelKill {
  int pid{0};
  std::string name{};     ///< At most 15 characters.
  bool of_cgroup{false};  ///< At a cgroup's limit; else for want of memory on the machine.
  double seconds{0};      ///< Since the machine started.
  std::int64_t anonymous_bytes{0};  ///< That it held; 0 where the line does not say.
};

inline constexpr std::size_t kKillsMost = 256;

/// What one record of /dev/kmsg says: "6,1234,5678901234,-;Memory cgroup out of memory: Killed
/// process 4711 (python) …". Nothing for any other.
[[nodiscard]] std::optional<KernelKill> parse_kill(std::string_view record);

/// Those that the log still has, oldest first; nothing where it may not be read (it takes root, or
/// kernel.dmesg_restrict=0).
[[nodiscard]] std::optional<std::vector<KernelKill>> kernel_kills();

}  // namespace plimsoll
