// SPDX-License-Identifier: Apache-2.0
//
// ChosenLast: the kernel kills this process for memory after all others that it may kill.
//
// For who guards other processes: killed in their place it could say nothing, and they would run on
// unguarded. Where this process may lower its oom_score_adj, it does, and its children take the old
// value again. Else its children are chosen before it: theirs is higher by 100, or by twice what
// this process holds where that is more of the limit around it.
//
// Threads: one at a time; leave_in_child() between fork and exec.   Memory: a few words.
#pragma once

namespace plimsoll {

class ChosenLast {
 public:
  ChosenLast() noexcept;  ///< Within another one: as that.
  ~ChosenLast();          ///< Puts the old value back, where it was lowered.
  ChosenLast(const ChosenLast&) = delete;
  ChosenLast& operator=(const ChosenLast&) = delete;

  /// In a forked child, before exec: is chosen as who started the guard, or before the guard. Does
  /// nothing where there is none. Async-signal-safe.
  static void leave_in_child() noexcept;
};

}  // namespace plimsoll
