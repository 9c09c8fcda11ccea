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
constexpr double kSeen = 0.5;          // Share of the peak that a look has to have seen of it.
constexpr double kAtLimit = 0.85;      // Share of the limit that counts as having grown up to it.
constexpr double kStood = 0.95;        // The same, of what stood there for more than a minute.
constexpr double kThrashing = 0.1;     // Share of the time spent waiting for memory.

Ending ending_of(const GuardReport& report) {
  const bool killed = report.status == kKilledStatus;
  if (report.stopped && !(killed && report.oom_kills > 0)) {
    return Ending::kStopped;
  }
  if (report.oom_kills > 0 && report.status != 0) {
    return report.killer == Killer::kLimit    ? Ending::kKilledForLimit
           : report.killer == Killer::kCgroup ? Ending::kKilledInCgroup
                                              : Ending::kMachineFull;
  }
  if (killed) {
    return report.machine_oom_kills > 0 ? Ending::kMachineFull : Ending::kKilled;
  }
  return Ending::kDone;
}

// "peak 508.8 MiB, 499.9 MiB of it charged to the limit of 500.0 MiB; …": of the three peaks the
// highest, and what the others add.
std::string held(const GuardReport& report, std::int64_t limit_bytes) {
  const TreeUse& look = report.peak;
  const std::int64_t peak = report.peak_bytes();
  const std::int64_t charged = report.charged_peak_bytes;
  std::string text = "peak " + format_bytes(peak);
  if (charged > 0 && charged == peak) {
    text += fmt::format(" of {}, page cache included", format_bytes(limit_bytes));
  } else if (charged > 0) {
    text += fmt::format(", {} of it charged to the limit of {} (files in use elsewhere are not)",
                        format_bytes(charged), format_bytes(limit_bytes));
  } else if (limit_bytes > 0) {
    text += fmt::format(" of {}", format_bytes(limit_bytes));
  }
  if (report.process_peak_bytes > 0) {
    text += fmt::format("; largest process {}", format_bytes(report.process_peak_bytes));
  }
  if (look.processes > 0) {
    text += fmt::format("; most seen at one look {} in {} {}", format_bytes(look.bytes),
                        look.processes, look.processes == 1 ? "process" : "processes");
  }
  if (look.anonymous + look.shared + look.file > 0) {
    text += fmt::format(" ({} their own, {} shared memory, {} files)", format_bytes(look.anonymous),
                        format_bytes(look.shared), format_bytes(look.file));
  }
  return text;
}

// The kernel took back pages of the program itself, which had to be read again and again.
std::string thrashing(const GuardReport& report) {
  if (report.stalled_seconds < 1 || report.stalled_seconds < kThrashing * report.seconds) {
    return "";
  }
  return fmt::format(
      "; it spent {:.0f} s at its limit waiting for memory ({} major page faults: "
      "program and files were dropped and read again)",
      report.stalled_seconds, report.major_faults);
}

std::string ended(const GuardReport& report, std::int64_t limit_bytes, Ending ending) {
  switch (ending) {
    case Ending::kStopped:
      if (report.signal != 0) {
        return fmt::format("stopped by {} before {}: it held {}", signal_text(report.signal),
                           limit_bytes > 0 ? "its limit of " + format_bytes(limit_bytes)
                                           : std::string("memory ran out"),
                           format_bytes(report.peak.bytes));
      }
      return fmt::format("stopped: it held {}, over the limit of {}",
                         format_bytes(report.peak.bytes), format_bytes(limit_bytes));
    case Ending::kKilledForLimit:
      return fmt::format("killed for memory at its limit of {} (exit status {}, oom_kill {})",
                         format_bytes(limit_bytes), report.status, report.oom_kills);
    case Ending::kKilledInCgroup:
      return fmt::format(
          "killed for memory in the cgroup around it, which may hold {} (exit status {}, oom_kill "
          "{})",
          format_bytes(report.killer_limit_bytes), report.status, report.oom_kills);
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

// It grew steadily, and that is what ended it: up to the limit, lately or until it stood there.
bool grew_to_its_end(const GuardReport& report, std::int64_t limit_bytes, Ending ending) {
  if (report.growth.bytes <= 0) {
    return false;
  }
  const double top = static_cast<double>(report.peak.bytes);
  const bool bounded = limit_bytes > 0 && ending != Ending::kMachineFull;
  const double limit = bounded ? static_cast<double>(limit_bytes) : top;
  return top >= kAtLimit * limit &&
         (report.seconds - report.growth.ended_at <= 60 || top >= kStood * limit);
}

std::string growth_advice(const Growth& growth) {
  const double seconds = std::max(growth.seconds, 0.001);
  const bool workers = growth.processes > 1 && 2 * growth.group_bytes > growth.bytes;
  const std::string who = workers
                              ? fmt::format("{} processes `{}` grew", growth.processes, growth.name)
                              : fmt::format("`{}` grew", growth.name);
  const std::int64_t bytes = growth.group_bytes;
  const auto rate = static_cast<std::int64_t>(static_cast<double>(bytes) / seconds);
  return fmt::format(
      "{} steadily, by {} within {:.1f} s ({} a second): look for what is kept {}. A smaller "
      "batch{} or a higher limit would only put off the end",
      who, format_bytes(bytes), growth.seconds, format_bytes(rate),
      workers ? "from item to item (a cache in the dataset, lists of Python objects)"
              : "from step to step (losses with their graphs, lists, caches without a bound), or "
                "for data read in whole (import it into a store)",
      workers ? ", fewer workers" : "");
}

std::vector<std::string> advice_for(const GuardReport& report, std::int64_t limit_bytes,
                                    std::int64_t machine_bytes, Ending ending) {
  if (grew_to_its_end(report, limit_bytes, ending)) {
    return {growth_advice(report.growth)};
  }
  const TreeUse& peak = report.peak;
  const auto share = [&](std::int64_t bytes) {
    return static_cast<double>(bytes) / static_cast<double>(std::max<std::int64_t>(peak.bytes, 1));
  };
  // Where it was never seen near its peak, looks do not say who held that.
  const bool seen =
      static_cast<double>(peak.bytes) >= kSeen * static_cast<double>(report.peak_bytes());
  std::vector<std::string> advice;
  if (seen) {
    name_workers(peak, advice);
  }
  if (seen && share(peak.shared) > kWorthNaming) {
    advice.push_back(
        fmt::format("{} was shared memory, which DataLoader workers pass batches in: "
                    "a smaller prefetch_factor holds fewer of them",
                    format_bytes(peak.shared)));
  }
  if (seen && !peak.largest.empty() && share(peak.largest.front().anonymous) > kWorthNaming) {
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
      fmt::format("{}{} after {:.1f} s; {}{}", ended(report, limit_bytes, verdict.ending),
                  report.killed.empty() ? "" : ": " + report.killed, report.seconds,
                  held(report, limit_bytes), thrashing(report));
  if (verdict.ending != Ending::kDone && verdict.ending != Ending::kKilled) {
    const bool around = verdict.ending == Ending::kKilledInCgroup;
    verdict.advice = advice_for(report, around ? report.killer_limit_bytes : limit_bytes,
                                around ? 0 : machine_bytes, verdict.ending);
  }
  return verdict;
}

const char* ending_name(Ending ending) noexcept {
  switch (ending) {
    case Ending::kDone:
      return "done";
    case Ending::kKilledForLimit:
      return "killed_for_limit";
    case Ending::kKilledInCgroup:
      return "killed_in_cgroup";
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
