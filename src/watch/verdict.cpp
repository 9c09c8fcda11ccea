// SPDX-License-Identifier: Apache-2.0
#include "watch/verdict.h"

#include <algorithm>
#include <csignal>
#include <map>

#include <fmt/format.h>

#include "plimsoll/bytes.h"

namespace plimsoll {
namespace {

constexpr int kKilledStatus = 128 + SIGKILL;
constexpr double kWorthNaming = 0.25;  // Share of the peak.
constexpr double kSteadyGrowth = 0.1;  // The same, within the last minute.

Ending ending_of(const GuardReport& report) {
  const bool killed = report.status == kKilledStatus;
  if (report.stopped) {
    return Ending::kStopped;
  }
  if (report.oom_kills > 0 && report.status != 0) {
    return Ending::kKilledForLimit;
  }
  if (killed) {
    return report.machine_oom_kills > 0 ? Ending::kMachineFull : Ending::kKilled;
  }
  return Ending::kDone;
}

std::string held(const GuardReport& report, std::int64_t limit_bytes) {
  const TreeUse& peak = report.peak;
  std::string text = format_bytes(peak.bytes);
  if (limit_bytes > 0) {
    text += fmt::format(" of {}", format_bytes(limit_bytes));
  }
  text += fmt::format(" in {} {}", peak.processes, peak.processes == 1 ? "process" : "processes");
  if (peak.anonymous + peak.shared + peak.file > 0) {
    text += fmt::format(" ({} their own, {} shared memory, {} files)", format_bytes(peak.anonymous),
                        format_bytes(peak.shared), format_bytes(peak.file));
  }
  return text;
}

std::string ended(const GuardReport& report, std::int64_t limit_bytes, Ending ending) {
  switch (ending) {
    case Ending::kStopped:
      return fmt::format("stopped: it held {}, over the limit of {}",
                         format_bytes(report.peak.bytes), format_bytes(limit_bytes));
    case Ending::kKilledForLimit:
      return fmt::format("killed for memory at its limit of {} (exit status {}, oom_kill {})",
                         format_bytes(limit_bytes), report.status, report.oom_kills);
    case Ending::kMachineFull:
      return fmt::format(
          "killed (exit status {}) while the machine was out of memory: the kernel "
          "killed {} meanwhile",
          report.status, report.machine_oom_kills);
    case Ending::kKilled:
      return fmt::format(
          "killed with SIGKILL (exit status {}), and not for memory: the kernel's "
          "oom_kill counters did not move",
          report.status);
    case Ending::kDone:
      break;
  }
  return report.oom_kills > 0
             ? fmt::format(
                   "ended with status 0, though the kernel killed {} of its processes for "
                   "memory",
                   report.oom_kills)
             : fmt::format("ended with status {}", report.status);
}

// Processes below another of the tree and of one name are workers: the line says what one costs.
void name_workers(const TreeUse& peak, std::vector<std::string>& advice) {
  struct Workers {
    int count{0};
    std::int64_t bytes{0};
  };
  std::map<std::pair<int, std::string>, Workers> groups;
  for (const ProcessUse& use : peak.largest) {
    const bool below = std::ranges::any_of(
        peak.largest, [&](const ProcessUse& other) { return other.pid == use.parent; });
    if (below) {
      auto& group = groups[{use.parent, use.name}];
      ++group.count;
      group.bytes += use.bytes;
    }
  }
  for (const auto& [key, group] : groups) {
    if (group.count >= 2 &&
        static_cast<double>(group.bytes) > kWorthNaming * static_cast<double>(peak.bytes)) {
      advice.push_back(fmt::format(
          "{} worker processes `{}` held {}: each one fewer (num_workers) saves about {}",
          group.count, key.second, format_bytes(group.bytes),
          format_bytes(group.bytes / group.count)));
    }
  }
}

std::vector<std::string> advice_for(const GuardReport& report, std::int64_t limit_bytes,
                                    std::int64_t machine_bytes) {
  const TreeUse& peak = report.peak;
  const auto share = [&](std::int64_t bytes) {
    return static_cast<double>(bytes) / static_cast<double>(std::max<std::int64_t>(peak.bytes, 1));
  };
  std::vector<std::string> advice;
  name_workers(peak, advice);
  if (share(peak.shared) > kWorthNaming) {
    advice.push_back(
        fmt::format("{} was shared memory, which DataLoader workers pass batches in: "
                    "a smaller prefetch_factor holds fewer of them",
                    format_bytes(peak.shared)));
  }
  if (share(report.grown_bytes) > kSteadyGrowth && report.grown_seconds >= 10) {
    advice.push_back(
        fmt::format("it grew by {} in its last {:.0f} s: look for what is kept from "
                    "step to step (losses with their graphs, caches without a bound)",
                    format_bytes(report.grown_bytes), report.grown_seconds));
  }
  if (!peak.largest.empty() && share(peak.largest.front().anonymous) > kWorthNaming) {
    const ProcessUse& most = peak.largest.front();
    advice.push_back(
        fmt::format("`{}` held {} of its own: a smaller batch with gradient accumulation, or "
                    "features and embeddings in Plimsoll's stores, which keep to a limit",
                    most.name, format_bytes(most.anonymous)));
  }
  if (limit_bytes > 0 && machine_bytes > limit_bytes) {
    advice.push_back(fmt::format("a higher limit: the machine had {} available when it began",
                                 format_bytes(machine_bytes)));
  }
  return advice;
}

}  // namespace

Verdict verdict_of(const GuardReport& report, std::int64_t limit_bytes,
                   std::int64_t machine_bytes) {
  Verdict verdict;
  verdict.ending = ending_of(report);
  verdict.summary =
      fmt::format("{} after {:.1f} s; highest seen: {}", ended(report, limit_bytes, verdict.ending),
                  report.seconds, held(report, limit_bytes));
  if (verdict.ending == Ending::kKilledForLimit || verdict.ending == Ending::kStopped ||
      verdict.ending == Ending::kMachineFull) {
    verdict.advice = advice_for(report, limit_bytes, machine_bytes);
  }
  return verdict;
}

const char* ending_name(Ending ending) noexcept {
  switch (ending) {
    case Ending::kDone:
      return "done";
    case Ending::kKilledForLimit:
      return "killed_for_limit";
    case Ending::kStopped:
      return "stopped";
    case Ending::kMachineFull:
      return "machine_full";
    case Ending::kKilled:
      break;
  }
  return "killed";
}

}  // namespace plimsoll
