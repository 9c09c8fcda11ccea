// SPDX-License-Identifier: Apache-2.0
//
// Crash points: named places at which a test can have the process killed.
//
// PLIMSOLL_CRASH="NAME:N" in the environment kills the process (SIGKILL) at the N-th passage of
// NAME, counted from 1; NAME "*" counts every point. Unset, a point costs one relaxed load.
//
// Threads: thread-safe.   Memory: a fixed table of 64 names and counts.
#pragma once

namespace plimsoll {

/// Passes the point `name` (static text, "store.commit.superblock.before").
void crash_point(const char* name) noexcept;

/// How often `name` ("*": any point) has been passed; counted only when PLIMSOLL_CRASH is set.
long crash_point_count(const char* name) noexcept;

/// Called at every passage once set, with the point's name and whether the process is killed there;
/// nullptr: no longer. For simulating a power failure, and for looking at each state on the way.
using CrashHook = void (*)(const char* name, bool dies) noexcept;
void set_crash_hook(CrashHook hook) noexcept;

/// Reads PLIMSOLL_CRASH again and forgets all counts: for a test's forked child after setenv().
void reload_crash_points() noexcept;

}  // namespace plimsoll
