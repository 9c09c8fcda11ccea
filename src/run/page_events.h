// SPDX-License-Identifier: Apache-2.0
//
// PageEvents: what a report takes from events.jsonl, in one pass and in bounded memory.
//
// Threads: pure functions.
// Memory:  kPointsMost points a series, kLinesMost lines, kOwnersMost owners and kDevicesMost
//          devices, however long the file is; one line of it.
#pragma once

#include <cstdint>
#include <filesystem>
#include <map>
#include <string>
#include <utility>
#include <vector>

#include "plimsoll/result.h"

namespace plimsoll {

/// (time, value), every k-th where there are more than it keeps.
class ThinnedSeries {
 public:
  static constexpr std::size_t kPointsMost = 1024;
  void add(double time, double value);
  /// Whether add() would keep the next one; skip() counts it without its values.
  [[nodiscard]] bool wants() const noexcept { return seen_ % every_ == 0; }
  void skip() noexcept { ++seen_; }
  [[nodiscard]] const std::vector<std::pair<double, double>>& points() const noexcept {
    return points_;
  }

 private:
  std::vector<std::pair<double, double>> points_{};
  std::int64_t seen_{0};
  std::int64_t every_{1};
};

struct PageEvents {
  static constexpr std::size_t kLinesMost = 20;
  static constexpr std::size_t kOwnersMost = 32;
  static constexpr std::size_t kDevicesMost = 16;

  ThinnedSeries loss{};                            ///< Of events "step".
  ThinnedSeries commits{};                         ///< (time, step).
  std::map<std::string, ThinnedSeries> devices{};  ///< (time, bytes held) by a device's name.
  std::int64_t commit_count{0};
  double commit_seconds_most{0};
  double stall_seconds{0};  ///< That loops waited for commits, in all.
  struct Line {
    double time{0};
    std::int64_t step{0};
    std::string text{};
  };
  std::int64_t refusal_count{0};
  std::vector<Line> refusals{};  ///< The newest kLinesMost.
  struct Given {
    std::int64_t times{0};
    std::int64_t bytes{0};
  };
  std::map<std::pair<std::string, std::string>, Given> evictions{};  ///< By owner and move.
  std::int64_t eviction_count{0};
  ThinnedSeries eviction_times{};  ///< (time, bytes given).
  std::int64_t reclaims{0};        ///< Looks that found pressure.
  std::int64_t cleanups{0};
  std::int64_t cleanup_bytes{0};
  std::vector<Line> limits{};    ///< Changes of the limit: the newest.
  std::vector<Line> verdicts{};  ///< On growth, with site and holder where they are known.
  std::vector<Line> warnings{};  ///< The newest.
};

/// Lines that are cut short or are no events are left out; no file gives none.   Errors: kIo.
[[nodiscard]] Result<PageEvents> read_page_events(const std::filesystem::path& run);

}  // namespace plimsoll
