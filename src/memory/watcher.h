// SPDX-License-Identifier: Apache-2.0
//
// Watcher: a thread that looks at what is held while a loop that knows nothing of us runs.
//
// A loop that calls step_boundary() is left to it until what is held, and what is expected to come
// while the loop hears of it, pass the limit: it may wait for workers that grow. For any other, the
// watcher makes the moves of a step boundary itself, and says when they were not enough: first as a
// warning, then, where the kernel would be next, as a stop. A stop says whether the loop's next
// boundary would come too late. It looks more often the less is left,
// at most every kLookLeast and at 1 % of a core, 10 % where it grows towards the limit.
//
// Reading order: governor.h, this file, watcher.cpp.
//
// Threads: thread-safe; one thread of its own (pl-watch), which calls `notify` with no lock held. A
//          forked child has no watcher: there take() says nothing, and nothing is waited for.
// Memory:  one report.
#pragma once

#include <chrono>
#include <functional>
#include <memory>
#include <optional>

#include "os/fork.h"
#include "plimsoll/pressure.h"
#include "plimsoll/tree_memory.h"

namespace plimsoll {

class Watcher {
 public:
  static constexpr std::chrono::milliseconds kLookLeast{5};
  static constexpr std::chrono::milliseconds kLookMost{250};
  /// A thread that trains came by step_boundary() within this time: it is left to act.
  static constexpr std::chrono::seconds kAttended{10};
  /// As much as came in the last one to two of these is expected to come before a loop has ended.
  static constexpr std::chrono::milliseconds kAhead{250};
  /// The same of a process that is stopped at once: what is expected before its threads stand
  /// still.
  static constexpr std::chrono::milliseconds kSoon{50};
  /// What was said is said again, if it still is so, after this.
  static constexpr std::chrono::seconds kAgain{30};
  /// The same of a stop that was deferred, where the next boundary would still come in time.
  static constexpr std::chrono::milliseconds kDeferred{100};

  struct News {
    bool stop{false};  ///< False: a warning.
    bool late{false};  ///< Of a stop: the limit is passed before the next step boundary.
    Measured seen{};
    PressureReport report{};
  };

  /// Watches the process's governor. `notify` is called when there is news to take(), with
  /// whether it is a stop; it must not throw.
  /// Requires: there is one.
  explicit Watcher(std::function<void(bool stop)> notify);
  Watcher(const Watcher&) = delete;
  Watcher& operator=(const Watcher&) = delete;
  ~Watcher();  ///< Waits for a look that is under way.

  /// The last news, once.
  [[nodiscard]] std::optional<News> take();
  /// The stop that was taken need not be: the next one is said at once.
  void avert();

  /// The last stop was heard and waits for a step boundary: it is said again as long as it holds.
  void defer() noexcept;

 private:
  struct State;
  static void watch(State& state);
  static std::optional<News> judge(State& state);

  std::unique_ptr<State> state_;  // Left as it is in a forked child, where its thread is not.
  ForkMark mark_{};
};

}  // namespace plimsoll
