// SPDX-License-Identifier: Apache-2.0
#include "run/why.h"

#include <algorithm>
#include <array>
#include <csignal>
#include <cstring>
#include <fstream>
#include <map>
#include <system_error>
#include <utility>

#include <fmt/format.h>

#include "base/check.h"
#include "os/cgroup.h"
#include "plimsoll/bytes.h"
#include "run/progress.h"

namespace plimsoll {
namespace {

namespace fs = std::filesystem;

constexpr std::int64_t kGrownLeast = 16LL << 20;
constexpr const char* kFreeSome = "free disk space, and start it again: it goes on from its commit";

// What torch and others say where something else than memory ran out, and what helps. The first
// that is part of a run's last word is meant.
struct Failure {
  std::string_view text;
  const char* advice;
};
constexpr const char* kSharedMemoryFull =
    "/dev/shm is full, in which workers pass batches (`plimsoll limits` lists it): give it more "
    "room "
    "(docker run --shm-size=8g; mount -o remount,size=8g /dev/shm), or fewer or smaller batches in "
    "flight (workers, prefetch)";
constexpr const char* kFilesSpent =
    "each batch that a worker sent has a file open until its last tensor is gone: keep copies "
    "(batch.clone()) or numbers, not batches; or raise the limit (ulimit -n 65536), or pass "
    "batches "
    "by name: torch.multiprocessing.set_sharing_strategy(\"file_system\")";
constexpr std::array kFailures{
    Failure{"Too many open files", kFilesSpent},
    Failure{"received 0 items of ancdata", kFilesSpent},
    Failure{"shared memory(shm) for file", kSharedMemoryFull},
    Failure{"out of shared memory", kSharedMemoryFull},
    Failure{"unable to write to file </torch_", kSharedMemoryFull},
    Failure{"Bus error", kSharedMemoryFull},
    Failure{
        "writer_batch_size",
        "datasets.map keeps writer_batch_size rows (1,000) in memory before it writes them: ask "
        "for fewer where rows are large (writer_batch_size=50), and for fewer processes"}};

std::string doing(const std::string& phase) {
  if (phase.empty() || phase == "train") {
    return "while training";
  }
  if (phase == "starting") {
    return "before the first step";
  }
  return phase == "evaluating" || phase == "paused" ? "while " + phase : "in phase " + phase;
}

// Where it ended, and what of that is committed: the last step may not have been made to its end.
std::string at_step(const RunStatus& status) {
  const std::string at = fmt::format("at step {}", format_count(status.step));
  return status.checkpoint_step == status.step ? at
         : status.checkpoint_step < 0
             ? at + " (nothing is committed)"
             : fmt::format("{} (committed: step {})", at, format_count(status.checkpoint_step));
}

// What it did then, only a run has said.
std::string in_words(const Grower& one, bool run) {
  return fmt::format("{}, PID {} ({}), grew {}{}", one.child ? "a worker" : "the process itself",
                     one.pid, one.name, format_bytes(one.bytes),
                     run ? fmt::format(" in epoch {} {}", one.epoch + 1, doing(one.phase)) : "");
}

// "SIGSEGV (11)" of an exit status above 128.
std::string signal_name(int status) {
  const int signal = status - 128;
  const char* const name = ::sigabbrev_np(signal);
  return name == nullptr ? fmt::format("signal {}", signal)
                         : fmt::format("SIG{} ({})", name, signal);
}

EndCause from_word(const RunStatus& status) {
  static const std::map<std::string_view, EndCause> kCauses{
      {"finished", EndCause::kFinished}, {"asked", EndCause::kAsked},
      {"memory", EndCause::kPressure},   {"refused", EndCause::kRefused},
      {"disk", EndCause::kDisk},         {"error", EndCause::kFailed}};
  if (const auto at = kCauses.find(status.cause); at != kCauses.end()) {
    return at->second;
  }
  return status.status == "finished"  ? EndCause::kFinished
         : status.status == "stopped" ? EndCause::kAsked
                                      : EndCause::kFailed;
}

// The folder is locked a moment longer.
bool has_last_word(const RunStatus& status) {
  return status.status == "finished" || status.status == "stopped" || status.status == "failed";
}

class Explanation {
 public:
  Explanation(Why& why, const KernelNow& kernel) : why_(why), kernel_(kernel) {}

