// SPDX-License-Identifier: Apache-2.0
//
// KeptSlots: equal pieces of memory whose content is found again, unless the memory was needed.
//
// All of it is leased and touched at open. Under pressure, and for what would be refused, slots
// that nobody has taken give their memory back, the last one first; it comes again when there is
// room. Whoever takes a slot hears whether its content is still there.
//
// Threads: any.   Memory: slots × slot_bytes at most, elastic; a byte for each slot on the heap.
//                 fixed_bytes are leased for memory of the owner's, until the end.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include "base/mutex.h"
#include "memory/admission.h"
#include "memory/slab.h"
#include "plimsoll/governor.h"
#include "plimsoll/pressure.h"

namespace plimsoll {

/// How a device's driver learns of memory that it may read by itself, and that it may no more.
/// Both return 0 where they succeed. Of CUDA: cudaHostRegister, cudaHostUnregister.
struct HostRegistration {
  int (*add)(void* data, std::size_t size, unsigned flags){nullptr};
  int (*remove)(void* data){nullptr};
  unsigned flags{0};
};

class KeptSlots final : public Reclaimer {
 public:
  enum class Found : std::uint8_t {
    kContent,  ///< What was in it when it was given back.
    kRoom,     ///< Memory, with any content.
    kNothing,  ///< No memory now; the slot is not taken.
  };

  /// Admits and leases `fixed_bytes`, and `count` slots of `slot_bytes` each (both rounded up to
  /// 4096), and registers each slot where a driver is named.
  /// Errors: kOverBudget; kIo (the driver refuses); kInvalidArgument.
  static Result<std::unique_ptr<KeptSlots>> open(const Governor& governor, std::int64_t count,
                                                 std::int64_t slot_bytes, std::int64_t fixed_bytes,
                                                 HostRegistration driver = {});
  ~KeptSlots() override;
  KeptSlots(const KeptSlots&) = delete;
  KeptSlots& operator=(const KeptSlots&) = delete;

  /// The slot's memory stays until give(). Requires: a slot that is not taken.
  Found take(std::int64_t slot);
  /// From here on its memory may go. has_content: what is in it is to be found again.
  /// Requires: a slot that is taken.
  void give(std::int64_t slot, bool has_content);
  /// Whether take() would find its content now.
  [[nodiscard]] bool has_content(std::int64_t slot) const;

  [[nodiscard]] std::int64_t count() const noexcept { return count_; }
  [[nodiscard]] std::int64_t stride() const noexcept { return stride_; }  ///< Bytes.
  [[nodiscard]] std::int64_t leased_bytes() const;                        ///< Without fixed_bytes.
  [[nodiscard]] std::byte* data() const noexcept { return slab_.data(); }

  std::int64_t reclaim(PressureMove move, std::int64_t wanted_bytes) noexcept override;
  std::int64_t grow_back(std::int64_t room_bytes) noexcept override;
  [[nodiscard]] const char* name() const noexcept override { return "weights"; }

 private:
  enum class State : std::uint8_t { kGone, kEmpty, kFull, kTaken };

  KeptSlots(Governor governor, std::int64_t count, std::int64_t stride, HostRegistration driver);
  Result<void> start(std::int64_t fixed_bytes);
  [[nodiscard]] bool enter(std::int64_t slot) noexcept;
  [[nodiscard]] bool leave(std::int64_t slot) noexcept;
  State& state(std::int64_t slot) PLIMSOLL_REQUIRES(mutex_);

  Governor governor_;
  const std::int64_t count_;
  const std::int64_t stride_;
  const HostRegistration driver_;
  Admission admission_;
  Lease fixed_;
  mutable Mutex mutex_;  // Guards the slab's pages, too.
  Slab slab_;
  std::vector<State> states_ PLIMSOLL_GUARDED_BY(mutex_);
  ReclaimerHandle reclaimer_;  // Last: the governor may call until it is gone.
};

}  // namespace plimsoll
