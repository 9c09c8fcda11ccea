// SPDX-License-Identifier: Apache-2.0
//
// Pace: when a reading may be repeated, so that all of them together cost a given share of a core.
//
// A reading of /proc takes the longer the more a process holds: 3 ms at 200 MB, 110 ms at 10 GB
// (smaps_rollup, pages of 4 KiB). So the pause is a multiple of what the last reading took of the
// processor, and begins where that reading ended. One that takes far longer than the last counts
// kOutlier times the last: it was interrupted, or the machine was cold.
//
// Threads: single-owner.   Memory: 32 bytes.
#pragma once

#include <algorithm>
#include <cstdint>

#include "os/clock.h"

namespace plimsoll {

class Pace {
 public:
  static constexpr std::int64_t kCalm = 100;  ///< Pauses of so many times the cost: 1 % of a core.
  static constexpr std::int64_t kOutlier = 4;
  static constexpr std::int64_t kHurried = 10;  ///< A tenth of a core, where a limit may be near.

  /// `least_ns`: of every pause.
  explicit Pace(std::int64_t least_ns = 0) noexcept : least_ns_(least_ns) {}

  /// Whether at `now` the pause of `times` the last cost is over; true before the first reading.
  [[nodiscard]] bool due(std::int64_t now, std::int64_t times) const noexcept {
    return ended_ns_ == INT64_MIN || now >= next_ns(times);
  }

  /// When that pause is over. Requires: there was a reading.
  [[nodiscard]] std::int64_t next_ns(std::int64_t times) const noexcept {
    return ended_ns_ + std::max(least_ns_, took_ns_ * times);
  }

  /// Reads, and measures what of the processor this thread had for it.
  template <class Reading>
  void time(Reading reading) {
    const std::int64_t before = thread_cpu_ns();
    reading();
    record(now_ns(), thread_cpu_ns() - before);
  }

  /// As time(), and the first time twice: a cold reading would hold up the next.
  template <class Reading>
  void time_warm(Reading reading) {
    if (ended_ns_ == INT64_MIN) {
      time(reading);
    }
    time(reading);
  }

  /// A reading took `took_ns` of the processor and ended at `ended_ns` (now_ns()).
  void record(std::int64_t ended_ns, std::int64_t took_ns) noexcept {
    ended_ns_ = ended_ns;
    took_ns_ = took_ns_ == 0 ? took_ns : std::min(took_ns, kOutlier * took_ns_);
    spent_ns_ += took_ns;
  }

  [[nodiscard]] std::int64_t ended_ns() const noexcept { return ended_ns_; }
  /// What the last reading counts.
  [[nodiscard]] std::int64_t took_ns() const noexcept { return took_ns_; }
  /// What all of them took.
  [[nodiscard]] std::int64_t spent_ns() const noexcept { return spent_ns_; }

 private:
  std::int64_t ended_ns_{INT64_MIN};
  std::int64_t took_ns_{0};
  std::int64_t spent_ns_{0};
  std::int64_t least_ns_;
};

}  // namespace plimsoll