  void find() {
    const KeptLook* const last = why_.last_look();
    why_.grower = who_grew(why_.kept);
    if (why_.run && why_.run->alive && !has_last_word(why_.run->status)) {
      why_.cause = EndCause::kRunning;
      why_.summary = fmt::format("runs: process {} is at step {}", why_.run->pid,
                                 format_count(why_.run->status.step));
      why_.summary += waited_for_room() ? "; paused: disk full: " + why_.run->status.message : "";
    } else if (why_.run && why_.run->status.status == "failed" && why_.command &&
               why_.command->oom_kills > 0) {
      seen_by_guard(*why_.command);  // It lived on when a worker was killed, and failed of that.
      say("its last word: " + why_.run->status.message);
    } else if (why_.run && why_.run->status.status != "interrupted") {
      own_word(why_.run->status);
    } else if (why_.command) {
      seen_by_guard(*why_.command);
    } else {
      without_a_word(last);
    }
    add_looks(last);
    add_devices();
    add_commit();
  }

 private:
  void say(std::string line) { why_.evidence.push_back(std::move(line)); }

  // Who ended it in other words than its own: a guard's signal reads as a stop that was asked for.
  void own_word(const RunStatus& status) {
    why_.cause = from_word(status);
    const std::string at = at_step(status);
    if (why_.cause == EndCause::kAsked && why_.command && why_.command->ending == "stopped") {
      why_.cause = EndCause::kStopped;
      why_.summary =
          fmt::format("stopped by `plimsoll run` before its limit of {}, with a commit {}",
                      format_bytes(why_.command->limit_bytes), at);
      why_.advice = why_.command->advice;
      return;
    }
    if (status.message.find(evaluation_advice()) != std::string::npos) {
      why_.advice.emplace_back(evaluation_advice());  // It was refused there, whatever looks saw.
    }
    for (const Failure& one : kFailures) {
      if (why_.incident() && status.message.find(one.text) != std::string::npos) {
        why_.advice.emplace_back(one.advice);
        break;
      }
    }
    switch (why_.cause) {
      case EndCause::kFinished:
        why_.summary = "finished " + at;
        break;
      case EndCause::kAsked:
        why_.summary = fmt::format("stopped by hand {}: {}", at, status.message);
        break;
      case EndCause::kPressure:
        why_.summary =
            fmt::format("stopped itself {} before memory ran out: {}", at, status.message);
        break;
      case EndCause::kRefused:
        why_.summary = fmt::format("refused memory {}: {}", at, status.message);
        break;
      case EndCause::kDisk:
        why_.summary = fmt::format("failed {}, as the disk is full: {}", at, status.message);
        why_.advice.emplace_back(kFreeSome);
        break;
      default:
        why_.summary = fmt::format("failed {}: {}", at, status.message);
        if (killed_in_cgroup() > 0 && kernel_.cgroup_limit_bytes > 0) {
          why_.cause = EndCause::kKilledCgroup;
          why_.summary = fmt::format("a process of it was killed by the kernel: {}; it {}",
                                     whose_cgroup(*why_.last_look()), why_.summary);
        }
    }
  }

  // Whether its last word is that a commit waits for room.
  [[nodiscard]] bool waited_for_room() const {
    return why_.run && !has_last_word(why_.run->status) && why_.run->status.cause == "disk";
  }

  void killed_on_full_disk() {
    why_.cause = EndCause::kDisk;
    why_.summary = "killed by somebody (SIGKILL) while it was paused, as the disk is full: " +
                   why_.run->status.message;
    why_.advice.emplace_back(kFreeSome);
  }

  void seen_by_guard(const EndedCommand& command) {
    const std::string limit = format_bytes(command.limit_bytes);
    if (command.ending == "killed_for_limit") {
      why_.cause = EndCause::kKilledAtLimit;
      why_.summary =
          fmt::format("killed by the kernel at the limit of {} that `plimsoll run` set", limit);
    } else if (command.ending == "stopped") {
      why_.cause = EndCause::kStopped;
      why_.summary = fmt::format("ended by `plimsoll run` at its limit of {}", limit);
    } else if (command.ending == "killed_in_cgroup") {
      why_.cause = EndCause::kKilledCgroup;
      why_.summary = fmt::format("killed by the kernel: the cgroup around it (limit {})",
                                 format_bytes(command.killer_limit_bytes));
      if (command.limit_bytes > 0) {
        why_.summary += fmt::format(", not at the limit of {} that `plimsoll run` set", limit);
      }
    } else if (command.ending == "machine_full") {
      why_.cause = EndCause::kKilledMachine;
      why_.summary = "killed by the kernel: the machine had no memory left";
    } else if (command.ending == "killed" && waited_for_room()) {
      killed_on_full_disk();
    } else if (command.ending == "killed") {
      why_.cause = EndCause::kKilled;
      why_.summary = "killed with SIGKILL by somebody, and not for memory";
    } else if (command.asked) {
      why_.cause = EndCause::kAsked;
      why_.summary = "asked to end by a signal";
    } else if (command.status > 128) {
      why_.cause = EndCause::kFailed;
      why_.summary = fmt::format("ended by {}, and not for memory", signal_name(command.status));
    } else if (why_.run) {  // The lock is gone, and no last word: its process has ended by itself.
      why_.cause = EndCause::kFailed;
      why_.summary = fmt::format("ended with status {} and without a last word", command.status);
    } else {
      why_.cause = command.status == 0 ? EndCause::kFinished : EndCause::kFailed;
      why_.summary = command.status == 0 ? std::string("finished with status 0")
                                         : fmt::format("failed with status {}", command.status);
    }
    if (!command.killed.empty()) {
      why_.summary += ": " + command.killed;
    }
    say("`plimsoll run`: " + command.summary);
    why_.advice.insert(why_.advice.end(), command.advice.begin(), command.advice.end());
    if ((command.ending == "done" || command.ending == "stopped") && command.oom_kills > 0) {
      say(fmt::format("the kernel killed {} of its processes for memory", command.oom_kills));
    }
  }

