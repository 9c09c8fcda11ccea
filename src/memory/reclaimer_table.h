// SPDX-License-Identifier: Apache-2.0
//
// ReclaimerTable: who can give memory back, called one at a time with no lock held.
//
// A slot is marked busy while its reclaimer runs, so that remove() on another thread waits for the
// call to end and two threads never run one reclaimer at once. Who needs memory waits for a busy
// one no longer than kBusyDeadline, and then asks the next.
//
// Threads: thread-safe.   Memory: kMaxReclaimers slots.
#pragma once

#include <array>
#include <chrono>
#include <cstdint>
#include <thread>

#include "base/mutex.h"
#include "plimsoll/governor.h"

namespace plimsoll {

class ReclaimerTable {
 public:
  static constexpr std::chrono::milliseconds kBusyDeadline{2000};

  /// Returns the slot taken, or -1 when the table is full.
  int add(Reclaimer* reclaimer) noexcept;

  /// Returns once the reclaimer is not running and never will again.
  /// Requires: not called from within that reclaimer.
  void remove(int slot) noexcept;

  /// Asks each in the order of registration until `wanted_bytes` came back; returns their sum.
  /// What each of them did is added to `log`, resident bytes before and after, if there is one.
  std::int64_t reclaim(PressureMove move, std::int64_t wanted_bytes,
                       EvictionLog* log = nullptr) noexcept;

  /// Offers each room to grow back, in the same order; returns the bytes they took.
  std::int64_t grow_back(std::int64_t room_bytes) noexcept;

 private:
  struct Slot {
    Reclaimer* reclaimer{nullptr};  // Borrowed; its owner holds the ReclaimerHandle.
    bool busy{false};
    std::thread::id runner{};  // Meaningful while busy.
  };
  // Waits until the slot is idle and marks it busy. Returns nullptr if there is nothing to call, if
  // it stays busy, or if this very thread is running it (a reclaimer that asks for memory).
  Reclaimer* begin(Slot& slot) PLIMSOLL_REQUIRES(mutex_);
  template <class Call>
  std::int64_t ask_each(std::int64_t bytes, Call call) noexcept;

  Mutex mutex_;
  CondVar idle_;
  std::array<Slot, kMaxReclaimers> slots_ PLIMSOLL_GUARDED_BY(mutex_){};
};

}  // namespace plimsoll
