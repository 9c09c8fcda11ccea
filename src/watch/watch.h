// SPDX-License-Identifier: Apache-2.0
//
// Watch: whose memory grows, and whether it is a leak, look after look.
//
// Each owner (owners.h) has a trend (trend.h), and the owner that leaks fastest is the finding.
// What malloc() retains and mapped files are judged apart: they grow without being a leak.
//
// Reading order: tree_look.h, owners.h, trend.h, this file; room.h has how long it lasts.
//
// Threads: single-owner.
// Memory:  a trend for each owner (34 KiB in all), what tree_look.h has, kPhasesMost phases of 100
//          bytes and kNamedMost processes of 16.
#pragma once

#include <array>
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "plimsoll/result.h"
#include "watch/owners.h"
#include "watch/tree_look.h"
#include "watch/trend.h"

namespace plimsoll {

/// What there is to say of a tree's growth.
struct Finding {
  Course course{Course::kTooShort};
  Owner owner{Owner::kHeap};    ///< Whose course that is.
  double bytes_per_unit{0};     ///< A step, or a second: median slope.
  double bytes_per_second{0};   ///< 0 where nothing leaks.
  std::int64_t grown_bytes{0};  ///< As Judged has it.
  std::int64_t bound_bytes{0};
  std::string phase{};    ///< In which it grows; "" where in none above others.
  std::string process{};  ///< "python 4711": of children, the one that grew most.
  /// One line: "leak: children (python 4711) grow by 1.2 MiB a step, in phase eval".
  /// `unit`: "step" or "second".
  [[nodiscard]] std::string text(std::string_view unit) const;
  /// What to do, a line each; none where nothing is to be done.
  [[nodiscard]] std::vector<std::string> advice() const;
};

class Watch {
 public:
  static constexpr std::size_t kPhasesMost = 16;  ///< Further names count as the last of them.

  /// `pid`: the process to watch, with its descendants. `width`: of a trend's windows, in units.
  Watch(int pid, double width);

  /// Looks, and takes what it saw for the point `at` (steps or seconds, never going back).
  /// `inside`: what the process says of itself. `phase`: what went on since the last look; "" for
  /// nothing in particular. `close_bytes`: as TreeLooker::look(). Errors: as there.
  Result<void> look(double at, const Inside& inside, std::string_view phase = "",
                    std::int64_t close_bytes = INT64_MAX);

  /// From when on another look keeps to 1 % of a core; of the clock of now_ns().
  [[nodiscard]] std::int64_t next_ns() const noexcept { return looker_.next_ns(); }

  [[nodiscard]] const TreeLook& seen() const noexcept { return seen_; }
  [[nodiscard]] const Holdings& holdings() const noexcept { return holdings_; }
  [[nodiscard]] std::int64_t looks() const noexcept { return looks_; }

  /// By the windows that are over. Sorts 8,000 slopes for each owner where one is over since the
  /// last call, and else takes microseconds.
  [[nodiscard]] Finding verdict();

 private:
  struct Phase {
    std::string name{};
    std::array<std::int64_t, kOwnerCount> grown{};
  };
  struct First {
    int pid{0};
    std::int64_t anonymous{0};
  };
  void note_phase(std::string_view name, const Holdings& now);
  void note_processes();
  void judge();
  [[nodiscard]] std::string grown_process() const;
  [[nodiscard]] std::string growing_phase(Owner owner) const;
  [[nodiscard]] Finding found(Owner owner, const Judged& judged, Course course) const;

  TreeLooker looker_;
  TreeLook seen_{};
  Holdings holdings_{};
  std::array<Trend, kOwnerCount> trends_{};
  std::array<Judged, kOwnerCount> judged_{};  // When these windows of the first trend were over.
  std::size_t judged_windows_{0};
  double judged_width_{0};
  std::vector<Phase> phases_{};
  std::vector<First> first_{};  // Of each process, what it held when it was first looked at.
  std::int64_t looks_{0};
  std::int64_t first_ns_{0};
  std::int64_t last_ns_{0};
  double first_at_{0};
  double last_at_{0};
};

}  // namespace plimsoll
