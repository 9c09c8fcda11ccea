// SPDX-License-Identifier: Apache-2.0
//
// keep_guard: has a guard run in a child, and takes its place when it is killed.
//
// A guard (guard.h) that is killed leaves its command without a limit. So two processes keep a
// command: the guard, and this one, which waits and holds next to nothing. Both are the last that
// the kernel chooses (oom_choice.h). Where the guard is killed, this one inherits its processes,
// asks them to end, kills what has not ended ten seconds later, removes their cgroup and tells.
// Where this one is killed, the guard ends the command in the same way (GuardOptions::keeper).
//
// Threads: one call at a time, in a process with no other threads or children; blocks SIGINT,
//          SIGTERM, SIGHUP and SIGCHLD while it runs, and hands the first three on.
// Memory:  the process's own.
#pragma once

#include <functional>

#include <sys/types.h>

#include "plimsoll/result.h"
#include "watch/guard.h"

namespace plimsoll {

struct Kept {
  int status{0};       ///< What the guard returned, or 128 + the signal that ended it.
  bool killed{false};  ///< It was ended by a signal that asks nobody; then `report` is of that.
  GuardReport report{};
};

/// Calls `guard` in a forked child, with the PID of this process, and waits for it. Where SIGINT,
/// SIGTERM or SIGHUP ended it (between two starts of its command), this process ends by it, too.
/// Errors: kIo when it cannot be started.
Result<Kept> keep_guard(const std::function<int(pid_t keeper)>& guard);

}  // namespace plimsoll
