// SPDX-License-Identifier: Apache-2.0
//
// BatchRing: see loader_ring.h.
//
// Threads, Memory: as the header says.
#include "data/loader_ring.h"

#include <algorithm>
#include <chrono>
#include <utility>

#include <fmt/core.h>

#include "base/check.h"
#include "base/round.h"
#include "os/clock.h"

namespace plimsoll {
namespace {

constexpr std::int64_t kPage = 4096;
constexpr std::int64_t kAlign = 64;
constexpr std::int64_t kSlotsMin = 2;

// Cuts a slot's bytes into its parts, each aligned to 64.
class Cutter {
 public:
  explicit Cutter(std::span<std::byte> bytes) : bytes_(bytes) {}
  std::span<std::byte> cut(std::int64_t size) {
    const auto piece = bytes_.first(static_cast<std::size_t>(size));
    bytes_ = bytes_.subspan(static_cast<std::size_t>(round_up(size, kAlign)));
    return piece;
  }
  std::span<std::int64_t> cut_integers(std::int64_t count) {
    return {reinterpret_cast<std::int64_t*>(cut(count * 8).data()),
            static_cast<std::size_t>(count)};
  }

 private:
  std::span<std::byte> bytes_;
};

}  // namespace

// Hands a slot's own storage to the shared_ptr that holds it. deallocate() is the last thing a
// control block does, after the deleter and after the last weak reference; only then may the slot
// be filled again, so the return happens there.
template <class T>
struct BatchRing::SlotAllocator {
  using value_type = T;
  SlotAllocator(std::shared_ptr<BatchRing> owner, BatchSlot* slot_to_return) noexcept
      : ring(std::move(owner)), slot(slot_to_return) {}
  template <class U>
  SlotAllocator(const SlotAllocator<U>& other) noexcept : ring(other.ring), slot(other.slot) {}

  T* allocate(std::size_t count) {
    static_assert(sizeof(T) <= sizeof(BatchSlot::reference_count) && alignof(T) <= 16);
    PLIMSOLL_CHECK(count == 1, "a slot holds one control block");
    return reinterpret_cast<T*>(slot->reference_count.data());
  }
  void deallocate(T*, std::size_t) noexcept { ring->give_back(slot); }
  template <class U>
  bool operator==(const SlotAllocator<U>& other) const noexcept {
    return slot == other.slot;
  }

