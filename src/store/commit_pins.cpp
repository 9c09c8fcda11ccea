// SPDX-License-Identifier: Apache-2.0
#include "store/commit_pins.h"

#include <algorithm>
#include <cstdint>
#include <utility>

#include "base/check.h"

namespace plimsoll {
namespace {

constexpr std::int64_t kSlots = 1 << 20;  // The byte of slot 0.
constexpr std::int64_t kSteps = 1 << 21;  // The byte of step 0; those of later steps follow.

std::int64_t byte_of(std::int64_t step) noexcept {
  return kSteps + std::min(step, INT64_MAX - kSteps - 1);
}

}  // namespace

Result<CommitPins> CommitPins::open(const std::filesystem::path& super, bool writer) {
  CommitPins pins;
  PLIMSOLL_TRY(pins.locks_, RangeLocks::open(super, writer ? RangeLocks::Access::kReadWrite
                                                           : RangeLocks::Access::kRead));
  return pins;
}

CommitPins::Replacing::Replacing(CommitPins& pins, int slot) noexcept
    : pins_(pins),
      slot_(slot),
      marked_(pins.locks_.try_lock(kSlots + slot, RangeLocks::Kind::kExclusive)) {}

CommitPins::Replacing::~Replacing() {
  if (marked_ == RangeLocks::Taken::kYes) {
    pins_.locks_.unlock(kSlots + slot_);
  }
}

// When the mark could not be made a reader was just waiting for it to end. That one has its pin,
// but the next need not wait, and may come too late to be seen: the commit counts as pinned.
bool CommitPins::Replacing::pinned(std::int64_t step) const noexcept {
  return marked_ == RangeLocks::Taken::kHeldByOthers ||
         pins_.locks_.held_by_others(byte_of(step), 1);
}

bool CommitPins::any() const noexcept {
  return locks_.held_by_others(kSteps, 0);
}

void CommitPins::pin(std::int64_t step) noexcept {
  unpin();
  if (locks_.lock(byte_of(step), RangeLocks::Kind::kShared) == RangeLocks::Taken::kYes) {
    step_ = step;
  }
}

void CommitPins::unpin() noexcept {
  if (const std::int64_t step = std::exchange(step_, -1); step >= 0) {
    locks_.unlock(byte_of(step));
  }
}

void CommitPins::await(int slot) noexcept {
  if (locks_.lock(kSlots + slot, RangeLocks::Kind::kShared) == RangeLocks::Taken::kYes) {
    locks_.unlock(kSlots + slot);
  }
}

}  // namespace plimsoll
