// SPDX-License-Identifier: Apache-2.0
//
// The Governor holds the one memory limit of a process and grants leases against it.
//
// The rule everything follows: the limit decides where bytes live, never which arithmetic runs.
// Components are admitted before step 0 (a floor that is guaranteed to them, a cap they never
// pass); after that the governor is a ledger and a tripwire.
//
//   limit = baseline + orphans + the sum over pools of max(floor, leased) + free
//
// set_limit() moves the limit while all that is in use: caches and queues give up what they can of
// their floors, and are promised it again when the limit rises.
//
// Reading order: result.h, lease.h, limits.h, pressure.h, this file, then src/memory/governor.cpp.
//
// Threads: thread-safe. reserve() and Lease::grow() take one mutex; step_boundary() is for the one
//          thread that drives training, with no Plimsoll lock held; set_limit() for any, likewise.
// Forks:   a child may read it, as it was then; what would change it is refused, kInvalidArgument.
// Memory:  fixed: a table of kTagCount pools and at most kMaxReclaimers reclaimers.
#pragma once

#include <array>
#include <cstdint>
#include <filesystem>
#include <memory>
#include <string>

#include "plimsoll/lease.h"
#include "plimsoll/limits.h"
#include "plimsoll/pressure.h"
#include "plimsoll/result.h"

namespace plimsoll {

inline constexpr std::int64_t kUncapped = INT64_MAX;
inline constexpr int kMaxReclaimers = 32;

struct GovernorOptions {
  std::string memory_limit{};  ///< "", "6GiB", "25%"; see find_limit().
  std::string memory_limit_source{"--memory-limit"};
  std::string disk_limit{};  ///< "": no bound beside the free space of `directory`.
  std::filesystem::path directory{"."};
  std::int64_t foreign_bytes{
      64LL << 20};                 ///< For what has no lease, children included; admitted at once.
  double pressure_fraction{0.85};  ///< Of the limit; see step_boundary().
  std::filesystem::path proc_root{"/proc"};  ///< Bounds and the kernel's signals are looked for
  std::filesystem::path cgroup_root{"/sys/fs/cgroup"};  ///< below these; tests lay out their own.
};

/// What a component needs and may have, in bytes.
struct PoolSpec {
  Tag tag{Tag::kOther};
  std::int64_t floor_bytes{0};        ///< Guaranteed from admission on.
  std::int64_t cap_bytes{kUncapped};  ///< Never passed.
  std::int64_t elastic_bytes{0};      ///< Of the floor: what set_limit() may take while unleased.
  const char* option{"--memory-limit"};  ///< Static: the option to raise when the cap refuses.
};

/// Keeps a Reclaimer registered until destroyed.
class [[nodiscard]] ReclaimerHandle {
 public:
  ReclaimerHandle() noexcept = default;
  ReclaimerHandle(ReclaimerHandle&& other) noexcept;
  ReclaimerHandle& operator=(ReclaimerHandle&& other) noexcept;
  ReclaimerHandle(const ReclaimerHandle&) = delete;
  ReclaimerHandle& operator=(const ReclaimerHandle&) = delete;
  ~ReclaimerHandle();

 private:
  friend class Ledger;
  std::shared_ptr<Ledger> ledger_;
  int slot_{-1};
};

/// One pool's line in the ledger.
struct PoolState {
  std::int64_t floor_bytes{0};    ///< Promised now.
  std::int64_t yielded_bytes{0};  ///< Admitted, and taken by a lower limit until it rises again.
  std::int64_t cap_bytes{kUncapped};
  std::int64_t leased_bytes{0};
  std::int64_t peak_bytes{0};
};

/// A consistent copy of the ledger.
struct LedgerState {
  std::int64_t limit_bytes{0};     ///< In force.
  std::int64_t asked_bytes{0};     ///< By the last set_limit(); below limit_bytes until it fits.
  std::int64_t baseline_bytes{0};  ///< Resident before anything was leased.
  std::int64_t leased_bytes{0};    ///< Over all pools.
  std::int64_t leased_peak_bytes{0};
  std::int64_t committed_bytes{0};  ///< Sum of max(floor, leased).
  std::int64_t orphan_bytes{0};     ///< Leases of replaced governors still alive.
  std::array<PoolState, kTagCount> pools{};

