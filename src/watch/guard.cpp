// SPDX-License-Identifier: Apache-2.0
#include "watch/guard.h"

#include <algorithm>
#include <array>
#include <cerrno>
#include <csignal>
#include <optional>
#include <tuple>
#include <utility>

#include <fcntl.h>
#include <fmt/format.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

#include "base/check.h"
#include "os/cgroup.h"
#include "os/directories.h"
#include "os/oom_choice.h"
#include "os/waited_signals.h"
#include "plimsoll/bytes.h"
#include "watch/kernel_log.h"
#include "watch/room.h"
#include "watch/tree_look.h"
#include "watch/tree_record.h"

namespace plimsoll {
namespace {

using Clock = std::chrono::steady_clock;
using std::chrono::milliseconds;

constexpr std::int64_t kCopiedRoom = 1 << 20;  // For what a copy touches on its last steps.
constexpr milliseconds kKept{1000};            // From one look that is kept to the next, …
constexpr milliseconds kKeptNear{250};         // … and within a seventh of the limit.
constexpr std::int64_t kNearLimit = 7;
constexpr milliseconds kLeftBehind{5000};  // From SIGTERM to SIGKILL for what was left behind, …
constexpr milliseconds kLeftLooks{10};     // … which is looked at so often meanwhile.

// How long a command waited for memory while its cgroup was full: the kernel takes back pages of
// its program and files, and must read them again.
class Stalls {
 public:
  // True once, when the waiting has become worth telling.
  bool add(const CgroupUse& use, std::int64_t limit_bytes) noexcept {
    const double more = use.stalled_seconds - before_;
    const bool full = use.bytes >= limit_bytes - limit_bytes / 20;
    const double was = seconds_;
    if (known_ && full) {
      seconds_ += more;
    }
    known_ = true;
    before_ = use.stalled_seconds;
    return was < kWorthTelling && seconds_ >= kWorthTelling;
  }
  [[nodiscard]] double seconds() const noexcept { return seconds_; }

 private:
  static constexpr double kWorthTelling = 10;
  bool known_{false};
  double before_{0};
  double seconds_{0};
};

class Guard {
 public:
  explicit Guard(const GuardOptions& options) : options_(options) {
    if (options.alerts.any()) {
      alerts_.emplace(options.alerts);
      next_alert_ = {};
    }
  }

  Result<GuardReport> run() {
    if (options_.limit_bytes > 0) {
      make_cgroup();
    }
    if (!report_.no_cgroup.empty()) {
      tell("no cgroup holds the limit, so it is measured several times a second: " +
           report_.no_cgroup);
    }
    const std::int64_t killed_before = machine_oom_kills();
    const std::filesystem::path around = memory_cgroup(0);
    const std::int64_t killed_around = oom_kills_in(around).value_or(0);
    PLIMSOLL_TRY_VOID(start());
    began_ = Clock::now();
    if (auto opened = open_record(); !opened) {
      end_all(SIGKILL);
      reap_all(true);
      return tl::unexpected(std::move(opened).error());
    }
    auto watched = watch();
    if (!watched) {
      end_all(SIGKILL);
      reap_all(true);
      return tl::unexpected(std::move(watched).error());
    }
    report_.seconds = std::chrono::duration<double>(Clock::now() - began_).count();
    report_.machine_oom_kills = std::max<std::int64_t>(machine_oom_kills() - killed_before, 0);
    PLIMSOLL_TRY_VOID(end_left_behind());
    finish_alerts();
    report_.killer_limit_bytes = least_limit_in(around);
    report_.killer = report_.killer_limit_bytes > 0 ? Killer::kCgroup : Killer::kMachine;
    if (!cgroup_ && report_.killer == Killer::kCgroup) {
      report_.oom_kills = oom_kills_in(around).value_or(0) - killed_around;
    }
    if (cgroup_) {
      PLIMSOLL_TRY(report_.oom_kills, cgroup_->oom_kills());
      report_.killer = cgroup_->met_limit() ? Killer::kLimit : report_.killer;
      const CgroupUse use = cgroup_->use();
      report_.charged_peak_bytes = use.peak_bytes;
      report_.major_faults = use.major_faults;
      report_.stalled_seconds = stalls_.seconds();
    }
    report_.peak = climb_.peak();
    report_.growth = climb_.growth();
    report_.killed = whom_killed();
    return std::move(report_);
  }

 private:
  void tell(const std::string& text) const {
    if (options_.tell) {
      options_.tell(text);
    }
  }

