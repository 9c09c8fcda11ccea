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
// Reading order: result.h, lease.h, limits.h, this file, then src/memory/governor.cpp.
//
// Threads: thread-safe. reserve() and Lease::grow() take one mutex; step_boundary() is for the one
//          thread that drives training, with no Plimsoll lock held.
// Memory:  fixed: a table of kTagCount pools and at most kMaxReclaimers reclaimers.
#pragma once

#include <array>
#include <cstdint>
#include <filesystem>
#include <memory>
#include <string>

#include "plimsoll/lease.h"
#include "plimsoll/limits.h"
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
      64LL << 20};                 ///< Declared for what cannot be leased; admitted at once.
  double pressure_fraction{0.85};  ///< Of the limit; see step_boundary().
};

/// What a component needs and may have, in bytes.
struct PoolSpec {
  Tag tag{Tag::kOther};
  std::int64_t floor_bytes{0};           ///< Guaranteed from admission on.
  std::int64_t cap_bytes{kUncapped};     ///< Never passed.
  const char* option{"--memory-limit"};  ///< Static: the option to raise when the cap refuses.
};

/// The moves under pressure, in the order they are tried.
enum class PressureMove : std::uint8_t {
  kPurge,   ///< Give back cached free memory: the arena's cache, the heap's top.
  kShrink,  ///< Shrink caches and queues. Never changes arithmetic.
  kStop,    ///< Checkpoint and stop at this step boundary.
};

/// Something that can give memory back. Called only from step_boundary() and reserve(), on the
/// calling thread, with no lock held; must not wait on another thread that may be in reserve().
class Reclaimer {
 public:
  virtual ~Reclaimer() = default;
  /// Gives back up to `wanted_bytes`; returns the bytes really given back (0 is an answer).
  virtual std::int64_t reclaim(PressureMove move, std::int64_t wanted_bytes) noexcept = 0;
  /// Takes again up to `room_bytes` of what kShrink gave back; returns how many. From
  /// step_boundary() alone.
  virtual std::int64_t grow_back(std::int64_t /*room_bytes*/) noexcept { return 0; }
  /// A short static name for events: "arena", "features".
  [[nodiscard]] virtual const char* name() const noexcept = 0;
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
  std::int64_t floor_bytes{0};
  std::int64_t cap_bytes{kUncapped};
  std::int64_t leased_bytes{0};
  std::int64_t peak_bytes{0};
};

/// A consistent copy of the ledger.
struct LedgerState {
  std::int64_t limit_bytes{0};
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

/// What step_boundary() saw and did.
struct PressureReport {
  Resident resident{};
  std::int64_t unexplained_bytes{0};  ///< Anonymous resident − leased (our ranges) − baseline.
  bool pressure{false};               ///< Resident above pressure_fraction with no lease for it.
  bool stop{false};                   ///< kStop was reached: checkpoint and end the run.
  std::int64_t purged_bytes{0};
  std::int64_t shrunk_bytes{0};
  std::int64_t grown_bytes{0};  ///< Taken again of what earlier pressure had made shrink.
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
  /// Errors: kOverBudget; the error's requested_bytes is the floor, and the advice says that the
  ///         smallest limit that would do is limit_bytes + requested_bytes − available_bytes.
  Result<void> admit(const PoolSpec& spec);

  /// Takes back an admission of the same size (a store that closes).
  void release_admission(const PoolSpec& spec) noexcept;

  /// Grants `bytes`. When refused, purges once (PressureMove::kPurge) and tries again.
  /// Errors: kOverBudget; allocates nothing to say so.
  Result<Lease> reserve(Tag tag, std::int64_t bytes);

  /// As reserve(), and never calls a reclaimer: for use inside allocators.
  Result<Lease> try_reserve(Tag tag, std::int64_t bytes);

  /// Reads what is resident and, under pressure, tries the three moves in order. Once there is room
  /// again, well below the threshold, what was shrunk may grow back into it.
  /// To be called between steps by the thread that trains.
  PressureReport step_boundary();

  /// Registers a reclaimer; at most kMaxReclaimers. Errors: kInternal when the table is full.
  Result<ReclaimerHandle> add_reclaimer(Reclaimer* reclaimer);

  [[nodiscard]] LedgerState state() const;
  [[nodiscard]] const LimitReport& limit() const;  ///< Requires: valid().
  [[nodiscard]] std::int64_t disk_limit_bytes() const noexcept;

  /// Measures the baseline again (after libraries were loaded that will stay). Only while no
  /// lease is out; otherwise does nothing and returns the old one.
  std::int64_t rebaseline();

  /// Ends this governor: later reserve() calls refuse; leases still out become orphans.
  void close() noexcept;

 private:
  explicit Governor(std::shared_ptr<Ledger> ledger) noexcept;
  std::shared_ptr<Ledger> ledger_;
};

}  // namespace plimsoll
