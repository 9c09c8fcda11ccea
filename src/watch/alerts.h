// SPDX-License-Identifier: Apache-2.0
//
// Alerts: says when memory gets short, in a file and by a command, and when it is time to act.
//
// Three levels, by what is left of the bound that is met first: calm; high, below 15 % of it; act,
// below 5 % or the reserve, or when growth as before would pass it: within a quarter to half a
// second when high, within a tenth to a fifth in any case. A level falls only when 5 % more than
// its threshold is left again. What acts is the caller: for a run its governor gives back, shrinks
// and stops by itself (memory/watcher.h); for other programs there are signals (act_signal()).
//
// File:    a line of JSON each; at kFileBytes it becomes FILE.1, which is replaced.
// Command: through `sh -c`, the line on its standard input, its level in PLIMSOLL_ALERT; one at a
//          time, killed after kCommandMost with all of its process group, and not more often than
//          every kAgain, but for what is urgent: a change to act, a signal. That waits while one
//          runs.
//
// Threads: single-owner. Its command is a child of the process: who waits for any child tells
//          reaped().
// Memory:  two lines of kLineMost; on disk 2 × kFileBytes.
#pragma once

#include <chrono>
#include <cstdint>
#include <filesystem>
#include <functional>
#include <string>
#include <utility>
#include <vector>

#include <sys/types.h>

#include "memory/coming.h"
#include "plimsoll/result.h"
#include "watch/room.h"
#include "watch/watch.h"

namespace plimsoll {

enum class AlertLevel : std::uint8_t { kCalm, kHigh, kAct };

/// "calm", "high", "act".
[[nodiscard]] const char* level_name(AlertLevel level) noexcept;

struct AlertOptions {
  std::filesystem::path file{};  ///< "": none.
  std::string command{};         ///< "": none.
  std::vector<int> signals{};    ///< For programs that are not ours; none, one, or a second one.
  std::int64_t reserve_bytes{
      32LL << 20};  ///< That is left when it acts, at least; half the bound at most.
  std::function<void(const std::string&)> tell{};  ///< What cannot be done, in lines.

  [[nodiscard]] bool any() const noexcept {
    return !file.empty() || !command.empty() || !signals.empty();
  }
};

class Alerts {
 public:
  using Clock = std::chrono::steady_clock;
  static constexpr double kHigh = 0.15;  ///< Of the bound, left.
  static constexpr double kAct = 0.05;
  static constexpr double kBack = 0.05;  ///< More than that, before a level falls.
  static constexpr std::int64_t kFileBytes = 1 << 20;
  static constexpr std::size_t kLineMost = 4000;
  static constexpr std::chrono::seconds kAgain{30};
  static constexpr std::chrono::seconds kCommandMost{10};
  static constexpr std::chrono::seconds kGrace{10};  ///< From the first signal to the second.
  static constexpr std::chrono::milliseconds kAhead{250};
  static constexpr std::chrono::milliseconds kSoon{50};  ///< Half of what a program needs to hear.
  static constexpr std::chrono::milliseconds kLookLeast{5};
  static constexpr std::chrono::milliseconds kLookMost{250};

  explicit Alerts(AlertOptions options) : options_(std::move(options)) {}
  Alerts(const Alerts&) = delete;
  Alerts& operator=(const Alerts&) = delete;
  ~Alerts();  ///< Ends a command that still runs.

  /// `held_bytes` are held, and `room` is left at `now`. Says what has changed. `who`: what is
  /// watched, for the line; `finding`: of its growth.
  AlertLevel look(Clock::time_point now, std::int64_t held_bytes, const Room& room,
                  const std::string& who, const Finding& finding);

  /// Writes and sends a line of its own: "size", "leak", "signal".
  void say(Clock::time_point now, const std::string& level, const std::string& text);

  /// The signal to send now: the first when the level is act, the second kGrace later, or at once
  /// when the room is nearly_gone(). 0: none. Each is given once.
  int act_signal(Clock::time_point now);

  /// At the last look less than a 64th of the bound was left, or what comes in 50 to 100 ms: who is
  /// to end before the kernel chooses must be killed now.
  [[nodiscard]] bool nearly_gone() const noexcept;

  /// How long the next look may wait, by what is left: memory may come at 4 GiB a second.
  [[nodiscard]] std::chrono::milliseconds pause() const noexcept;

  /// Ends a command that takes too long, and starts the one that waits.
  void poll(Clock::time_point now);
  /// A child has ended. True: it was the command.
  bool reaped(pid_t pid);
  /// A command runs, or waits.
  [[nodiscard]] bool busy() const noexcept { return child_ > 0 || !waiting_.empty(); }
  /// The process group of the command; 0: none runs.
  [[nodiscard]] pid_t group() const noexcept { return child_; }

 private:
  struct Line {
    std::string level{};
    std::string json{};
    [[nodiscard]] bool empty() const noexcept { return json.empty(); }
  };
  void raise(Clock::time_point now, const std::string& level, std::string json);
  void append(const std::string& json);
  void start(Clock::time_point now, Line line);
  void wonder(const std::string& text);

  AlertOptions options_;
  AlertLevel level_{AlertLevel::kCalm};
  Coming coming_{kAhead};
  Coming soon_{kSoon};
  std::int64_t soon_bytes_{0};  // As much as came in the last one to two of kSoon.
  std::int64_t came_bytes_{0};  // To what is bounded, since the first look.
  std::int64_t held_bytes_{0};
  Room room_{};
  std::string leak_{};  // The owner whose leak was told.
  std::size_t signals_sent_{0};
  Clock::time_point first_signal_{};
  pid_t child_{-1};
  Clock::time_point started_{};
  Line waiting_{};
  bool wondered_{false};
};

/// "TERM", "SIGTERM,KILL", "15": one or two signals.   Errors: kInvalidArgument.
[[nodiscard]] Result<std::vector<int>> parse_signals(const std::string& text);

/// "SIGTERM".
[[nodiscard]] std::string signal_text(int signal);

}  // namespace plimsoll