  // Whom the kernel killed for memory: by its log, where that may be read; else by how the command
  // ended, and "" where it was another process.
  [[nodiscard]] std::string whom_killed() const {
    if (report_.oom_kills == 0) {
      return "";
    }
    const double began = std::chrono::duration<double>(began_.time_since_epoch()).count();
    const auto log = kernel_kills().value_or(std::vector<KernelKill>{});
    for (auto kill = log.rbegin(); kill != log.rend() && kill->seconds > began - 1; ++kill) {
      if (kill->pid == child_ ||
          std::ranges::count(report_.peak.largest, kill->pid, &ProcessUse::pid) > 0) {
        return fmt::format("PID {} ({})", kill->pid, kill->name);
      }
    }
    const std::filesystem::path program(options_.command[0]);
    return report_.status == 128 + SIGKILL
               ? fmt::format("PID {} ({})", child_, program.filename().string())
               : "";
  }

  void make_cgroup() {
    if (!options_.cgroup) {
      report_.no_cgroup = "none was wanted";
      return;
    }
    auto made = MemoryCgroup::create(options_.limit_bytes);
    if (made) {
      cgroup_ = std::move(*made);
      report_.in_cgroup = true;
    } else {
      report_.no_cgroup = made.error().to_string();
    }
  }

  Result<void> start() {
    ::prctl(PR_SET_CHILD_SUBREAPER, 1);
    std::array<int, 2> told{};
    if (::pipe2(told.data(), O_CLOEXEC) != 0) {
      return fail_io(errno, "pipe");
    }
    std::vector<char*> words;
    for (const std::string& word : options_.command) {
      words.push_back(const_cast<char*>(word.c_str()));  // execvp() changes none of them.
    }
    words.push_back(nullptr);
    const pid_t guard = ::getpid();
    child_ = ::fork();
    if (child_ == 0) {
      signals_.restore();
      ChosenLast::leave_in_child();
      ::prctl(PR_SET_PDEATHSIG, SIGTERM);
      rusage used{};  // Of the copy of the guard: no figure of the command's.
      ::getrusage(RUSAGE_SELF, &used);
      const std::int64_t copied = used.ru_maxrss;
      const bool ready = ::write(told[1], &copied, sizeof copied) == sizeof copied &&
                         ::getppid() == guard && (!cgroup_ || cgroup_->join());
      if (ready) {
        ::execvp(words[0], words.data());
      }
      const int problem = errno;
      std::ignore = ::write(told[1], &problem, sizeof problem);
      ::_exit(127);
    }
    const int forked = errno;
    ::close(told[1]);
    int problem = child_ < 0 ? forked : EIO;
    std::int64_t copied = 0;
    const bool failed = child_ < 0 || ::read(told[0], &copied, sizeof copied) != sizeof copied ||
                        ::read(told[0], &problem, sizeof problem) == sizeof problem;
    copied_bytes_ = (copied << 10) + kCopiedRoom;
    ::close(told[0]);
    if (!failed) {
      return {};
    }
    reap_all(true);
    if (problem == ENOENT) {
      return fail(ErrorCode::kNotFound, options_.command[0] + ": no such program",
                  "write the command as in a shell, after --");
    }
    return fail_io(problem, options_.command[0]);
  }

  Result<void> watch() {
    auto next_look = Clock::now();
    for (;;) {
      const auto next = std::min(next_look, next_alert_);
      const auto left = std::chrono::ceil<milliseconds>(next - Clock::now());
      const siginfo_t got = signals_.next(std::max(left, milliseconds{1}));
      report_.asked = report_.asked || (got.si_signo != 0 && got.si_signo != SIGCHLD);
      if (got.si_signo != 0 && got.si_signo != SIGCHLD && got.si_pid != 0) {
        ::kill(child_, got.si_signo);  // From the terminal the command has it already.
      }
      reap_all(false);
      if (ended_) {
        return {};
      }
      heed_keeper();
      PLIMSOLL_TRY_VOID(watch_alerts());
      if (const auto now = Clock::now(); now >= next_look) {
        PLIMSOLL_TRY_VOID(look(now));
        const Clock::time_point paced{std::chrono::nanoseconds(looker_.next_ns())};
        next_look = std::max(Clock::now() + options_.interval, paced);
      }
    }
  }

  // Killed, it has nobody to tell of the command: that ends, as after any signal to this process.
  void heed_keeper() {
    if (options_.keeper == 0 || ::getppid() == options_.keeper) {
      return;
    }
    const auto now = Clock::now();
    if (!orphaned_) {
      orphaned_ = report_.asked = true;
      deadline_ = now + options_.grace;
      ::kill(child_, SIGTERM);
    }
    if (now >= deadline_) {
      end_all(SIGKILL);
    }
  }

