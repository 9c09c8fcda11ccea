// SPDX-License-Identifier: Apache-2.0
//
// Ledger: the sums behind a Governor. Every lease is recorded here; nothing is measured.
//
// Invariants, under the mutex:
//   leased == sum of pools' leased        committed == sum of max(floor, leased)
//   baseline + orphans + committed <= limit, unless a new baseline or a new orphan came later
// so bytes inside a promised floor can always be leased. A closed ledger grants nothing; what is
// still leased from it is an orphan, counted in the process-wide account until it is returned.
// Reading order: governor.h, this file, ledger.cpp, governor.cpp.
//
// Threads: thread-safe. No call-out while the mutex is held (reclaimers run outside it).
// Memory:  fixed. take() and give_back() allocate nothing, refusals included.
#pragma once

#include <array>
#include <atomic>
#include <cstdint>
#include <memory>

#include "base/mutex.h"
#include "memory/reclaimer_table.h"
#include "plimsoll/governor.h"

namespace plimsoll {

/// Bytes still leased from closed governors. Shared by all ledgers of the process.
using OrphanAccount = std::atomic<std::int64_t>;

class Ledger : public std::enable_shared_from_this<Ledger> {
 public:
  struct Baseline {
    std::int64_t total{0};
    std::int64_t anonymous{0};
  };
  struct Terms {
    LimitReport limit;
    std::int64_t disk_limit_bytes{0};
    double pressure_fraction{0};
    std::int64_t foreign_bytes{0};
    Baseline baseline;
  };
  Ledger(Terms terms, std::shared_ptr<OrphanAccount> orphans);

  Result<void> admit(const PoolSpec& spec);
  void release_admission(const PoolSpec& spec) noexcept;

  Result<Lease> grant(Tag tag, std::int64_t bytes);
  Result<void> take(Tag tag, std::int64_t bytes);
  void give_back(Tag tag, std::int64_t bytes) noexcept;

  /// Refuses from now on; what is leased becomes orphaned. Does nothing the second time.
  void close() noexcept;

  Result<ReclaimerHandle> add_reclaimer(Reclaimer* reclaimer);
  ReclaimerTable& reclaimers() noexcept { return reclaimers_; }

  [[nodiscard]] LedgerState state() const;
  [[nodiscard]] Baseline baseline() const;
  /// Sets the baseline if nothing is leased; returns the one that holds.
  Baseline rebaseline(const Baseline& measured);

  [[nodiscard]] const Terms& terms() const noexcept { return terms_; }
  [[nodiscard]] std::int64_t orphan_bytes() const noexcept {
    return orphans_->load(std::memory_order_relaxed);
  }

  /// Resident bytes when the pressure moves last ended; kUncapped: not under pressure. Written and
  /// read by the thread that trains, in step_boundary(), alone.
  [[nodiscard]] std::int64_t relieved_at_bytes() const noexcept { return relieved_at_bytes_; }
  void set_relieved_at_bytes(std::int64_t bytes) noexcept { relieved_at_bytes_ = bytes; }
  /// Whether caches were shrunk and have not all grown back; as relieved_at_bytes().
  [[nodiscard]] bool shrunk() const noexcept { return shrunk_; }
  void set_shrunk(bool shrunk) noexcept { shrunk_ = shrunk; }

 private:
  struct Pool {
    PoolState state{};
    const char* option{"--memory-limit"};
    int admissions{0};
    int uncapped_admissions{0};
    std::int64_t cap_sum{0};  // Over the capped admissions.
  };
  Pool& pool(Tag tag) PLIMSOLL_REQUIRES(mutex_) { return pools_[static_cast<std::size_t>(tag)]; }
  [[nodiscard]] std::int64_t free_bytes() const PLIMSOLL_REQUIRES(mutex_);
  [[nodiscard]] Error refusal(Tag tag, std::int64_t requested, std::int64_t available) const
      PLIMSOLL_REQUIRES(mutex_);
  void set_pool(Pool& pool, std::int64_t floor, std::int64_t leased) PLIMSOLL_REQUIRES(mutex_);

  const Terms terms_;  // Its baseline is only the first one.
  const std::shared_ptr<OrphanAccount> orphans_;
  ReclaimerTable reclaimers_;
  std::int64_t relieved_at_bytes_{kUncapped};
  bool shrunk_{false};

  mutable Mutex mutex_;
  std::array<Pool, kTagCount> pools_ PLIMSOLL_GUARDED_BY(mutex_){};
  Baseline baseline_ PLIMSOLL_GUARDED_BY(mutex_){};
  std::int64_t leased_ PLIMSOLL_GUARDED_BY(mutex_){0};
  std::int64_t leased_peak_ PLIMSOLL_GUARDED_BY(mutex_){0};
  std::int64_t committed_ PLIMSOLL_GUARDED_BY(mutex_){0};
  bool closed_ PLIMSOLL_GUARDED_BY(mutex_){false};
};

/// The Error of a governor that was closed, replaced or never made. Allocates nothing.
[[nodiscard]] Error closed_error() noexcept;

}  // namespace plimsoll
