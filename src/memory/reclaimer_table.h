// SPDX-License-Identifier: Apache-2.0
//
// ReclaimerTable: who can give memory back, called one at a time with no lock held.
//
// A slot is marked busy while its reclaimer runs, so that remove() on another thread waits for the
// call to end and two threads never run one reclaimer at once.
//
// Threads: thread-safe.   Memory: kMaxReclaimers slots.
#pragma once

#include <array>
#include <cstdint>
#include <thread>

#include "base/mutex.h"
#include "plimsoll/governor.h"

namespace plimsoll {

class ReclaimerTable {
 public:
  /// Returns the slot taken, or -1 when the table is full.
  int add(Reclaimer* reclaimer) noexcept;

  /// Returns once the reclaimer is not running and never will again.
  /// Requires: not called from within that reclaimer.
  void remove(int slot) noexcept;

  /// Asks each in the order of registration until `wanted_bytes` came back; returns their sum.
  std::int64_t reclaim(PressureMove move, std::int64_t wanted_bytes) noexcept;

  /// Offers each room to grow back, in the same order; returns the bytes they took.
  std::int64_t grow_back(std::int64_t room_bytes) noexcept;

 private:
  struct Slot {
    Reclaimer* reclaimer{nullptr};  // Borrowed; its owner holds the ReclaimerHandle.
    bool busy{false};
    std::thread::id runner{};  // Meaningful while busy.
  };
  // Waits until the slot is idle and marks it busy. Returns nullptr if there is nothing to call,
  // or if this very thread is running it (a reclaimer that asks the governor for memory).
  Reclaimer* begin(Slot& slot) PLIMSOLL_REQUIRES(mutex_);
  template <class Call>
  std::int64_t ask_each(std::int64_t bytes, Call call) noexcept;

  Mutex mutex_;
  CondVar idle_;
  std::array<Slot, kMaxReclaimers> slots_ PLIMSOLL_GUARDED_BY(mutex_){};
};

}  // namespace plimsoll