  Result<void> look(Clock::time_point now) {
    PLIMSOLL_TRY(TreeLook seen, looker_.look(std::min(limit(), alerted_ ? INT64_MAX : alert())));
    TreeUse& tree = seen.tree;
    report_.process_peak_bytes = std::max(report_.process_peak_bytes, tree.resident_peak);
    judge(now, seen);
    if (over_bytes_ > 0) {
      stop(now, over_bytes_);
    }
    if (cgroup_ && stalls_.add(cgroup_->use(), options_.limit_bytes)) {
      tell(
          fmt::format("has waited {:.0f} s for memory at its limit of {}: it reads back what the "
                      "kernel had to drop, and may be much slower so than ended",
                      stalls_.seconds(), format_bytes(options_.limit_bytes)));
    }
    keep(now, seen);
    climb_.add(std::chrono::duration<double>(now - began_).count(), std::move(tree));
    return {};
  }

  // What ends a command that has no cgroup of its own.
  [[nodiscard]] std::int64_t limit() const {
    return cgroup_ || options_.limit_bytes == 0 ? INT64_MAX : options_.limit_bytes;
  }

  // What is told of once.
  [[nodiscard]] std::int64_t alert() const {
    return options_.alert_bytes == 0 ? INT64_MAX : options_.alert_bytes;
  }

  // Between two close looks, what processes share may count several times.
  void judge(Clock::time_point now, const TreeLook& seen) {
    if (!seen.close) {
      return;
    }
    const std::int64_t held = seen.tree.unbacked();
    if (held > alert() && !alerted_) {
      const std::string text =
          fmt::format("holds {}, more than {}", format_bytes(held), format_bytes(alert()));
      tell(text);
      if (alerts_) {
        alerts_->say(now, "size", options_.command[0] + " " + text);
      }
    }
    alerted_ = held > alert();
    over_bytes_ = held > limit() ? held : 0;
  }

  // How much is left, and whether it is time to act. Reading that takes some 0.2 ms.
  Result<void> watch_alerts() {
    const auto now = Clock::now();
    if (!alerts_ || (now < next_alert_ && !ended_)) {
      return {};
    }
    std::int64_t held = cgroup_ ? unbacked_bytes(cgroup_->folder()) : 0;
    if (!cgroup_) {
      PLIMSOLL_TRY(const TreeLook seen, looker_.look(limit()));
      judge(now, seen);
      held = seen.tree.unbacked();
    }
    alert_pace_.time([&] {
      const auto room = least_room(ended_ ? ::getpid() : child_, held, options_.limit_bytes);
      const Finding finding = record_ ? record_->watch().verdict() : Finding{};
      if (room) {  // Else it has just ended.
        alerts_->look(now, held, *room, options_.command[0], finding);
      }
    });
    alerts_->poll(now);
    if (const int signal = ended_ ? 0 : alerts_->act_signal(now); signal != 0) {
      send(signal, now, held);
    }
    const Clock::time_point paced{std::chrono::nanoseconds(alert_pace_.next_ns(Pace::kHurried))};
    next_alert_ = std::max(now + alerts_->pause(), paced);
    return {};
  }

  void send(int signal, Clock::time_point now, std::int64_t held) {
    const std::string text = fmt::format("holds {}, near its limit: {} is sent", format_bytes(held),
                                         signal_text(signal));
    signal == SIGKILL ? end_all(signal) : static_cast<void>(::kill(child_, signal));
    if (!report_.stopped) {
      report_.stopped = true;
      report_.signal = signal;
      deadline_ = now + options_.grace;
    }
    tell(text);
    alerts_->say(now, "signal", options_.command[0] + " " + text);
  }

  // What is to be told still is, within the time that a command may take.
  void finish_alerts() {
    while (alerts_ && alerts_->busy()) {
      static_cast<void>(signals_.next(milliseconds{50}));
      reap_all(false);
      alerts_->poll(Clock::now());
    }
  }

  Result<void> open_record() {
    if (options_.record.empty()) {
      return {};
    }
    PLIMSOLL_TRY_VOID(make_directories(options_.record));
    std::string words;
    for (const std::string& word : options_.command) {
      words += (words.empty() ? "" : " ") + word;
    }
    const auto file = std::filesystem::path(options_.record) / LookHistory::kFile;
    PLIMSOLL_TRY(auto made, TreeRecord::open(file, child_, /*steps=*/false, words));
    record_.emplace(std::move(made));
    return {};
  }

  // A look a second is kept, and four near the limit.
  void keep(Clock::time_point now, const TreeLook& seen) {
    const std::int64_t limit = options_.limit_bytes;
    const bool near = limit > 0 && seen.tree.unbacked() > limit - limit / kNearLimit;
    if (!record_ || now - kept_ < (near ? kKeptNear : kKept)) {
      return;
    }
    kept_ = now;
    TreeLook look = seen;
    look.root = read_resident(child_).value_or(Resident{});
    look.root.anonymous = std::min(look.root.anonymous, look.tree.anonymous);
    const double at = std::chrono::duration<double>(now - began_).count();
    record_->add(std::move(look), at, {}, "",
                 {.step = static_cast<std::int64_t>(at), .limit_bytes = limit});
  }

