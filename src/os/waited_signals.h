// SPDX-License-Identifier: Apache-2.0
//
// WaitedSignals: SIGINT, SIGTERM, SIGHUP and SIGCHLD are blocked in its scope, and waited for.
//
// For a process that starts others and hands on what it is told: between two looks it waits here,
// and wakes at once for a child that ended. A child puts the mask back before it goes on.
//
// Threads: of the calling thread alone.   Memory: two signal sets.
#pragma once

#include <chrono>
#include <csignal>
#include <ctime>

#include <pthread.h>

namespace plimsoll {

class WaitedSignals {
 public:
  WaitedSignals() noexcept {
    sigemptyset(&set_);
    for (const int one : {SIGINT, SIGTERM, SIGHUP, SIGCHLD}) {
      sigaddset(&set_, one);
    }
    pthread_sigmask(SIG_BLOCK, &set_, &before_);
  }
  ~WaitedSignals() { restore(); }
  WaitedSignals(const WaitedSignals&) = delete;
  WaitedSignals& operator=(const WaitedSignals&) = delete;

  void restore() const noexcept { pthread_sigmask(SIG_SETMASK, &before_, nullptr); }

  /// The next of them within `most`; one with si_signo 0 otherwise.
  [[nodiscard]] siginfo_t next(std::chrono::milliseconds most) const noexcept {
    siginfo_t info{};
    const timespec wait{.tv_sec = most.count() / 1000, .tv_nsec = most.count() % 1000 * 1'000'000};
    if (::sigtimedwait(&set_, &info, &wait) < 0) {
      info.si_signo = 0;
    }
    return info;
  }

 private:
  sigset_t set_{};
  sigset_t before_{};
};

}  // namespace plimsoll
