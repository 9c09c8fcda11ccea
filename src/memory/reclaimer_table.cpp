// SPDX-License-Identifier: Apache-2.0
#include "memory/reclaimer_table.h"

namespace plimsoll {

const char* move_name(PressureMove move) noexcept {
  return move == PressureMove::kPurge ? "purge" : move == PressureMove::kShrink ? "shrink" : "stop";
}

int ReclaimerTable::add(Reclaimer* reclaimer) noexcept {
  MutexLock lock(mutex_);
  for (int i = 0; i < kMaxReclaimers; ++i) {
    Slot& slot = slots_[static_cast<std::size_t>(i)];
    if (slot.reclaimer == nullptr && !slot.busy) {
      slot.reclaimer = reclaimer;
      return i;
    }
  }
  return -1;
}

void ReclaimerTable::remove(int slot) noexcept {
  MutexLock lock(mutex_);
  Slot& mine = slots_[static_cast<std::size_t>(slot)];
  mine.reclaimer = nullptr;
  while (mine.busy) {
    idle_.wait(mutex_);
  }
}

Reclaimer* ReclaimerTable::begin(Slot& slot) {
  const auto deadline = std::chrono::steady_clock::now() + kBusyDeadline;
  while (slot.reclaimer != nullptr && slot.busy) {
    if (slot.runner == std::this_thread::get_id()) {
      return nullptr;
    }
    if (!idle_.wait_until(mutex_, deadline)) {
      return nullptr;
    }
  }
  if (slot.reclaimer != nullptr) {
    slot.busy = true;
    slot.runner = std::this_thread::get_id();
  }
  return slot.reclaimer;
}

// Calls call(reclaimer, rest) one after the other, until the sum of what they return is `bytes`.
template <class Call>
std::int64_t ReclaimerTable::ask_each(std::int64_t bytes, Call call) noexcept {
  std::int64_t done = 0;
  MutexLock lock(mutex_);
  for (Slot& slot : slots_) {
    if (done >= bytes) {
      break;
    }
    Reclaimer* const reclaimer = begin(slot);
    if (reclaimer == nullptr) {
      continue;
    }
    lock.unlock();
    done += call(*reclaimer, bytes - done);
    lock.lock();
    slot.busy = false;
    idle_.notify_all();
  }
  return done;
}

std::int64_t ReclaimerTable::reclaim(PressureMove move, std::int64_t wanted_bytes,
                                     EvictionLog* log) noexcept {
  return ask_each(wanted_bytes, [move, log](Reclaimer& reclaimer, std::int64_t rest) {
    if (log == nullptr) {
      return reclaimer.reclaim(move, rest);
    }
    const auto before = read_resident();
    const std::int64_t given = reclaimer.reclaim(move, rest);
    const auto after = read_resident();
    if (given > 0 && before && after) {
      log->add({.owner = reclaimer.name(),
                .move = move,
                .wanted_bytes = rest,
                .given_bytes = given,
                .before_bytes = before->total(),
                .after_bytes = after->total()});
    }
    return given;
  });
}

std::int64_t ReclaimerTable::grow_back(std::int64_t room_bytes) noexcept {
  return ask_each(room_bytes, [](Reclaimer& reclaimer, std::int64_t rest) {
    return reclaimer.grow_back(rest);
  });
}

}  // namespace plimsoll
