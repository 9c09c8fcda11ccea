// SPDX-License-Identifier: Apache-2.0
//
// verdict_of: how a guarded command ended, and what would have helped, in words.
//
// The kernel's counters decide whether it was killed for memory; its output is never read.
//
// Threads: pure functions.   Memory: the strings.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "watch/guard.h"

namespace plimsoll {

enum class Ending : std::uint8_t {
  kDone,            ///< Its own exit, whatever the status.
  kKilledForLimit,  ///< The kernel killed it, or a process of it, at its limit.
  kKilledInCgroup,  ///< The same, at the limit of a cgroup around it.
  kStopped,         ///< The guard ended it over its limit.
  kMachineFull,     ///< Killed while the kernel was killing for want of memory on the machine.
  kKilled           ///< By somebody's SIGKILL; memory had nothing to do with it.
};

struct Verdict {
  Ending ending{};
  std::string summary{};              ///< One line.
  std::vector<std::string> advice{};  ///< Only when memory ended it.
};

/// `limit_bytes`: the one it ran under, 0 for none. `machine_bytes`: what the machine had available
/// for it when it began.
[[nodiscard]] Verdict verdict_of(const GuardReport& report, std::int64_t limit_bytes,
                                 std::int64_t machine_bytes);

/// "done", "killed_for_limit", "killed_in_cgroup", "stopped", "machine_full", "killed".
[[nodiscard]] const char* ending_name(Ending ending) noexcept;

}  // namespace plimsoll
