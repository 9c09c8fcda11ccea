// SPDX-License-Identifier: Apache-2.0
//
// explain_end: how a run ended, and who held the memory.
//
// From, in this order: the lock and the run's own last word (status.json), how `plimsoll run` saw
// its command end (ending.json), the kernel's counters then and now, the kernel's log where it may
// be read, and the last looks (looks.bin). The output of a program is never read.
//
// Threads: pure functions over files.   Memory: look_history.h's kBytes; the strings.
#pragma once

#include <cstdint>
#include <filesystem>
#include <optional>
#include <string>
#include <vector>

#include "plimsoll/result.h"
#include "run/ended_command.h"
#include "run/run_folder.h"
#include "watch/kernel_log.h"
#include "watch/look_history.h"
#include "watch/watch.h"

namespace plimsoll {

enum class EndCause : std::uint8_t {
  kRunning,
  kFinished,
  kAsked,          ///< By a signal, Ctrl-C, `plimsoll stop`.
  kPressure,       ///< It stopped itself, with a commit, before the limit.
  kRefused,        ///< The governor refused memory.
  kStopped,        ///< `plimsoll run` ended it over its limit, or by the signal chosen.
  kKilledAtLimit,  ///< By the kernel, at the limit of `plimsoll run`.
  kKilledCgroup,   ///< By the kernel, in a cgroup that somebody else had made.
  kKilledMachine,  ///< By the kernel, as the machine had no memory left.
  kKilled,         ///< By SIGKILL or without a word, and not for memory as far as is known.
  kDisk,           ///< Disk full.
  kFailed,         ///< An exception, or an exit status other than 0.
  kRestarted       ///< The machine was.
};

/// "running", "finished", "asked", "pressure", "refused", "stopped", "killed_at_limit",
/// "killed_in_cgroup", "killed_on_machine", "killed", "disk", "failed", "restarted".
[[nodiscard]] const char* cause_name(EndCause cause) noexcept;

/// A process whose memory grew, as far as looks go back.
struct Grower {
  int pid{0};
  std::string name{};
  bool child{false};  ///< A worker; else the process of the run itself.
  std::int64_t bytes{0};
  double seconds{0};
  std::int32_t epoch{0};  ///< In which most of it came, from 0, …
  std::string phase{};    ///< … and what the run did then.
};

struct Why {
  EndCause cause{EndCause::kRunning};
  std::string summary{};                ///< One line.
  std::vector<std::string> evidence{};  ///< What it is told from, a line each.
  std::vector<std::string> advice{};
  std::optional<Grower> grower{};
  std::optional<RunView> run{};  ///< Of a run; none of a command with --record.
  std::optional<EndedCommand> command{};
  LookHistory::Kept kept{};  ///< Of all lives; empty where no looks were kept.

  /// Whether memory ended it.
  [[nodiscard]] bool memory() const noexcept;
  /// Whether it ended as nobody wished: false while it runs, when it finished or was asked to end.
  [[nodiscard]] bool incident() const noexcept;
  /// The last look of the newest life before it ended; nullptr where there is none.
  [[nodiscard]] const KeptLook* last_look() const noexcept;
  [[nodiscard]] std::string to_json() const;
  [[nodiscard]] std::string to_text() const;
};

/// What the kernel says now; tests bring their own.
struct KernelNow {
  std::int64_t booted{0};
  std::int64_t machine_oom_kills{0};
  std::optional<std::int64_t> cgroup_oom_kills{};  ///< Of the run's cgroup, where it still is.
  std::optional<std::vector<KernelKill>> log{};    ///< None: it may not be read.
  std::int64_t cgroup_limit_bytes{0};              ///< 0: none, or gone.
};
[[nodiscard]] KernelNow kernel_now(const std::filesystem::path& cgroup);

/// Errors: kNotFound where `root` is neither a run nor a folder of `plimsoll run --record`;
///         kCorrupt.
[[nodiscard]] Result<Why> explain_end(const std::filesystem::path& root);
[[nodiscard]] Result<Why> explain_end(const std::filesystem::path& root, const KernelNow& kernel);

/// What a look had to say of growth.
[[nodiscard]] Finding finding_of(const KeptLook& look);

/// Who grew most among the processes of the looks of one life; none by less than 16 MiB.
[[nodiscard]] std::optional<Grower> who_grew(const LookHistory::Kept& kept);

}  // namespace plimsoll
