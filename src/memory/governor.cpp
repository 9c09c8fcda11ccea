// SPDX-License-Identifier: Apache-2.0
#include "plimsoll/governor.h"

#include <algorithm>
#include <utility>

#include <malloc.h>

#include <fmt/core.h>

#include "base/check.h"
#include "base/mutex.h"
#include "memory/ledger.h"
#include "plimsoll/bytes.h"

namespace plimsoll {

namespace {

// Above this share of the limit, with nothing left to give back, the run stops with a checkpoint.
// The kernel kills at 100 %; the last 3 % (23 MiB of 768 MiB) are for writing that checkpoint.
constexpr double kStopFraction = 0.97;

// After the moves have been made, they are made again only once resident has grown by this share of
// the limit. Otherwise foreign memory that stays would have every step trim the heap for nothing.
constexpr double kRelapseFraction = 1.0 / 128;

// What grows back stays this share of the limit below the threshold, so that foreign memory which
// comes and goes by less does not have caches shrink and grow with it. In whole huge pages.
constexpr double kGrowBackFraction = 1.0 / 10;
constexpr std::int64_t kGrowBackLeast = 2 << 20;

// The process's governor. One limit per process is what the project is about.
struct Process {
  Mutex mutex;
  std::shared_ptr<Ledger> current PLIMSOLL_GUARDED_BY(mutex);
  const std::shared_ptr<OrphanAccount> orphans = std::make_shared<OrphanAccount>(0);
};

Process& process() {
  static Process& instance = *new Process;  // Never destroyed: leases may return during exit.
  return instance;
}

std::int64_t share(std::int64_t bytes, double fraction) noexcept {
  return static_cast<std::int64_t>(static_cast<double>(bytes) * fraction);
}

// "tensors 64.0 MiB, rows 3.0 MiB": what keeps a governor from being replaced; "" if nothing does.
std::string holders(const LedgerState& state) {
  std::string text;
  for (int i = 0; i < kTagCount; ++i) {
    const std::int64_t leased = state.pools[static_cast<std::size_t>(i)].leased_bytes;
    if (leased > 0 && static_cast<Tag>(i) != Tag::kForeign) {
      text += fmt::format("{}{} {}", text.empty() ? "" : ", ", tag_name(static_cast<Tag>(i)),
                          format_bytes(leased));
    }
  }
  return text;
}

// What is resident and belongs to nobody: orphans are leased, and counted apart.
Result<Ledger::Baseline> measure_baseline(std::int64_t orphan_bytes) {
  PLIMSOLL_TRY(const Resident now, read_resident());
  return Ledger::Baseline{.total = std::max<std::int64_t>(0, now.total() - orphan_bytes),
                          .anonymous = std::max<std::int64_t>(0, now.anonymous - orphan_bytes)};
}

Result<std::int64_t> find_disk_limit(const GovernorOptions& options) {
  PLIMSOLL_TRY(const std::int64_t free, free_disk_bytes(options.directory));
  if (options.disk_limit.empty()) {
    return free;
  }
  PLIMSOLL_TRY(const std::int64_t asked, parse_bytes(options.disk_limit, free));
  return std::min(asked, free);
}

Result<Ledger::Terms> find_terms(const GovernorOptions& options) {
  if (options.foreign_bytes < 0 || !(options.pressure_fraction > 0) ||
      options.pressure_fraction > 1) {
    return fail(ErrorCode::kInvalidArgument,
                fmt::format("foreign_bytes {} or pressure_fraction {} out of range",
                            options.foreign_bytes, options.pressure_fraction),
                "foreign_bytes is at least 0, pressure_fraction in (0, 1]");
  }
  LimitQuery query;
  query.user_limit = options.memory_limit;
  query.user_source = options.memory_limit_source;
  Ledger::Terms terms;
  PLIMSOLL_TRY(terms.limit, find_limit(query));
  PLIMSOLL_TRY(terms.disk_limit_bytes, find_disk_limit(options));
  terms.pressure_fraction = options.pressure_fraction;
  terms.foreign_bytes = options.foreign_bytes;
  return terms;
}

// The limit cannot hold even what is there before the run begins.
Error baseline_refusal(const Ledger::Terms& terms, std::int64_t orphan_bytes) {
  const std::int64_t needed = terms.baseline.total + orphan_bytes + terms.foreign_bytes;
  const std::int64_t left = terms.limit.limit_bytes - terms.baseline.total - orphan_bytes;
  Error error;
  error.code = ErrorCode::kOverBudget;
  error.tag = Tag::kForeign;
  error.requested_bytes = terms.foreign_bytes;
  error.available_bytes = std::max<std::int64_t>(0, left);
  error.limit_bytes = terms.limit.limit_bytes;
  error.baseline_bytes = terms.baseline.total;
  error.orphan_bytes = orphan_bytes;
  error.smallest_limit_bytes = needed;
  error.advice = "raise --memory-limit or declare fewer foreign_bytes";
  return error;
}

}  // namespace

ReclaimerHandle::ReclaimerHandle(ReclaimerHandle&& other) noexcept
    : ledger_(std::move(other.ledger_)), slot_(std::exchange(other.slot_, -1)) {}

ReclaimerHandle& ReclaimerHandle::operator=(ReclaimerHandle&& other) noexcept {
  std::swap(ledger_, other.ledger_);
  std::swap(slot_, other.slot_);
  return *this;
}

ReclaimerHandle::~ReclaimerHandle() {
  if (slot_ >= 0) {
    ledger_->reclaimers().remove(slot_);
  }
}

Governor::Governor(std::shared_ptr<Ledger> ledger) noexcept : ledger_(std::move(ledger)) {}

Result<Governor> Governor::create(const GovernorOptions& options) {
  PLIMSOLL_TRY(Ledger::Terms terms, find_terms(options));
  Process& shared = process();
  // A cache without a user, such as the arena's free pages, does not hold up a replacement.
  if (const Governor earlier = current(); earlier.valid()) {
    earlier.ledger_->reclaimers().reclaim(PressureMove::kPurge, kUncapped);
  }
  MutexLock lock(shared.mutex);
  std::int64_t orphan_bytes = shared.orphans->load(std::memory_order_relaxed);
  if (shared.current != nullptr) {
    const LedgerState held = shared.current->state();
    if (const std::string names = holders(held); !names.empty()) {
      return fail(ErrorCode::kInvalidArgument,
                  fmt::format("another governor still holds {}", names),
                  "close it, or free what holds its memory, before making a new one");
    }
    orphan_bytes += held.leased_bytes;
  }
  PLIMSOLL_TRY(terms.baseline, measure_baseline(orphan_bytes));
  if (terms.baseline.total + orphan_bytes + terms.foreign_bytes > terms.limit.limit_bytes) {
    return tl::unexpected(baseline_refusal(terms, orphan_bytes));
  }
  const std::int64_t foreign_bytes = terms.foreign_bytes;
  auto ledger = std::make_shared<Ledger>(std::move(terms), shared.orphans);
  PLIMSOLL_TRY_VOID(ledger->admit({.tag = Tag::kForeign, .floor_bytes = foreign_bytes}));
  if (shared.current != nullptr) {
    shared.current->close();
  }
  shared.current = ledger;
  return Governor(std::move(ledger));
}

Governor Governor::current() noexcept {
  Process& shared = process();
  MutexLock lock(shared.mutex);
  return Governor(shared.current);
}

Result<void> Governor::admit(const PoolSpec& spec) {
  return ledger_ == nullptr ? tl::unexpected(closed_error()) : ledger_->admit(spec);
}

void Governor::release_admission(const PoolSpec& spec) noexcept {
  if (ledger_ != nullptr) {
    ledger_->release_admission(spec);
  }
}

Result<Lease> Governor::reserve(Tag tag, std::int64_t bytes) {
  auto lease = try_reserve(tag, bytes);
  if (lease || lease.error().code != ErrorCode::kOverBudget) {
    return lease;
  }
  const std::int64_t missing = lease.error().requested_bytes - lease.error().available_bytes;
  if (ledger_->reclaimers().reclaim(PressureMove::kPurge, missing) == 0) {
    return lease;
  }
  return try_reserve(tag, bytes);
}

Result<Lease> Governor::try_reserve(Tag tag, std::int64_t bytes) {
  return ledger_ == nullptr ? tl::unexpected(closed_error()) : ledger_->grant(tag, bytes);
}

namespace {

// Reads what is resident and judges it, into `report`. An unreadable /proc is no pressure.
void read_pressure(const Ledger& ledger, PressureReport& report) {
  const auto resident = read_resident();
  if (!resident) {
    report.pressure = false;
    return;
  }
  const LedgerState state = ledger.state();
  report.resident = *resident;
  report.unexplained_bytes =
      std::max<std::int64_t>(0, resident->anonymous - state.leased_bytes - state.orphan_bytes -
                                    ledger.baseline().anonymous);
  const std::int64_t threshold = share(state.limit_bytes, ledger.terms().pressure_fraction);
  report.pressure =
      resident->total() > threshold && report.unexplained_bytes > ledger.terms().foreign_bytes;
}

// Without pressure: what was shrunk grows back into `room_bytes`. When nobody wants the room, all
// of it has.
std::int64_t grow_back(Ledger& ledger, std::int64_t room_bytes) {
  if (!ledger.shrunk() || room_bytes < kGrowBackLeast) {
    return 0;
  }
  const std::int64_t grown = ledger.reclaimers().grow_back(room_bytes);
  ledger.set_shrunk(grown > 0);
  return grown;
}

}  // namespace

PressureReport Governor::step_boundary() {
  PressureReport report;
  if (ledger_ == nullptr) {
    return report;
  }
  Ledger& ledger = *ledger_;
  const std::int64_t limit = ledger.terms().limit.limit_bytes;
  const std::int64_t threshold = share(limit, ledger.terms().pressure_fraction);
  read_pressure(ledger, report);
  if (!report.pressure) {
    ledger.set_relieved_at_bytes(kUncapped);
    report.grown_bytes =
        grow_back(ledger, threshold - report.resident.total() - share(limit, kGrowBackFraction));
    return report;
  }
  const std::int64_t relieved_at = ledger.relieved_at_bytes();
  if (relieved_at == kUncapped ||
      report.resident.total() > relieved_at + share(limit, kRelapseFraction)) {
    const auto wanted = [&] { return report.resident.total() - threshold; };
    report.purged_bytes = ledger.reclaimers().reclaim(PressureMove::kPurge, wanted());
    ::malloc_trim(0);
    read_pressure(ledger, report);
    if (report.pressure) {
      report.shrunk_bytes = ledger.reclaimers().reclaim(PressureMove::kShrink, wanted());
      ledger.set_shrunk(true);
      read_pressure(ledger, report);
    }
    ledger.set_relieved_at_bytes(report.resident.total());
  }
  report.stop = report.pressure && report.resident.total() > share(limit, kStopFraction);
  return report;
}

Result<ReclaimerHandle> Governor::add_reclaimer(Reclaimer* reclaimer) {
  if (ledger_ == nullptr) {
    return tl::unexpected(closed_error());
  }
  return ledger_->add_reclaimer(reclaimer);
}

LedgerState Governor::state() const {
  return ledger_ == nullptr ? LedgerState{} : ledger_->state();
}

const LimitReport& Governor::limit() const {
  PLIMSOLL_CHECK(ledger_ != nullptr, "limit() of an empty Governor");
  return ledger_->terms().limit;
}

std::int64_t Governor::disk_limit_bytes() const noexcept {
  return ledger_ == nullptr ? 0 : ledger_->terms().disk_limit_bytes;
}

std::int64_t Governor::rebaseline() {
  if (ledger_ == nullptr) {
    return 0;
  }
  const auto measured = measure_baseline(ledger_->orphan_bytes());
  return measured ? ledger_->rebaseline(*measured).total : ledger_->baseline().total;
}

void Governor::close() noexcept {
  if (ledger_ == nullptr) {
    return;
  }
  std::shared_ptr<Ledger> last;  // Destroyed after the lock is released.
  Process& shared = process();
  MutexLock lock(shared.mutex);
  ledger_->close();
  if (shared.current == ledger_) {
    last = std::move(shared.current);
    shared.current = nullptr;
  }
}

}  // namespace plimsoll