  // When it started moves with the machine's clock: that it differs says nothing.
  [[nodiscard]] bool restarted(const KeptLook& last) const {
    return static_cast<double>(kernel_.booted) > last.time;
  }

  [[nodiscard]] std::int64_t killed_in_cgroup() const {
    const KeptLook* const last = why_.last_look();
    const auto first = std::ranges::find(why_.kept.looks, why_.kept.life.number, &KeptLook::life);
    if (last == nullptr || restarted(*last)) {
      return 0;
    }
    const std::int64_t counted = why_.kept.looks.back().cgroup_oom_kills;  // Also while it ended.
    return std::max<std::int64_t>(
        0, kernel_.cgroup_oom_kills.value_or(counted) - first->cgroup_oom_kills);
  }

  // The kernel's own line on a process of the last look.
  [[nodiscard]] const KernelKill* logged(const KeptLook& last) const {
    if (!kernel_.log) {
      return nullptr;
    }
    for (auto kill = kernel_.log->rbegin(); kill != kernel_.log->rend(); ++kill) {
      const double at = kill->seconds + static_cast<double>(last.booted);
      const bool ours = kill->pid == why_.kept.life.pid ||
                        std::ranges::count(last.largest, kill->pid, &KeptLook::Process::pid) > 0;
      if (ours && at > why_.kept.life.began - 1) {
        return &*kill;
      }
    }
    return nullptr;
  }

  // Neither the run nor a guard has said anything.
  void without_a_word(const KeptLook* last) {
    why_.cause = EndCause::kKilled;
    if (last == nullptr) {
      why_.summary = "ended without a word, and no looks were kept";
      return;
    }
    if (restarted(*last)) {
      why_.cause = EndCause::kRestarted;
      why_.summary = "ended when the machine was restarted, or lost its power";
      return;
    }
    const KernelKill* const kill = logged(*last);
    const std::int64_t in_cgroup = killed_in_cgroup();
    const std::int64_t on_machine = kernel_.machine_oom_kills - last->machine_oom_kills;
    if (kill != nullptr) {
      say(fmt::format("the kernel's log: process {} ({}) was killed, {} of its own", kill->pid,
                      kill->name, format_bytes(kill->anonymous_bytes)));
    }
    const bool bounded = kernel_.cgroup_limit_bytes > 0;
    if (kill != nullptr ? kill->of_cgroup : in_cgroup > 0 && bounded) {
      why_.cause = EndCause::kKilledCgroup;
      why_.summary = "killed by the kernel: " + whose_cgroup(*last);
    } else if (kill != nullptr || in_cgroup > 0) {
      why_.cause = EndCause::kKilledMachine;
      why_.summary = "killed by the kernel: the machine had no memory left";
    } else if (on_machine > 0) {
      why_.cause = EndCause::kKilledMachine;
      why_.summary = fmt::format(
          "probably killed by the kernel, which has killed {} for memory since the last look",
          on_machine == 1 ? "a process" : fmt::format("{} processes", on_machine));
    } else if (waited_for_room()) {
      killed_on_full_disk();
    } else {
      why_.summary =
          "killed by somebody (SIGKILL), or crashed; not for memory, by the kernel's counters";
    }
    if (in_cgroup > 0) {
      say(fmt::format("oom_kill of its cgroup rose by {} since the program began", in_cgroup));
    }
    if (kill == nullptr) {
      say(kernel_.log ? "the kernel's log names no process of it"
                      : "the kernel's log may not be read (it takes root)");
    }
  }

