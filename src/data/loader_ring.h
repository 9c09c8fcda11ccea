// SPDX-License-Identifier: Apache-2.0
//
// BatchRing: a fixed number of batch slots that travel from fillers to the consumer and back.
//
//   kFree ─claim→ kFilling ─filled→ kReady ─take→ kHeld ─(last reference dropped)→ kFree
//   kFree, or a slot coming back ─shrink→ kLeaving → kParked ─grow_back→ kLeaving → kFree
//
// A parked slot comes back too when the consumer holds all others. Where memory for it is refused
// the ring stays small.
//
// Batches are numbered from 0 since the last restart(); a filler takes a free slot and the next
// number in one step, so batch n is always on its way when n + 1 is. A slot is returned by whoever
// drops the last reference to it, on any thread, even when the loader is gone: references share
// ownership of the ring.
//
// Reading order: include/plimsoll/loader.h, this file, loader_ring.cpp, loader.cpp.
//
// Threads: claim() and filled() from any number of fillers; take(), restart() from one consumer;
//          shrink(), grow_back() and the return of slots from any thread. No lock is held while
//          filling, nor while calling the governor.
// Memory:  one slab of slots × slot bytes (Tag::kLoader), leased and touched at creation. Taking a
//          batch allocates nothing: the reference count lives in the slot.
#pragma once

#include <array>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <vector>

#include "base/mutex.h"
#include "memory/admission.h"
#include "memory/slab.h"
#include "plimsoll/loader.h"

namespace plimsoll {

enum class SlotState : std::uint8_t { kFree, kFilling, kReady, kHeld, kLeaving, kParked };

/// A batch. Its filler writes it while kFilling; its holder reads it while kHeld.
struct BatchSlot {
  std::span<std::int64_t> ids{};  // Room for batch_rows, as all of these.
  std::span<std::int64_t> groups{};
  std::span<std::int64_t> ordinals{};
  std::vector<std::span<std::byte>> columns{};  // Sized at creation.
  std::vector<std::int64_t> column_row_bytes{};
  std::int64_t rows{0};
  std::int64_t epoch{0};
  std::int64_t position{0};
  bool ends_epoch{false};
  LoaderState after{};
  std::optional<Error> error{};  // Why it could not be filled.

  std::int64_t number{0};  // These three: guarded by the ring's mutex.
  std::uint64_t generation{0};
  SlotState state{SlotState::kFree};
  std::int64_t slab_offset{0};
  alignas(16) std::array<std::byte, 128> reference_count{};  // The shared_ptr's control block.
};

struct BatchRingPlan {
  std::int64_t slots{0};
  std::int64_t batch_rows{0};
  std::vector<std::int64_t> column_row_bytes{};
  std::chrono::milliseconds patience{600'000};  // Of take(): a disk that hangs is an error then.

  [[nodiscard]] std::int64_t slot_bytes() const noexcept;
};

class BatchRing : public std::enable_shared_from_this<BatchRing> {
 public:
  /// What a filler has to do, and where.
  struct Claim {
    BatchSlot* slot{nullptr};  // Null: the ring has stopped.
    std::int64_t number{0};
    LoaderState origin{};         // The state at which batch 0 begins.
    std::uint64_t generation{0};  // Counts restarts.
  };

  /// Errors: kOverBudget, kIo.
  static Result<std::shared_ptr<BatchRing>> create(const Governor& governor,
                                                   const BatchRingPlan& plan);
  BatchRing() = default;
  BatchRing(const BatchRing&) = delete;
  BatchRing& operator=(const BatchRing&) = delete;

  /// Waits for a free slot and takes it together with the next number.
  [[nodiscard]] Claim claim();
  void filled(BatchSlot* slot);

  /// Waits for the next batch in order. Never waits when the caller holds every slot.
  /// Errors: the slot's own (again at every call); kInvalidArgument when all are held; kIo when
  ///         none came for as long as the plan's patience.
  Result<std::shared_ptr<BatchSlot>> take();

  /// Copies the ids of the next batch when it is ready; otherwise tells its number.
  [[nodiscard]] bool peek_ids(std::vector<std::int64_t>& ids, Claim& next) const;

  /// Drops what is filled or being filled and begins again at `origin`.
  void restart(const LoaderState& origin);
  void stop();

  /// Down to two slots, and to one more than the consumer ever held at once.
  std::int64_t shrink(std::int64_t wanted_bytes) noexcept;
  std::int64_t grow_back(std::int64_t wanted_bytes) noexcept;

  [[nodiscard]] std::int64_t slots_in_use() const noexcept;
  [[nodiscard]] std::int64_t slot_bytes() const noexcept { return slot_bytes_; }
  [[nodiscard]] std::span<std::int64_t> scratch() noexcept { return scratch_; }
  [[nodiscard]] std::int64_t stall_ns() const noexcept;

 private:
  template <class T>
  struct SlotAllocator;

  void give_back(BatchSlot* slot) noexcept;
  std::int64_t park(BatchSlot* slot) noexcept;
  bool unpark_one() PLIMSOLL_REQUIRES(mutex_);
  [[nodiscard]] std::int64_t count(SlotState state) const PLIMSOLL_REQUIRES(mutex_);
  [[nodiscard]] Error all_held() const PLIMSOLL_REQUIRES(mutex_);
  [[nodiscard]] Error none_came() const PLIMSOLL_REQUIRES(mutex_);

  Admission admission_;
  std::int64_t slot_bytes_{0};
  std::chrono::milliseconds patience_{0};
  Mutex lease_mutex_;  // Changes of the slab's lease take turns; taken with no other lock held.
  Slab slab_;
  std::span<std::int64_t> scratch_{};  // One batch of ordinals, for the consumer.

  mutable Mutex mutex_;
  CondVar slot_freed_;
  CondVar batch_ready_;
  std::vector<BatchSlot> slots_;                                   // Never resized after creation.
  std::vector<BatchSlot*> in_flight_ PLIMSOLL_GUARDED_BY(mutex_);  // Batch n at n mod slots.
  std::int64_t next_claim_ PLIMSOLL_GUARDED_BY(mutex_){0};
  std::int64_t next_take_ PLIMSOLL_GUARDED_BY(mutex_){0};
  std::uint64_t generation_ PLIMSOLL_GUARDED_BY(mutex_){0};
  std::int64_t wanted_slots_ PLIMSOLL_GUARDED_BY(mutex_){0};  // Lowered by shrink().
  std::int64_t held_most_ PLIMSOLL_GUARDED_BY(mutex_){0};     // By the consumer at one time.
  LoaderState origin_ PLIMSOLL_GUARDED_BY(mutex_){};
  std::int64_t stall_ns_ PLIMSOLL_GUARDED_BY(mutex_){0};
  bool stopped_ PLIMSOLL_GUARDED_BY(mutex_){false};
};

}  // namespace plimsoll
