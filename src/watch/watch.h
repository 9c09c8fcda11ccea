// SPDX-License-Identifier: Apache-2.0
//
// Watch: whose memory grows, and whether it is a leak, look after look.
//
// Each owner (owners.h) has a trend (trend.h), and the owner that leaks fastest is the finding.
// What malloc() retains and mapped files are judged apart: they grow without being a leak.
//
// Where it is allocated and who holds it, who watches from inside finds out (samples.h, and what
// Python's bindings have) once suspect() names an owner, and says so by tell().
//
// Reading order: tree_look.h, owners.h, trend.h, this file; room.h has how long it lasts.
//
// Threads: single-owner.
// Memory:  a trend for each owner (67 KiB in all), what tree_look.h has, kPhasesMost phases of 100
//          bytes, kNamedMost processes of 16, and what was told: kSitesMost lines.
#pragma once

#include <array>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "plimsoll/result.h"
#include "watch/owners.h"
#include "watch/picture.h"
#include "watch/tree_look.h"
#include "watch/trend.h"

namespace plimsoll {

/// Where what grows is allocated, and who holds it, as somebody inside the process found out.
struct Where {
  Owner owner{Owner::kHeap};                                  ///< Whose growth that is.
  std::vector<std::pair<std::string, std::int64_t>> sites{};  ///< "file.py:12", bytes; most first.
  std::string holder{};      ///< "list `kept` in module __main__"; "" where none was found.
  bool garbage{false};       ///< One collection freed it.
  double bytes_per_unit{0};  ///< How fast it grew then.
};

/// What helps where an evaluation holds the memory: no smaller batch does.
[[nodiscard]] const char* evaluation_advice() noexcept;
/// What helps where workers copy pages of the process that they were forked from.
[[nodiscard]] const char* copies_advice() noexcept;
/// Whether that is what a loop calls its evaluation.
[[nodiscard]] bool is_evaluation(std::string_view phase) noexcept;

/// Where.holder of what backward(create_graph=True) leaves in circles that Python does not see.
inline constexpr const char* kNobodyCreateGraph = "nobody in Python: create_graph";

/// What there is to say of a tree's growth.
struct Finding {
  Course course{Course::kTooShort};
  Owner owner{Owner::kHeap};    ///< Whose course that is.
  double bytes_per_unit{0};     ///< A step, or a second: median slope. Too short: so far.
  double bytes_per_second{0};   ///< 0 where nothing leaks.
  std::int64_t grown_bytes{0};  ///< As Judged has it.
  std::int64_t bound_bytes{0};
  double window{25};              ///< Units of a window.
  std::size_t windows_seen{0};    ///< Too short: windows that are over, …
  std::size_t windows_wanted{0};  ///< … and that have to be, for a verdict.
  double units_wanted{0};         ///< As long as that takes, as windows came so far; …
  double seconds_wanted{0};       ///< … and in seconds.
  std::string phase{};            ///< In which it grows; "" where in none above others.
  std::string process{};          ///< "python 4711": of children, the one that grew most.
  bool copies{false};  ///< Of children: they copy pages that they shared; none of them grows.
  std::vector<std::pair<std::string, std::int64_t>> sites{};  ///< As Where has them.
  std::string holder{};
  std::optional<std::int64_t> trimmed_bytes{};  ///< Of retention: what one malloc_trim() gave back.
  std::optional<double> seconds_left{};  ///< To the nearest limit; whoever knows it fills it.
  /// "file.py:12" of most of it; "" where that is not known.
  [[nodiscard]] std::string site() const { return sites.empty() ? "" : sites.front().first; }
  /// One line: "leak: native grows by 1.2 MiB a step, in phase eval, at train.py:12, held by list
  /// `kept` in module __main__".
  /// `unit`: "step" or "second".
  [[nodiscard]] std::string text(std::string_view unit) const;
  /// What to do, a line each; none where nothing is to be done.
  [[nodiscard]] std::vector<std::string> advice() const;
};

class Watch {
 public:
  static constexpr std::size_t kPhasesMost = 16;  ///< Further names count as the last of them.
  static constexpr std::size_t kSitesMost = 8;

