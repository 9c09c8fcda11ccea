// SPDX-License-Identifier: Apache-2.0
#include "memory/kept_slots.h"

#include <utility>

#include <fmt/format.h>

#include "base/check.h"
#include "base/round.h"
#include "plimsoll/bytes.h"

namespace plimsoll {
namespace {

constexpr std::int64_t kSlotPage = 4096;

}  // namespace

KeptSlots::KeptSlots(Governor governor, std::int64_t count, std::int64_t stride,
                     HostRegistration driver)
    : governor_(std::move(governor)), count_(count), stride_(stride), driver_(driver) {}

Result<std::unique_ptr<KeptSlots>> KeptSlots::open(const Governor& governor, std::int64_t count,
                                                   std::int64_t slot_bytes,
                                                   std::int64_t fixed_bytes,
                                                   HostRegistration driver) {
  if (count < 0 || slot_bytes < 1 || fixed_bytes < 0) {
    return fail(ErrorCode::kInvalidArgument,
                fmt::format("{} slots of {} bytes beside {}", count, slot_bytes, fixed_bytes));
  }
  std::unique_ptr<KeptSlots> slots(
      new KeptSlots(governor, count, round_up(slot_bytes, kSlotPage), driver));
  PLIMSOLL_TRY_VOID(slots->start(round_up(fixed_bytes, kSlotPage)));
  return slots;
}

Result<void> KeptSlots::start(std::int64_t fixed_bytes) {
  const std::int64_t size = count_ * stride_;
  PLIMSOLL_TRY_VOID(admission_.take(governor_, Tag::kWeights, fixed_bytes + size, "cache_bytes"));
  PLIMSOLL_TRY(fixed_, governor_.reserve(Tag::kWeights, fixed_bytes));
  PLIMSOLL_TRY(slab_, Slab::create(governor_, Tag::kWeights, size));
  admission_.make_elastic(fixed_bytes);
  {
    const MutexLock lock(mutex_);
    states_.assign(static_cast<std::size_t>(count_), State::kGone);
    for (std::int64_t slot = 0; slot < count_; ++slot) {
      if (!enter(slot)) {
        return fail(
            ErrorCode::kIo,
            fmt::format("the driver does not register {} of host memory", format_bytes(stride_)),
            "lower cache_bytes");
      }
      state(slot) = State::kEmpty;
    }
  }
  PLIMSOLL_TRY(reclaimer_, governor_.add_reclaimer(this));
  return {};
}

KeptSlots::~KeptSlots() {
  reclaimer_ = {};
  const MutexLock lock(mutex_);
  for (std::int64_t slot = 0; slot < std::ssize(states_); ++slot) {
    if (state(slot) != State::kGone) {
      static_cast<void>(leave(slot));
    }
  }
}

KeptSlots::State& KeptSlots::state(std::int64_t slot) {
  PLIMSOLL_CHECK(slot >= 0 && slot < std::ssize(states_), "a slot that is not there");
  return states_[static_cast<std::size_t>(slot)];
}

bool KeptSlots::enter(std::int64_t slot) noexcept {
  return driver_.add == nullptr ||
         driver_.add(data() + slot * stride_, static_cast<std::size_t>(stride_), driver_.flags) ==
             0;
}

bool KeptSlots::leave(std::int64_t slot) noexcept {
  return driver_.remove == nullptr || driver_.remove(data() + slot * stride_) == 0;
}

KeptSlots::Found KeptSlots::take(std::int64_t slot) {
  const MutexLock lock(mutex_);
  State& now = state(slot);
  PLIMSOLL_CHECK(now != State::kTaken, "a slot that is taken already");
  if (now == State::kGone) {
    return Found::kNothing;
  }
  return std::exchange(now, State::kTaken) == State::kFull ? Found::kContent : Found::kRoom;
}

void KeptSlots::give(std::int64_t slot, bool has_content) {
  const MutexLock lock(mutex_);
  State& now = state(slot);
  PLIMSOLL_CHECK(now == State::kTaken, "a slot that nobody has taken");
  now = has_content ? State::kFull : State::kEmpty;
}

bool KeptSlots::has_content(std::int64_t slot) const {
  const MutexLock lock(mutex_);
  return states_[static_cast<std::size_t>(slot)] == State::kFull;
}

std::int64_t KeptSlots::leased_bytes() const {
  const MutexLock lock(mutex_);
  return slab_.leased_bytes();
}

std::int64_t KeptSlots::reclaim(PressureMove move, std::int64_t wanted_bytes) noexcept {
  if (move != PressureMove::kShrink) {
    return 0;
  }
  const MutexLock lock(mutex_);
  std::int64_t given = 0;
  for (std::int64_t slot = count_ - 1; slot >= 0 && given < wanted_bytes; --slot) {
    State& now = state(slot);
    if ((now != State::kEmpty && now != State::kFull) || !leave(slot)) {
      continue;
    }
    now = State::kGone;
    given += slab_.release_pages(slot * stride_, stride_);
  }
  return given;
}

std::int64_t KeptSlots::grow_back(std::int64_t room_bytes) noexcept {
  const MutexLock lock(mutex_);
  std::int64_t taken = 0;
  for (std::int64_t slot = 0; slot < count_ && taken + stride_ <= room_bytes; ++slot) {
    if (state(slot) != State::kGone) {
      continue;
    }
    if (!slab_.reacquire_pages(slot * stride_, stride_)) {
      break;
    }
    if (!enter(slot)) {
      slab_.release_pages(slot * stride_, stride_);
      break;
    }
    state(slot) = State::kEmpty;
    taken += stride_;
  }
  return taken;
}

}  // namespace plimsoll
