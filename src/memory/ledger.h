// SPDX-License-Identifier: Apache-2.0
//
// Ledger: the sums behind a Governor. Every lease is recorded here; what the governor measured is
// kept beside them, and decides nothing here.
//
// Invariants, under the mutex:
//   leased == sum of pools' leased        committed == sum of max(floor, leased)
//   baseline + orphans + committed <= limit, unless a new baseline or a new orphan came later
// so bytes inside a promised floor can always be leased. A closed ledger grants nothing; what is
// still leased from it is an orphan, counted in the process-wide account until it is returned.
//
// The limit in force follows the one asked for: down, as floors yield and leases return, never
// below what is committed; up, at once. A pool yields of its floor only what is elastic and not
// leased:
//   0 <= yielded <= elastic               admitted floor == floor + yielded
// It leaves working room: what pools together have leased at most beyond their admitted floors.
// Gathered rows and batches come and go there, and a limit lowered to the last byte would refuse
// the next of them. A limit as high as when nothing was yielded leaves none: what was admitted is
// promised again. Reading order: governor.h, this file, ledger.cpp, governor.cpp.
//
// A forked child may have inherited the mutex locked, by a thread that is not there. So it locks
// nothing, and changes nothing: what it reads is as it was when it was forked.
//
// Threads: thread-safe. No call-out while the mutex is held (reclaimers run outside it).
// Memory:  fixed. take() and give_back() allocate nothing, refusals included.
#pragma once

#include <array>
#include <atomic>
#include <cstdint>
#include <filesystem>
#include <memory>

#include "base/mutex.h"
#include "memory/reclaimer_table.h"
#include "os/fork.h"
#include "os/memory_signals.h"
#include "os/tree_meter.h"
#include "plimsoll/governor.h"
#include "plimsoll/tree_memory.h"

namespace plimsoll {

/// Bytes still leased from closed governors. Shared by all ledgers of the process.
using OrphanAccount = std::atomic<std::int64_t>;

class Ledger : public std::enable_shared_from_this<Ledger> {
 public:
  struct Baseline {
    std::int64_t total{0};
    std::int64_t anonymous{0};  // And shared, and mapped weights: all but other pages of files.
    [[nodiscard]] std::int64_t file() const noexcept { return total - anonymous; }
  };
  struct Terms {
    LimitReport limit;  // The first one.
    std::int64_t disk_limit_bytes{0};
    std::int64_t disk_asked_bytes{-1};  // As the user said; −1: not at all.
    double pressure_fraction{0};
    std::int64_t foreign_bytes{0};
    Baseline baseline;
    std::filesystem::path proc_root{"/proc"};
    std::filesystem::path cgroup_root{"/sys/fs/cgroup"};
  };
  Ledger(Terms terms, std::shared_ptr<OrphanAccount> orphans);

  /// Whether this is a forked child of the process that made the ledger. There only state(),
  /// limit(), measured() and room() may be called.
  [[nodiscard]] bool forked() const noexcept { return mark_.forked(); }
  /// Errors: kInvalidArgument in a forked child.
  [[nodiscard]] Result<void> check_own(const char* call) const;

  Result<void> admit(const PoolSpec& spec);
  void release_admission(const PoolSpec& spec) noexcept;

  Result<Lease> grant(Tag tag, std::int64_t bytes);
  Result<void> take(Tag tag, std::int64_t bytes);
  void give_back(Tag tag, std::int64_t bytes) noexcept;

  void make_elastic(Tag tag, std::int64_t bytes) noexcept;

  /// What the limit asked for and the floors have come to.
  struct Settled {
    std::int64_t missing_bytes{0};   // The limit in force is above the one asked for by as many.
    std::int64_t wanted_bytes{0};    // Those, and what is missing of the working room.
    std::int64_t restored_bytes{0};  // Promised again to pools that had yielded them.
  };
  /// Asks for another limit, and settles. Errors: kInvalidArgument when closed.
  Result<Settled> set_limit(LimitReport limit);
  /// Takes from unleased elastic floors, or promises them again, as the limit asked for has it.
  Settled settle() noexcept;
  /// Has pools yield up to so much of their floors, elastic and not leased; returns how much.
  std::int64_t yield(std::int64_t bytes) noexcept;
  /// Whether any pool has an elastic part that it has not yielded.
  [[nodiscard]] bool may_yield() const noexcept;
  /// Forgets what was needed beyond the floors before the call that came before this one.
  void forget_need() noexcept;
  /// Whether settle() may have something to do.
  [[nodiscard]] bool unsettled() const noexcept;
  [[nodiscard]] LimitReport limit() const;
  /// How much more a pool may lease now.
  [[nodiscard]] std::int64_t room(Tag tag) const noexcept;
  /// Elastic bytes that are promised and not leased: what shrank and may grow back.
  [[nodiscard]] std::int64_t unleased_elastic() const noexcept;

  /// Refuses from now on; what is leased becomes orphaned. Does nothing the second time.
  void close() noexcept;

  Result<ReclaimerHandle> add_reclaimer(Reclaimer* reclaimer);
  ReclaimerTable& reclaimers() noexcept { return reclaimers_; }

  [[nodiscard]] LedgerState state() const;
  [[nodiscard]] Baseline baseline() const;
  /// Sets the baseline if nothing is leased; returns the one that holds.
  Baseline rebaseline(const Baseline& measured);
  Baseline lower_baseline(const Baseline& gone);
  /// What the last look saw.
  void set_measured(const Measured& measured) noexcept;
  [[nodiscard]] Measured measured() const noexcept;