  /// Who may be leaking, long before there is a verdict.
  struct Suspect {
    Owner owner{Owner::kHeap};
    double bytes_per_unit{0};
  };

  /// `pid`: the process to watch, with its descendants. `width`: of a trend's windows, in units.
  Watch(int pid, double width);

  /// Looks, and takes what it saw for the point `at` (steps or seconds, never going back).
  /// `inside`: what the process says of itself. `phase`: what went on since the last look; "" for
  /// nothing in particular, nothing where several did. `close_bytes`: as TreeLooker::look().
  /// Errors: as there.
  Result<void> look(double at, const Inside& inside, std::optional<std::string_view> phase = "",
                    std::int64_t close_bytes = INT64_MAX);

  /// The same, of a look that was taken elsewhere.
  void take(TreeLook seen, double at, const Inside& inside,
            std::optional<std::string_view> phase = "");

  /// From when on another look keeps to 1 % of a core; of the clock of now_ns().
  [[nodiscard]] std::int64_t next_ns() const noexcept { return looker_.next_ns(); }
  /// As TreeLooker has it.
  [[nodiscard]] std::int64_t rare_ns() const noexcept { return looker_.rare_ns(); }

  /// Who held how much in each window of the trends: floors, at most Trend::kWindowsMost.
  [[nodiscard]] std::vector<PicturePoint> points() const;

  [[nodiscard]] const TreeLook& seen() const noexcept { return seen_; }
  [[nodiscard]] const Holdings& holdings() const noexcept { return holdings_; }
  [[nodiscard]] std::int64_t looks() const noexcept { return looks_; }

  /// By the windows that are over. Sorts 8,000 slopes for each owner where one is over since the
  /// last call, and else takes microseconds.
  [[nodiscard]] Finding verdict();

  /// The owner that rises fastest, by the cheap test of Trend::rise(); nothing while all is quiet.
  [[nodiscard]] std::optional<Suspect> suspect() const;
  /// Windows that are over.
  [[nodiscard]] std::size_t windows() const noexcept;
  /// Whether what malloc() retains rises so.
  [[nodiscard]] bool retains() const;

  /// From now on part of what is found of that owner. At most kSitesMost sites are kept.
  void tell(Where where);
  /// What one malloc_trim() gave back.
  void tell_trimmed(std::int64_t bytes) noexcept { trimmed_bytes_ = bytes; }

 private:
  struct Phase {
    std::string name{};
    std::array<std::int64_t, kOwnerCount> grown{};
  };
  struct First {
    int pid{0};
    std::int64_t anonymous{0};
  };
  void note_phase(std::string_view name, const Holdings& now, bool heap_known);
  void note_processes();
  void judge();
  [[nodiscard]] std::string grown_process() const;
  [[nodiscard]] std::string growing_phase(Owner owner) const;
  [[nodiscard]] Finding found(Owner owner, const Judged& judged, Course course) const;
  [[nodiscard]] Finding early(Owner owner, double slope, std::size_t wanted) const;
  [[nodiscard]] Finding too_early() const;
  [[nodiscard]] std::optional<Owner> waiting() const;
  [[nodiscard]] Finding grows() const;

  TreeLooker looker_;
  double width_;
  TreeLook seen_{};
  Holdings holdings_{};
  std::int64_t before_{-1};  // At the first look, beside what the process said it had.
  bool heap_known_{true};    // At the last look, and not as before it.
  std::array<Trend, kOwnerCount> trends_{};
  Trend resident_{};  // Bytes of all processes, those that they share counted for each.
  std::array<Judged, kOwnerCount> judged_{};  // When these windows of the first trend were over.
  std::size_t judged_windows_{0};
  double judged_width_{0};
  std::vector<Phase> phases_{};
  double halved_at_{0};         // Units that had passed when what they grew by was last halved.
  std::vector<First> first_{};  // Of each process, what it held when it was first looked at.
  std::vector<Where> told_{};   // One for each owner at most.
  std::optional<std::int64_t> trimmed_bytes_{};
  std::int64_t looks_{0};
  std::int64_t first_ns_{0};
  std::int64_t last_ns_{0};
  double first_at_{0};
  double last_at_{0};
};

}  // namespace plimsoll