  [[nodiscard]] std::int64_t free_bytes() const noexcept {
    return limit_bytes - baseline_bytes - orphan_bytes - committed_bytes;
  }
  /// A table, one line per pool that holds or is promised anything.
  [[nodiscard]] std::string to_string() const;
};

class Governor {
 public:
  /// Finds the limit, measures the baseline and becomes the process's governor.
  ///
  /// A governor that holds nothing is replaced; its handles then refuse with kInvalidArgument.
  /// Errors: kInvalidArgument for a bad limit, or when another governor still has leases (it names
  ///         the holders); kOverBudget when the baseline alone passes the limit (names the smallest
  ///         limit that would do).
  static Result<Governor> create(const GovernorOptions& options);

  /// The process's governor, or an empty handle when there is none.
  static Governor current() noexcept;

  Governor() noexcept = default;  ///< Empty: valid() is false.
  [[nodiscard]] bool valid() const noexcept { return ledger_ != nullptr; }

  /// Promises `floor_bytes` to a tag and caps it. Calls for one tag add up (two stores).
  /// Errors: kOverBudget; the error's requested_bytes is the floor, and its text names the limit
  ///         that this takes at least: limit_bytes + requested_bytes − available_bytes.
  Result<void> admit(const PoolSpec& spec);

  /// Takes back an admission of the same sizes, what is elastic included (a store that closes).
  void release_admission(const PoolSpec& spec) noexcept;

  /// Grants `bytes`. When refused, purges once (PressureMove::kPurge) and tries again.
  /// Errors: kOverBudget; allocates nothing to say so.
  Result<Lease> reserve(Tag tag, std::int64_t bytes);

  /// As reserve(), and never calls a reclaimer: for use inside allocators.
  Result<Lease> try_reserve(Tag tag, std::int64_t bytes);

  /// From now on up to `elastic_bytes` more of a tag's floor may be taken by set_limit() while they
  /// are not leased. To be called once the floor is leased; release_admission() takes it back.
  void make_elastic(Tag tag, std::int64_t elastic_bytes) noexcept;

  /// Reads what is resident and, under pressure, tries the three moves in order. Once there is room
  /// again, well below the threshold, what was shrunk may grow back into it. Goes on with a limit
  /// that was lowered further than what was in use allowed; a second later that is a reason to
  /// stop. To be called between steps by the thread that trains.
  PressureReport step_boundary();

  /// Moves the limit to `text` ("6GiB", "25%"), or to a smaller bound found as at create().
  ///
  /// Lower: frees are purged and caches and queues shrink before this returns. What is in use
  /// cannot follow at once: the limit in force then stays at what is still promised,
  /// LimitChange::settled() is false, and every step_boundary() tries again. Higher: caches and
  /// queues take again what they had been admitted, as far as there is room. `source` is what
  /// reports call the bound.
  ///
  /// Errors: kInvalidArgument for an unreadable size or a closed governor; kIo when /proc is not
  ///         there. Then nothing has changed.
  Result<LimitChange> set_limit(const std::string& text, const std::string& source = "set_limit");

  /// Registers a reclaimer; at most kMaxReclaimers. Errors: kInternal when the table is full.
  Result<ReclaimerHandle> add_reclaimer(Reclaimer* reclaimer);

  [[nodiscard]] LedgerState state() const;
  [[nodiscard]] LimitReport limit() const;  ///< The one asked for last. Requires: valid().
  [[nodiscard]] std::int64_t disk_limit_bytes() const noexcept;
  /// Compares the most that `what` may come to hold on disk with GovernorOptions::disk_limit; each
  /// table and run by itself. Without one there is nothing to compare. Errors: kInvalidArgument.
  [[nodiscard]] Result<void> check_disk_limit(const std::string& what, std::int64_t bytes) const;

  /// Measures the baseline again (after libraries were loaded that will stay). Only while no
  /// lease is out; otherwise does nothing and returns the old one.
  std::int64_t rebaseline();

  /// Takes bytes from the baseline that were resident before the governor and have gone back to the
  /// system since, as when tensors made earlier moved into leased memory. `anonymous_bytes` is the
  /// part of them that was not of files. Never below 0. Returns the baseline.
  std::int64_t lower_baseline(std::int64_t bytes, std::int64_t anonymous_bytes);

  /// Ends this governor: later reserve() calls refuse; leases still out become orphans.
  void close() noexcept;

 private:
  explicit Governor(std::shared_ptr<Ledger> ledger) noexcept;
  std::shared_ptr<Ledger> ledger_;
};

}  // namespace plimsoll