  // That has more than half of what an owner grew by; "" where none has, or it trained then.
  [[nodiscard]] std::string growing_phase(Owner owner) const {
    std::map<std::string, std::int64_t> grown;
    std::int64_t before = -1;
    for (const KeptLook& look : why_.kept.looks) {
      const std::int64_t now = look.owners[static_cast<std::size_t>(owner)];
      if (look.life == why_.kept.life.number && look.phase != kEndingPhase && now >= 0) {
        grown[look.phase] += before < 0 ? 0 : now - before;
        before = now;
      }
    }
    std::int64_t all = 0;
    std::pair<std::string, std::int64_t> most;
    for (const auto& [phase, bytes] : grown) {
      all += std::max<std::int64_t>(bytes, 0);
      if (bytes > most.second) {
        most = {phase, bytes};
      }
    }
    return 2 * most.second > all && most.first != "train" ? most.first : "";
  }

  [[nodiscard]] std::string whose_cgroup(const KeptLook& last) const {
    std::string text = "the cgroup of the job";
    if (kernel_.cgroup_limit_bytes > 0) {
      text += fmt::format(" (limit {})", format_bytes(kernel_.cgroup_limit_bytes));
    }
    const bool another = last.limit_bytes > 0 && last.limit_bytes != kernel_.cgroup_limit_bytes;
    return another
               ? fmt::format("{}, not this run's limit of {}", text, format_bytes(last.limit_bytes))
               : text;
  }

  void add_looks(const KeptLook* last) {
    if (last == nullptr) {
      return;
    }
    if (why_.grower && (why_.memory() || why_.cause == EndCause::kRunning)) {
      why_.summary += "; " + in_words(*why_.grower, why_.run.has_value());
    }
    Finding finding = finding_of(*last);
    if (finding.course == Course::kLeak) {
      finding.phase = growing_phase(finding.owner);
      finding.copies = finding.owner == Owner::kChildren && !(why_.grower && why_.grower->child);
    }
    if (finding.course == Course::kLeak || finding.course == Course::kRetention) {
      say("last verdict: " + finding.text(why_.kept.life.steps ? "step" : "second"));
      const auto advice = finding.advice();
      if (why_.memory() || why_.cause == EndCause::kRunning) {
        why_.advice.insert(why_.advice.begin(), advice.begin(), advice.end());
      }
    }
    const bool told = std::ranges::count(why_.advice, evaluation_advice()) > 0;
    if (why_.memory() && is_evaluation(last->phase) && !told) {
      why_.advice.insert(why_.advice.begin(), evaluation_advice());
    }
    std::string held = fmt::format("last look: {} held", format_bytes(last->held_bytes));
    if (last->limit_bytes > 0) {
      held += fmt::format(" of a limit of {}", format_bytes(last->limit_bytes));
    }
    std::vector<std::pair<std::int64_t, const char*>> owners;
    for (std::size_t at = 0; at < kOwnerCount; ++at) {
      const auto owner = static_cast<Owner>(at);
      if (last->owners[at] > 0 && owner != Owner::kFiles && owner != Owner::kPageTables) {
        owners.emplace_back(last->owners[at], owner_name(owner));
      }
    }
    std::ranges::sort(owners, std::ranges::greater{});
    constexpr std::size_t kSaid = 4;
    for (std::size_t at = 0; at < std::min(kSaid, owners.size()); ++at) {
      held += fmt::format("{}{} {}", at == 0 ? ": " : ", ", owners[at].second,
                          format_bytes(owners[at].first));
    }
    say(held);
  }

  void add_devices() {
    if (!why_.run) {
      return;
    }
    for (const DeviceStatus& device : why_.run->status.devices) {
      say(fmt::format("{}: {}", device.kind, device_words(device)));
    }
  }

  void add_commit() {
    if (!why_.run || why_.cause == EndCause::kRunning) {
      return;
    }
    const std::int64_t step = why_.run->status.checkpoint_step;
    say(step < 0
            ? "nothing was committed: a new start begins again"
            : fmt::format(
                  "committed: step {}{}", format_count(step),
                  why_.cause == EndCause::kFinished ? "" : "; a new start goes on from there"));
  }

