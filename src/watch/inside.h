// SPDX-License-Identifier: Apache-2.0
//
// inside_now: what this process says of its own memory: leases, and what malloc() has.
//
// malloc() counts the free pieces that it keeps, 200 ns each, and holds its locks meanwhile. Where
// that takes more than 3 ms for more than 15,000 pieces, twice in a row, it has a rest.
//
// Threads: any.   Memory: none.
#pragma once

#include <atomic>
#include <cstdint>

#include "watch/owners.h"

namespace plimsoll {

/// Whether malloc() is asked, by what its answers cost. Where they are dear because pieces are
/// many, every one is a stall: it has a rest of kRest times what the last one took, and twice as
/// long each time that one comes. A few pieces that take long are a machine that paused.
class MallocPatience {
 public:
  static constexpr std::int64_t kTookMostNs = 3'000'000;
  static constexpr std::int64_t kPiecesMost = 15'000;
  static constexpr int kDearMost = 2;
  static constexpr std::int64_t kRest = 10'000;

  /// `now_ns`: of the clock of now_ns().
  [[nodiscard]] bool asks(std::int64_t now_ns) const noexcept { return now_ns >= rests_until_; }
  /// It took `took_ns` of the processor to count `pieces`.
  void answered(std::int64_t now_ns, std::int64_t took_ns, std::int64_t pieces) noexcept;

 private:
  std::atomic<int> dear_{0};  // In a row. All three: of whoever asks, and no more than a guess.
  std::atomic<int> rests_{0};
  std::atomic<std::int64_t> rests_until_{INT64_MIN};
};

/// Tensors and leases of the process's governor, −1 without one; malloc()'s heap, in use and
/// retained, −1 while it has a rest. `python` stays −1: who counts Python's arenas fills it in.
/// `ask_malloc`: false for Inside::malloc_later.
[[nodiscard]] Inside inside_now(bool ask_malloc = true);

}  // namespace plimsoll
