// SPDX-License-Identifier: Apache-2.0
#include "watch/keeper.h"

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <csignal>
#include <cstdio>
#include <utility>
#include <vector>

#include <fmt/format.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include "base/check.h"
#include "os/cgroup.h"
#include "os/oom_choice.h"
#include "os/process_tree.h"
#include "os/waited_signals.h"

namespace plimsoll {
namespace {

using Clock = std::chrono::steady_clock;
using std::chrono::milliseconds;

constexpr milliseconds kWait{60'000};  // A child that ends wakes at once.
constexpr milliseconds kKeptGrace{10'000};
constexpr milliseconds kKeptLooks{10};

// Waits for the guard, hands signals on to it, and returns its wait status.
int wait_for(pid_t guard, const WaitedSignals& signals) {
  for (int status = 0;;) {
    const pid_t ended = ::waitpid(-1, &status, WNOHANG);
    if (ended == guard) {
      return status;
    }
    if (ended > 0) {
      continue;
    }
    const siginfo_t got = signals.next(kWait);
    if (got.si_signo != 0 && got.si_signo != SIGCHLD && got.si_pid != 0) {
      ::kill(guard, got.si_signo);  // From the terminal the guard has it already.
    }
  }
}

// Asks all that the guard left, then kills them; returns how many there were.
int end_all(const WaitedSignals& signals) {
  const auto deadline = Clock::now() + kKeptGrace;
  std::vector<int> asked;
  int most = 0;
  for (;;) {
    while (::waitpid(-1, nullptr, WNOHANG) > 0) {
    }
    auto left = descendants(::getpid());
    if (!left || left->empty()) {
      return most;
    }
    const bool now = Clock::now() >= deadline;
    for (const int pid : *left) {
      if (now || std::ranges::find(asked, pid) == asked.end()) {
        ::kill(pid, now ? SIGKILL : SIGTERM);
      }
    }
    most = std::max(most, static_cast<int>(left->size()));
    asked = std::move(*left);
    static_cast<void>(signals.next(kKeptLooks));
  }
}

// Whether it asks a process to end; where a guard waits between two starts, it does.
bool asks(int signal) {
  return signal == SIGINT || signal == SIGTERM || signal == SIGHUP;
}

// Ends this process by `signal`, as it ended the guard; returns where it cannot (PID 1).
void end_by(int signal) {
  std::fflush(nullptr);
  std::signal(signal, SIG_DFL);
  sigset_t one;
  sigemptyset(&one);
  sigaddset(&one, signal);
  pthread_sigmask(SIG_UNBLOCK, &one, nullptr);
  static_cast<void>(std::raise(signal));
}

}  // namespace

Result<Kept> keep_guard(const std::function<int(pid_t keeper)>& guard) {
  const WaitedSignals signals;
  const ChosenLast last;
  ::prctl(PR_SET_CHILD_SUBREAPER, 1);
  const std::filesystem::path around = memory_cgroup(0);
  const std::int64_t killed_before = oom_kills_in(around).value_or(0);
  const std::int64_t machine_before = machine_oom_kills();
  const auto began = Clock::now();
  std::fflush(nullptr);  // A child must not print again what waits to be printed.
  const pid_t keeper = ::getpid();
  const pid_t child = ::fork();
  if (child < 0) {
    return fail_io(errno, "a process for the guard");
  }
  if (child == 0) {
    ::prctl(PR_SET_PDEATHSIG, SIGTERM);
    signals.restore();
    const int status = ::getppid() == keeper ? guard(keeper) : 128 + SIGTERM;
    std::fflush(nullptr);
    ::_exit(status);
  }
  Kept kept;
  const int status = wait_for(child, signals);
  kept.killed = WIFSIGNALED(status);
  kept.status = kept.killed ? 128 + WTERMSIG(status) : WEXITSTATUS(status);
  if (!kept.killed) {
    return kept;
  }
  if (asks(WTERMSIG(status))) {
    end_all(signals);
    MemoryCgroup::remove_left_behind();
    end_by(WTERMSIG(status));
    kept.killed = false;
    return kept;
  }
  GuardReport& report = kept.report;
  report.status = kept.status;
  report.killed = fmt::format("its guard, PID {}", child);
  report.left_behind = end_all(signals);
  report.seconds = std::chrono::duration<double>(Clock::now() - began).count();
  report.oom_kills = oom_kills_in(around).value_or(0) - killed_before;
  report.machine_oom_kills = std::max<std::int64_t>(machine_oom_kills() - machine_before, 0);
  report.killer_limit_bytes = least_limit_in(around);
  report.killer = report.killer_limit_bytes > 0 ? Killer::kCgroup : Killer::kMachine;
  MemoryCgroup::remove_left_behind();
  return kept;
}

}  // namespace plimsoll