  [[nodiscard]] const Terms& terms() const noexcept { return terms_; }
  [[nodiscard]] std::int64_t orphan_bytes() const noexcept {
    return orphans_->load(std::memory_order_relaxed);
  }

  /// What step_boundary() and set_limit() remember from one call to the next. Written and read by
  /// the threads that call them; each is a hint on its own, so order between them is free.
  struct Course {
    std::atomic<std::int64_t> relieved_at_bytes{kUncapped};  // Resident when the moves last ended.
    std::atomic<bool> shrunk{false};                         // By pressure, and not all grown back.
    std::atomic<std::int64_t> shrunk_bytes{0};               // Of these, at most.
    std::atomic<bool> regrow{false};        // Floors were promised again and not all leased again.
    std::atomic<std::int64_t> asked_ns{0};  // When the last limit was asked for.
    std::atomic<int> tries{0};              // Step boundaries at which it did not fit.
    std::atomic<std::int64_t> counted{0};   // Step boundaries since a need was last forgotten.
    std::atomic<std::int64_t> heeded_ns{INT64_MIN};   // When the kernel was last acted upon.
    std::atomic<std::int64_t> stepped_ns{INT64_MIN};  // When a thread that trains last came by.
    std::atomic<std::int64_t> interval_ns{0};  // Its longest way from one time to the next, lately.
  };
  // What is read of the kernel: of whoever has the turn.
  struct Kernel {
    MemorySignals signals;
    std::int64_t looked_ns{INT64_MIN};
    TreeMeter meter;
  };
  Kernel& kernel() noexcept { return kernel_; }
  /// One thread at a time looks and acts. It holds no lock meanwhile: reclaimers are called.
  void take_turn() noexcept;
  void end_turn() noexcept;
  Course& course() noexcept { return course_; }

 private:
  class ReadLock;
  struct Pool {
    PoolState state{};
    const char* option{"memory_limit"};
    int admissions{0};
    int uncapped_admissions{0};
    std::int64_t cap_sum{0};        // Over the capped admissions.
    std::int64_t elastic_bytes{0};  // Over all admissions.
  };
  Pool& pool(Tag tag) PLIMSOLL_REQUIRES(mutex_) { return pools_[static_cast<std::size_t>(tag)]; }
  [[nodiscard]] std::int64_t held_bytes() const PLIMSOLL_REQUIRES(mutex_);
  [[nodiscard]] std::int64_t free_bytes() const PLIMSOLL_REQUIRES(mutex_);
  [[nodiscard]] std::int64_t beyond_floors() const PLIMSOLL_REQUIRES(mutex_);
  [[nodiscard]] std::int64_t working_room() const PLIMSOLL_REQUIRES(mutex_);
  [[nodiscard]] std::int64_t below_limit(const PoolState& pool) const PLIMSOLL_REQUIRES(mutex_);
  Settled settle_now() PLIMSOLL_REQUIRES(mutex_);
  std::int64_t yield_floors(std::int64_t bytes) PLIMSOLL_REQUIRES(mutex_);
  std::int64_t restore_floors(std::int64_t room) PLIMSOLL_REQUIRES(mutex_);
  [[nodiscard]] Error refusal(Tag tag, std::int64_t requested, std::int64_t available) const
      PLIMSOLL_REQUIRES(mutex_);
  void set_pool(Pool& pool, std::int64_t floor, std::int64_t leased) PLIMSOLL_REQUIRES(mutex_);

  const ForkMark mark_;
  const Terms terms_;  // Its limit and baseline are only the first ones.
  const std::shared_ptr<OrphanAccount> orphans_;
  ReclaimerTable reclaimers_;
  Course course_;
  Kernel kernel_;
  Mutex turn_mutex_;
  CondVar turn_ended_;
  bool turn_taken_ PLIMSOLL_GUARDED_BY(turn_mutex_){false};

  mutable Mutex mutex_;
  std::array<Pool, kTagCount> pools_ PLIMSOLL_GUARDED_BY(mutex_){};
  Baseline baseline_ PLIMSOLL_GUARDED_BY(mutex_){};
  // Shared so that readers copy it without the mutex; replaced whole by set_limit().
  std::shared_ptr<const LimitReport> limit_ PLIMSOLL_GUARDED_BY(mutex_);
  std::int64_t limit_bytes_ PLIMSOLL_GUARDED_BY(mutex_){0};  // In force.
  std::int64_t asked_bytes_ PLIMSOLL_GUARDED_BY(mutex_){0};
  std::int64_t yielded_ PLIMSOLL_GUARDED_BY(mutex_){0};      // Over all pools.
  std::int64_t whole_limit_ PLIMSOLL_GUARDED_BY(mutex_){0};  // In force when it was last zero.
  std::int64_t leased_ PLIMSOLL_GUARDED_BY(mutex_){0};
  std::int64_t leased_peak_ PLIMSOLL_GUARDED_BY(mutex_){0};
  std::int64_t beyond_peak_ PLIMSOLL_GUARDED_BY(mutex_){0};    // Of beyond_floors(), lately, …
  std::int64_t beyond_before_ PLIMSOLL_GUARDED_BY(mutex_){0};  // … and before forget_need().
  std::int64_t committed_ PLIMSOLL_GUARDED_BY(mutex_){0};
  Measured measured_ PLIMSOLL_GUARDED_BY(mutex_){};
  bool closed_ PLIMSOLL_GUARDED_BY(mutex_){false};
};

/// The Error of a governor that was closed, replaced or never made. Allocates nothing.
[[nodiscard]] Error closed_error() noexcept;

}  // namespace plimsoll
