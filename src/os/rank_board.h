// SPDX-License-Identifier: Apache-2.0
//
// RankBoard: where the ranks of a machine meet, and each says a word to all others.
//
//   [counters of meetings | who has left, a byte a rank | words, twice: of this turn and the last]
//
// It lies in memory of rank 0 that all have mapped (rank_file.h). A rank that has left, or whose
// process has ended, is noticed by those that wait for it.
//
// Reading order: meeting.h, rank_file.h, this file, src/memory/rank_memory.h.
//
// Threads: single-owner. leave() may be called while nobody waits.
// Memory:  the mapping, 2 words a rank.
#pragma once

#include <array>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <optional>
#include <span>
#include <vector>

#include "os/rank_file.h"
#include "plimsoll/result.h"

namespace plimsoll {

/// What ranks meet for. Each has a counter of its own, so that a rank that goes astray is waited
/// for, and not taken for one that came.
enum class Meeting : std::uint8_t { kRooms, kWords };

/// Asked ten times a second by one that waits; false ends the wait.
using WaitOn = std::function<bool()>;

/// A word of `bytes` from each of `count` ranks, of which this is `rank`.
struct RankWords {
  int rank{0};
  int count{1};
  std::int64_t bytes{0};
  /// Longest that one may be waited for that has not ended; 0: for ever. By default as gloo waits.
  std::chrono::seconds longest{1800};
};

class RankBoard {
 public:
  /// What it takes of rank 0's file, in bytes: whole pages.
  [[nodiscard]] static std::int64_t bytes_of(const RankWords& words) noexcept;

  /// `pages`: zeros at first, of bytes_of(words). `pids`: of all ranks in their order. `met`: what
  /// the counters began with, a multiple of the number of ranks.
  RankBoard(RankPages pages, const RankWords& words, std::vector<int> pids, std::uint32_t met = 0);

  /// Waits until all ranks have come, and have written what they wrote before.
  ///
  /// Errors: kIo where one has left or ended, has not come for words.longest, or `wait_on` said no.
  Result<void> meet(Meeting which, const WaitOn& wait_on = {});

  /// Says `own`, and gives what all ranks say, in their order, until this one says more.
  ///
  /// Shape:    bytes [count, words.bytes].
  /// Requires: `own` has words.bytes.   Errors: as meet().
  Result<std::span<const std::byte>> word(std::span<const std::byte> own,
                                          const WaitOn& wait_on = {});

  /// Tells the others that this rank comes no more, and has those that wait look.
  void leave() noexcept;

 private:
  [[nodiscard]] std::uint32_t& counter(Meeting which) const noexcept;
  [[nodiscard]] std::uint8_t& left(int rank) const noexcept;
  [[nodiscard]] std::optional<int> gone() const;

  RankPages pages_;
  RankWords words_;
  std::vector<int> pids_;
  std::vector<std::optional<std::int64_t>> began_;  // A pid may become another process's.
  std::array<std::uint32_t, 2> all_;  // By Meeting: the counter when all have come, modulo 2³².
  std::int64_t turn_{0};              // Which words are said now; of the other, all may still read.
};

}  // namespace plimsoll