  // Asked once, then killed: at the deadline, or sooner when it grows by another tenth.
  void stop(Clock::time_point now, std::int64_t bytes) {
    if (!report_.stopped) {
      report_.stopped = true;
      deadline_ = now + options_.grace;
      tell(fmt::format("holds {}, over the limit of {}: asked to end", format_bytes(bytes),
                       format_bytes(options_.limit_bytes)));
      ::kill(child_, SIGTERM);
    }
    if (now >= deadline_ || bytes > options_.limit_bytes + options_.limit_bytes / 10) {
      end_all(SIGKILL);
    }
  }

  // Each is asked once, then killed: at the deadline, or before it takes the rest of the memory.
  Result<void> end_left_behind() {
    if (!alerts_) {
      alerts_.emplace(AlertOptions{});  // Tells nobody: for what is left.
    }
    const auto deadline = Clock::now() + kLeftBehind;
    PLIMSOLL_TRY(auto left, processes());
    report_.left_behind = static_cast<int>(left.size());
    for (std::vector<int> asked; !left.empty();) {
      PLIMSOLL_TRY_VOID(watch_alerts());
      const bool now = Clock::now() >= deadline || alerts_->nearly_gone();
      for (const int pid : left) {
        if (now || std::ranges::find(asked, pid) == asked.end()) {
          ::kill(pid, now ? SIGKILL : SIGTERM);
        }
      }
      asked = std::move(left);
      static_cast<void>(signals_.next(kLeftLooks));
      reap_all(false);
      PLIMSOLL_TRY(left, processes());
    }
    reap_all(false);
    return {};
  }

  // All that live below the guard but the command of an alert.
  [[nodiscard]] Result<std::vector<int>> processes() const {
    const pid_t spared = alerts_ ? alerts_->group() : 0;
    PLIMSOLL_TRY(auto pids, descendants(::getpid()));
    std::erase_if(pids, [&](int pid) { return spared > 0 && ::getpgid(pid) == spared; });
    return pids;
  }

  void end_all(int signal) const {
    const auto pids = processes();
    for (const int pid : pids ? *pids : std::vector<int>{}) {
      ::kill(pid, signal);
    }
  }

  // Takes in whoever ended, all of them when told to wait. True: there is nobody left.
  bool reap_all(bool wait) {
    for (;;) {
      int status = 0;
      rusage used{};
      const pid_t pid = ::wait4(-1, &status, wait ? 0 : WNOHANG, &used);
      if (pid < 0 && errno == EINTR) {
        continue;
      }
      if (pid <= 0) {
        return pid < 0;
      }
      if (alerts_ && alerts_->reaped(pid)) {
        continue;
      }
      // Before it became the command, the child was a copy of the guard, and ru_maxrss knows that.
      const std::int64_t peak = std::int64_t{used.ru_maxrss} << 10;
      if (pid != child_ || peak > copied_bytes_) {
        report_.process_peak_bytes = std::max(report_.process_peak_bytes, peak);
      }
      if (pid == child_) {
        ended_ = true;
        report_.status = WIFSIGNALED(status) ? 128 + WTERMSIG(status) : WEXITSTATUS(status);
      }
    }
  }

  const GuardOptions& options_;
  const WaitedSignals signals_;
  const ChosenLast last_;
  GuardReport report_;
  std::optional<MemoryCgroup> cgroup_;
  TreeLooker looker_{::getpid(), TreeLooker::Root::kLeftOut};
  Climb climb_;
  std::optional<Alerts> alerts_;
  Pace alert_pace_;
  Clock::time_point next_alert_{Clock::time_point::max()};  // Never without alerts.
  std::optional<TreeRecord> record_;
  Clock::time_point kept_{};
  Stalls stalls_;
  Clock::time_point began_{};
  pid_t child_{-1};
  std::int64_t copied_bytes_{0};  // Most that the child held before it became the command.
  bool ended_{false};
  bool alerted_{false};
  bool orphaned_{false};        // Its keeper has ended.
  std::int64_t over_bytes_{0};  // At the last close look, when that was more than the limit.
  Clock::time_point deadline_{};
};

}  // namespace

Result<GuardReport> run_guarded(const GuardOptions& options) {
  if (options.command.empty()) {
    return fail(ErrorCode::kInvalidArgument, "no command to run",
                "write it after --: plimsoll run --memory-limit 24GiB -- python train.py");
  }
  return Guard(options).run();
}

}  // namespace plimsoll