  Why& why_;
  const KernelNow& kernel_;
};

}  // namespace

const char* cause_name(EndCause cause) noexcept {
  constexpr std::array<const char*, 13> kNames{"running",
                                               "finished",
                                               "asked",
                                               "pressure",
                                               "refused",
                                               "stopped",
                                               "killed_at_limit",
                                               "killed_in_cgroup",
                                               "killed_on_machine",
                                               "killed",
                                               "disk",
                                               "failed",
                                               "restarted"};
  return kNames[static_cast<std::size_t>(cause)];
}

bool Why::memory() const noexcept {
  constexpr std::array kMemory{EndCause::kPressure,     EndCause::kRefused,
                               EndCause::kStopped,      EndCause::kKilledAtLimit,
                               EndCause::kKilledCgroup, EndCause::kKilledMachine};
  return std::ranges::count(kMemory, cause) > 0;
}

bool Why::incident() const noexcept {
  return cause != EndCause::kRunning && cause != EndCause::kFinished && cause != EndCause::kAsked;
}

const KeptLook* Why::last_look() const noexcept {
  const KeptLook* last = nullptr;
  for (const KeptLook& look : kept.looks) {
    if (look.life == kept.life.number && (last == nullptr || look.phase != kEndingPhase)) {
      last = &look;
    }
  }
  return last;
}

Finding finding_of(const KeptLook& look) {
  return {.course = look.course, .owner = look.owner, .bytes_per_unit = look.bytes_per_unit};
}

std::optional<Grower> who_grew(const LookHistory::Kept& kept) {
  if (kept.looks.empty()) {
    return std::nullopt;
  }
  struct Rise {
    Grower grower{};
    std::int64_t before{0};
    double began{0};
    std::map<std::pair<std::int32_t, std::string>, std::int64_t> parts{};
  };
  const KeptLook* last = nullptr;
  std::map<int, Rise> seen;  // By pid: at most kProcessesMost for each look of the history.
  for (const KeptLook& look : kept.looks) {
    if (look.life != kept.life.number || look.phase == kEndingPhase) {
      continue;
    }
    last = &look;
    for (const auto& process : look.largest) {
      auto [at, is_new] = seen.try_emplace(process.pid);
      Rise& one = at->second;
      if (is_new) {
        one.grower = {.pid = process.pid, .child = process.pid != kept.life.pid};
        one.before = process.bytes;
        one.began = look.time;
      }
      one.grower.name = process.name;
      one.grower.bytes += process.bytes - one.before;
      one.grower.seconds = look.time - one.began;
      one.parts[{look.epoch, look.phase}] += process.bytes - one.before;
      one.before = process.bytes;
    }
  }
  std::optional<Grower> most;
  for (auto& [pid, one] : seen) {
    const bool there = std::ranges::count(last->largest, pid, &KeptLook::Process::pid) > 0;
    if (!there || one.grower.bytes < std::max(kGrownLeast, most ? most->bytes + 1 : 0)) {
      continue;
    }
    const auto part =
        std::ranges::max_element(one.parts, {}, [](const auto& entry) { return entry.second; });
    one.grower.epoch = part->first.first;
    one.grower.phase = part->first.second;
    most = one.grower;
  }
  return most;
}

KernelNow kernel_now(const fs::path& cgroup) {
  KernelNow now{.booted = boot_seconds(), .machine_oom_kills = machine_oom_kills()};
  if (!cgroup.empty()) {
    now.cgroup_oom_kills = oom_kills_in(cgroup);
    now.cgroup_limit_bytes = least_limit_in(cgroup);
  }
  now.log = kernel_kills();
  return now;
}

Result<Why> explain_end(const fs::path& root) {
  const auto kept = LookHistory::read(root / LookHistory::kFile);
  return explain_end(root, kernel_now(kept ? kept->life.cgroup : ""));
}

Result<Why> explain_end(const fs::path& root, const KernelNow& kernel) {
  Why why;
  if (auto kept = LookHistory::read(root / LookHistory::kFile)) {
    why.kept = std::move(*kept);
  } else if (kept.error().code == ErrorCode::kCorrupt) {
    why.evidence.push_back(kept.error().to_string());
  }
  why.command = read_ended(root);
  if (RunFolder::is_run(root)) {
    PLIMSOLL_TRY(why.run, RunFolder::view(root));
  } else if (!why.command && why.kept.life.number == 0) {
    return fail(ErrorCode::kNotFound,
                root.string() + ": neither a run nor a folder of `plimsoll run --record`",
                "name the folder of a run; `plimsoll info PATH` says what is there");
  }
  std::error_code ignored;
  if (!why.run && !why.command && fs::exists(fmt::format("/proc/{}", why.kept.life.pid), ignored)) {
    why.cause = EndCause::kRunning;
    why.summary = fmt::format("runs: process {}", why.kept.life.pid);
    return why;
  }
  Explanation(why, kernel).find();
  return why;
}

}  // namespace plimsoll
