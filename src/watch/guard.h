// SPDX-License-Identifier: Apache-2.0
//
// run_guarded: runs a command under a memory limit and tells what became of it.
//
// In a memory cgroup of its own, where one can be made, the kernel holds the limit, between two
// looks too. Else the command and all its descendants are looked at several times a second
// (tree_look.h); over the limit it is asked to end, so that it may save its work, and is killed
// when it goes on growing. Orphans of the command stay in the tree (they become children of the
// guard), and what it leaves behind is ended with it. Where the kernel kills for memory it chooses
// the command before the guard (oom_choice.h). With signals of the user's
// (alerts.h) it is ended before the limit, in a cgroup too: what is left is looked at every 5 to
// 250 ms, also while what outlived the command is ended: it is asked, and killed five seconds
// later, or sooner when next to nothing is left.
//
// Threads: one call at a time, in a process with no other children; blocks SIGINT, SIGTERM, SIGHUP
//          and SIGCHLD while it runs, and hands the first three on. The command is told when the
//          guard dies.
// Memory:  see tree_look.h and climb.h.
#pragma once

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include <sys/types.h>

#include "os/process_tree.h"
#include "plimsoll/result.h"
#include "watch/alerts.h"
#include "watch/climb.h"

namespace plimsoll {

struct GuardOptions {
  std::vector<std::string> command{};  ///< Looked up along PATH.
  std::int64_t limit_bytes{0};         ///< 0: none, it is only watched.
  std::int64_t alert_bytes{0};         ///< `tell` when it holds more than this; 0: never.
  bool cgroup{true};                   ///< False: never made.
  AlertOptions alerts{};               ///< Also by which signals it is ended before its limit.
  std::string record{};  ///< Folder in which looks are kept (look_history.h); "": none.
  std::chrono::milliseconds interval{250};  ///< From the end of a look to the next, or longer.
  std::chrono::milliseconds grace{10'000};  ///< From being asked to end to being killed.
  pid_t keeper{0};  ///< The command ends when this parent has (keeper.h); 0: it has none.
  std::function<void(const std::string&)> tell{};  ///< What happens meanwhile, in lines.
};

/// Whose limit was met when the kernel killed for memory.
enum class Killer : std::uint8_t { kLimit, kCgroup, kMachine };

struct GuardReport {
  int status{0};            ///< The command's exit status, or 128 + the signal that ended it.
  bool in_cgroup{false};    ///< The kernel held the limit.
  std::string no_cgroup{};  ///< Why it did not.
  bool stopped{false};      ///< The guard ended it for being over the limit.
  int signal{0};            ///< The first that alerts sent it; 0: none.
  bool asked{false};        ///< A signal to end came from outside, and was handed on.
  TreeUse peak{};  ///< At the look that saw most: a sample, so the true peak may be higher.
  std::int64_t process_peak_bytes{0};  ///< Highest resident size of one process, by the kernel.
  std::int64_t charged_peak_bytes{0};  ///< Of its cgroup, by the kernel, page cache included; or 0.
  std::int64_t oom_kills{0};           ///< Processes killed for memory in its cgroup, whosever.
  Killer killer{Killer::kLimit};       ///< Its own limit, a cgroup's around it, or the machine.
  std::int64_t killer_limit_bytes{0};  ///< The limit of that cgroup around it.
  std::int64_t machine_oom_kills{0};   ///< On the whole machine meanwhile.
  std::string killed{};                ///< Whom the kernel killed: "PID 12 (python)"; "": nobody.
  Growth growth{};                     ///< How it came to its peak.
  double stalled_seconds{0};           ///< It waited for memory so long while its cgroup was full.
  std::int64_t major_faults{0};        ///< Pages that its cgroup read from a disk.
  int left_behind{0};                  ///< Processes that outlived the command and were ended.
  double seconds{0};

  /// The highest of the three peaks, none of which sees everything.
  [[nodiscard]] std::int64_t peak_bytes() const noexcept {
    return std::max({peak.bytes, process_peak_bytes, charged_peak_bytes});
  }
};

/// Errors: kNotFound, kIo when the command cannot be started; kIo when /proc cannot be read, or the
///         folder of `record` cannot be made.
Result<GuardReport> run_guarded(const GuardOptions& options);

}  // namespace plimsoll
