// SPDX-License-Identifier: Apache-2.0
//
// A Lease is the right to hold a number of bytes, until it is destroyed.
//
// The governor grants leases; a component takes one before it allocates and keeps it beside the
// memory it pays for. Reading order: result.h, lease.h, governor.h, then src/memory/governor.cpp.
//
// Threads: one owner at a time; may be moved to another thread.
// Memory:  32 bytes; grow(), shrink() and the destructor take one mutex and allocate nothing.
#pragma once

#include <cstdint>
#include <memory>

#include "plimsoll/result.h"

namespace plimsoll {

class Ledger;

class [[nodiscard]] Lease {
 public:
  Lease() noexcept = default;  ///< Holds zero bytes.
  Lease(Lease&& other) noexcept;
  Lease& operator=(Lease&& other) noexcept;
  Lease(const Lease&) = delete;
  Lease& operator=(const Lease&) = delete;
  ~Lease();  ///< Returns every byte to the governor.

  /// Raises the lease to `bytes`, in bytes, never lowering it. Never waits and never calls a
  /// reclaimer, so it may be used inside an allocation.
  ///
  /// Requires: `bytes` >= 0.
  /// Errors:   kOverBudget if the limit or the pool's cap would be passed; then unchanged.
  Result<void> grow(std::int64_t bytes);

  /// Lowers the lease to `bytes`, never raising it.
  void shrink(std::int64_t bytes) noexcept;

  /// How much more could be leased now, in bytes; others may be quicker.
  [[nodiscard]] std::int64_t room() const noexcept;

  [[nodiscard]] std::int64_t bytes() const noexcept { return bytes_; }
  [[nodiscard]] Tag tag() const noexcept { return tag_; }

 private:
  friend class Ledger;
  Lease(std::shared_ptr<Ledger> ledger, Tag tag, std::int64_t bytes) noexcept;

  std::shared_ptr<Ledger> ledger_;  // Shared: a tensor in Python may outlive the governor.
  std::int64_t bytes_{0};           // Invariant: equals what ledger_ has recorded for this lease.
  Tag tag_{Tag::kOther};
};

static_assert(sizeof(Lease) == 32);

}  // namespace plimsoll