  std::shared_ptr<BatchRing> ring;  // Shared: the batch may outlive the loader.
  BatchSlot* slot;
};

std::int64_t BatchRingPlan::slot_bytes() const noexcept {
  std::int64_t bytes = 3 * round_up(batch_rows * 8, kAlign);
  for (const std::int64_t row_bytes : column_row_bytes) {
    bytes += round_up(batch_rows * row_bytes, kAlign);
  }
  return round_up(bytes, kPage);
}

Result<std::shared_ptr<BatchRing>> BatchRing::create(const Governor& governor,
                                                     const BatchRingPlan& plan) {
  auto ring = std::make_shared<BatchRing>();
  ring->slot_bytes_ = plan.slot_bytes();
  ring->patience_ = plan.patience;
  const std::int64_t scratch_bytes = round_up(plan.batch_rows * 8, kPage);
  const std::int64_t total = plan.slots * ring->slot_bytes_ + scratch_bytes;
  PLIMSOLL_TRY_VOID(ring->admission_.take(governor, Tag::kLoader, total, "queue_bytes"));
  PLIMSOLL_TRY(ring->slab_, Slab::create(governor, Tag::kLoader, total));
  ring->admission_.make_elastic();
  ring->slots_ = std::vector<BatchSlot>(static_cast<std::size_t>(plan.slots));
  for (BatchSlot& slot : ring->slots_) {
    const auto bytes = ring->slab_.take<std::byte>(ring->slot_bytes_, kPage);
    slot.slab_offset = bytes.data() - ring->slab_.data();
    Cutter cutter(bytes);
    for (const std::int64_t row_bytes : plan.column_row_bytes) {
      slot.columns.push_back(cutter.cut(plan.batch_rows * row_bytes));
    }
    slot.column_row_bytes = plan.column_row_bytes;
    slot.ids = cutter.cut_integers(plan.batch_rows);
    slot.groups = cutter.cut_integers(plan.batch_rows);
    slot.ordinals = cutter.cut_integers(plan.batch_rows);
  }
  ring->scratch_ = ring->slab_.take<std::int64_t>(plan.batch_rows, kPage);
  MutexLock lock(ring->mutex_);
  ring->in_flight_.resize(static_cast<std::size_t>(plan.slots));
  ring->wanted_slots_ = plan.slots;
  return ring;
}

// ---- fillers ----

BatchRing::Claim BatchRing::claim() {
  MutexLock lock(mutex_);
  for (;;) {
    if (stopped_) {
      return {};
    }
    const auto free = std::find_if(slots_.begin(), slots_.end(), [](const BatchSlot& slot) {
      return slot.state == SlotState::kFree;
    });
    if (free != slots_.end()) {
      free->state = SlotState::kFilling;
      free->number = next_claim_++;
      free->generation = generation_;
      free->error.reset();
      in_flight_[static_cast<std::size_t>(free->number) % in_flight_.size()] = &*free;
      return {&*free, free->number, origin_, generation_};
    }
    slot_freed_.wait(mutex_);
  }
}

void BatchRing::filled(BatchSlot* slot) {
  bool stale = false;
  {
    MutexLock lock(mutex_);
    stale = slot->generation != generation_ || stopped_;
    if (!stale) {
      slot->state = SlotState::kReady;
    }
  }
  if (stale) {
    give_back(slot);
  } else {
    batch_ready_.notify_all();
  }
}

// ---- the consumer ----

Result<std::shared_ptr<BatchSlot>> BatchRing::take() {
  BatchSlot* slot = nullptr;
  {
    const std::int64_t began = now_ns();
    const auto deadline = std::chrono::steady_clock::now() + patience_;
    MutexLock lock(mutex_);
    for (;;) {
      PLIMSOLL_CHECK(!stopped_, "take() after stop()");
      if (next_take_ < next_claim_) {
        slot = in_flight_[static_cast<std::size_t>(next_take_) % in_flight_.size()];
        if (slot->state == SlotState::kReady) {
          break;
        }
      } else if (count(SlotState::kFree) + count(SlotState::kFilling) == 0 &&
                 count(SlotState::kLeaving) == 0) {
        if (count(SlotState::kParked) == 0 || !unpark_one()) {
          return tl::unexpected(all_held());
        }
        continue;
      }
      if (!batch_ready_.wait_until(mutex_, deadline)) {
        return tl::unexpected(none_came());
      }
    }
    stall_ns_ += now_ns() - began;
    if (slot->error) {
      return tl::unexpected(*slot->error);
    }
    slot->state = SlotState::kHeld;
    held_most_ = std::max(held_most_, count(SlotState::kHeld));
    ++next_take_;
  }
  return std::shared_ptr<BatchSlot>(
      slot, [](BatchSlot*) noexcept {}, SlotAllocator<BatchSlot>(shared_from_this(), slot));
}

bool BatchRing::peek_ids(std::vector<std::int64_t>& ids, Claim& next) const {
  MutexLock lock(mutex_);
  next = {nullptr, next_take_, origin_, generation_};
  if (next_take_ == next_claim_) {
    return false;
  }
  const BatchSlot* slot = in_flight_[static_cast<std::size_t>(next_take_) % in_flight_.size()];
  if (slot->state != SlotState::kReady || slot->error) {
    return false;
  }
  ids.assign(slot->ids.begin(), slot->ids.begin() + slot->rows);
  return true;
}

void BatchRing::restart(const LoaderState& origin) {
  {
    MutexLock lock(mutex_);
    ++generation_;
    origin_ = origin;
    next_claim_ = 0;
    next_take_ = 0;
    for (BatchSlot& slot : slots_) {
      if (slot.state == SlotState::kReady) {
        slot.state = SlotState::kFree;
      }
    }
  }
  slot_freed_.notify_all();
}

void BatchRing::stop() {
  {
    MutexLock lock(mutex_);
    stopped_ = true;
  }
  slot_freed_.notify_all();
}

Error BatchRing::all_held() const {
  const BatchSlot* oldest = &slots_.front();
  for (const BatchSlot& slot : slots_) {
    const bool older =
        std::pair(slot.generation, slot.number) < std::pair(oldest->generation, oldest->number);
    oldest = older ? &slot : oldest;
  }
  const std::int64_t parked = count(SlotState::kParked);
  const std::string given =
      parked == 0 ? ""
                  : fmt::format("; {} more were given back, and their memory is refused", parked);
  return make_error(
      ErrorCode::kInvalidArgument,
      fmt::format("{} of {} batches are still held, the oldest since epoch {}, position {}; there "
                  "is none left to fill{}",
                  count(SlotState::kHeld), static_cast<std::int64_t>(slots_.size()) - parked,
                  oldest->epoch, oldest->position, given),
      "drop batches (and tensors made from them) before asking for more, or raise queue_bytes");
}

Error BatchRing::none_came() const {
  return make_error(
      ErrorCode::kIo,
      fmt::format("no batch came for {:.1f} s: {} of {} are being filled, {} held, {} given back",
                  static_cast<double>(patience_.count()) / 1000.0, count(SlotState::kFilling),
                  slots_.size(), count(SlotState::kHeld), count(SlotState::kParked)),
      "the disk of the features does not answer: look at it, then resume");
}

std::int64_t BatchRing::count(SlotState state) const {
  return std::count_if(slots_.begin(), slots_.end(),
                       [&](const BatchSlot& slot) { return slot.state == state; });
}

// ---- returning slots, parking them ----

void BatchRing::give_back(BatchSlot* slot) noexcept {
  {
    MutexLock lock(mutex_);
    const std::int64_t usable = static_cast<std::int64_t>(slots_.size()) -
                                count(SlotState::kParked) - count(SlotState::kLeaving);
    slot->state = usable > wanted_slots_ ? SlotState::kLeaving : SlotState::kFree;
    if (slot->state == SlotState::kFree) {
      slot_freed_.notify_one();
      return;
    }
  }
  park(slot);
}

std::int64_t BatchRing::park(BatchSlot* slot) noexcept {
  std::int64_t given = 0;
  {
    MutexLock lease_lock(lease_mutex_);
    given = slab_.release_pages(slot->slab_offset, slot_bytes_);
  }
  {
    MutexLock lock(mutex_);
    slot->state = SlotState::kParked;
  }
  batch_ready_.notify_all();  // take() may be waiting for a slot to have left.
  return given;
}

// Requires: a slot is parked. False: its memory was refused, and it stays parked.
bool BatchRing::unpark_one() {
  const auto parked = std::find_if(slots_.begin(), slots_.end(), [](const BatchSlot& slot) {
    return slot.state == SlotState::kParked;
  });
  parked->state = SlotState::kLeaving;  // Nobody else's while its pages come back.
  mutex_.unlock();
  bool taken = false;
  {
    MutexLock lease_lock(lease_mutex_);
    taken = slab_.reacquire_pages(parked->slab_offset, slot_bytes_).has_value();
  }
  mutex_.lock();
  parked->state = taken ? SlotState::kFree : SlotState::kParked;
  wanted_slots_ += taken ? 1 : 0;
  slot_freed_.notify_one();
  batch_ready_.notify_all();  // take() may be waiting for the slot to have settled.
  return taken;
}

std::int64_t BatchRing::shrink(std::int64_t wanted_bytes) noexcept {
  std::int64_t given = 0;
  std::int64_t to_leave = wanted_bytes <= 0 ? 0 : (wanted_bytes - 1) / slot_bytes_ + 1;
  {
    MutexLock lock(mutex_);
    to_leave = std::min(to_leave, wanted_slots_ - std::max(kSlotsMin, held_most_ + 1));
    wanted_slots_ -= std::max<std::int64_t>(to_leave, 0);
  }
  for (; to_leave > 0; --to_leave) {
    BatchSlot* leaving = nullptr;
    {
      MutexLock lock(mutex_);
      for (BatchSlot& slot : slots_) {
        leaving = slot.state == SlotState::kFree ? &slot : leaving;
      }
      if (leaving == nullptr) {
        break;  // The rest follows when slots are returned.
      }
      leaving->state = SlotState::kLeaving;
    }
    given += park(leaving);
  }
  return given;
}

std::int64_t BatchRing::grow_back(std::int64_t wanted_bytes) noexcept {
  std::int64_t taken = 0;
  MutexLock lock(mutex_);
  const auto all = static_cast<std::int64_t>(slots_.size());
  while (wanted_slots_ < all && wanted_bytes - taken >= slot_bytes_) {
    if (all - count(SlotState::kParked) - count(SlotState::kLeaving) > wanted_slots_) {
      ++wanted_slots_;  // One that was to leave when it comes back stays.
    } else if (count(SlotState::kParked) > 0 && unpark_one()) {
      taken += slot_bytes_;
    } else {
      break;
    }
  }
  return taken;
}

std::int64_t BatchRing::slots_in_use() const noexcept {
  MutexLock lock(mutex_);
  return static_cast<std::int64_t>(slots_.size()) - count(SlotState::kParked) -
         count(SlotState::kLeaving);
}

std::int64_t BatchRing::stall_ns() const noexcept {
  MutexLock lock(mutex_);
  return stall_ns_;
}

}  // namespace plimsoll
