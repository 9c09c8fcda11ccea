// SPDX-License-Identifier: Apache-2.0
#include "plimsoll/governor.h"

#include <algorithm>
#include <atomic>
#include <chrono>
#include <memory>
#include <utility>

#include <malloc.h>

#include <fmt/core.h>

#include "base/check.h"
#include "base/mutex.h"
#include "memory/ledger.h"
#include "memory/look.h"
#include "os/clock.h"
#include "os/fork.h"
#include "plimsoll/bytes.h"

namespace plimsoll {

namespace {

// Above this share of the limit, with nothing left to give back, the run stops with a checkpoint.
// The kernel kills at 100 %; the last 3 % (23 MiB of 768 MiB) are for writing that checkpoint.
constexpr double kStopFraction = 0.97;

// What grows goes on growing: the limit that a stop names has room for this share of the old one
// more than is held, so that whoever follows the advice comes further each time.
constexpr double kGoOnFraction = 1.0 / 32;

// After the moves have been made, they are made again only once resident has grown by this share of
// the limit. Otherwise foreign memory that stays would have every step trim the heap for nothing.
constexpr double kRelapseFraction = 1.0 / 128;

// What grows back stays this share of the limit below the threshold, so that foreign memory which
// comes and goes by less does not have caches shrink and grow with it. In whole huge pages.
constexpr double kGrowBackFraction = 1.0 / 10;
constexpr std::int64_t kGrowBackLeast = 2 << 20;

// What a process holds before its governor varies by such a part from one start to the next.
constexpr std::int64_t kBaselineVaries = 64;

// A lowered limit that what is in use does not allow is tried again at so many step boundaries, and
// for so long, before it stops the run.
constexpr std::chrono::nanoseconds kSettleTime = std::chrono::seconds(1);
constexpr int kSettleTries = 3;
constexpr std::chrono::seconds kLastMost{10};  // For what has to be written before a stop, …
constexpr double kOutgrown = 1.0 / 64;         // … while no more of the limit comes than this.
constexpr int kShrinkRounds = 8;  // Of one try: each ends earlier when nothing more is given.

// What caches yielded to a step is kept free for others like it, through so many step boundaries at
// least and twice as many at most. Then free pages of tensors go, and the caches grow back.
constexpr int kNeedBoundaries = 64;

// The kernel's signals are looked at so often, and acted upon again only after a while, as PSI is
// an average over ten seconds. What they made shrink is left alone for a minute.
constexpr std::int64_t kLookNs = 100'000'000;
constexpr std::int64_t kHeedNs = 10'000'000'000;
constexpr std::int64_t kLeaveNs = 60'000'000'000;
constexpr double kKernelFraction = 1.0 / 16;  // Of the limit: what a stall makes shrink at a time.

// The process's governor. One limit per process is what the project is about.
struct Process {
  Mutex mutex;
  std::shared_ptr<Ledger> current PLIMSOLL_GUARDED_BY(mutex);
  const std::shared_ptr<OrphanAccount> orphans = std::make_shared<OrphanAccount>(0);
  const ForkMark mark;
};

// Never destroyed: leases may return during exit. A forked child begins with none: the governor it
// inherited counts what its parent holds, and its mutexes may be held by threads that are not
// there.
Process& process() {
  static std::atomic<Process*> instance{new Process};
  Process* now = instance.load(std::memory_order_acquire);
  while (now->mark.forked()) {
    auto own = std::make_unique<Process>();
    if (instance.compare_exchange_strong(now, own.get(), std::memory_order_acq_rel)) {
      return *own.release();
    }
  }
  return *now;
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

// What the process and its descendants hold now.
Result<Measured> measure(TreeMeter& meter, std::int64_t close_bytes) {
  Measured now;
  PLIMSOLL_TRY(now.resident, read_resident());
  now.tree = meter.read(now.resident, close_bytes);
  return now;
}

// Of that, what is not of files, and the weights that are: the kernel has nowhere to put it.
std::int64_t unbacked(const Measured& now) noexcept {
  return now.held_bytes() - now.resident.file + now.tree.mapped_bytes;
}

// What is held and belongs to nobody: orphans are leased, and counted apart.
Ledger::Baseline baseline_of(const Measured& now, std::int64_t orphan_bytes) {
  return {.total = std::max<std::int64_t>(0, now.held_bytes() - orphan_bytes),
          .anonymous = std::max<std::int64_t>(0, unbacked(now) - orphan_bytes)};
}

Result<void> find_disk_limit(const GovernorOptions& options, Ledger::Terms& terms) {
  PLIMSOLL_TRY(terms.disk_limit_bytes, free_disk_bytes(options.directory));
  if (!options.disk_limit.empty()) {
    PLIMSOLL_TRY(terms.disk_asked_bytes, parse_bytes(options.disk_limit, terms.disk_limit_bytes));
    terms.disk_limit_bytes = std::min(terms.disk_asked_bytes, terms.disk_limit_bytes);
  }
  return {};
}

Result<Ledger::Terms> find_terms(const GovernorOptions& options, const Measured& now) {
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
  query.resident_bytes = now.held_bytes();
  query.proc_root = options.proc_root;
  query.cgroup_root = options.cgroup_root;
  Ledger::Terms terms;
  terms.proc_root = options.proc_root;
  terms.cgroup_root = options.cgroup_root;
  PLIMSOLL_TRY(terms.limit, find_limit(query));
  PLIMSOLL_TRY_VOID(find_disk_limit(options, terms));
  terms.pressure_fraction = options.pressure_fraction;
  terms.foreign_bytes = options.foreign_bytes;
  return terms;
}

// The limit cannot hold even what is there before the run begins.
Error baseline_refusal(const Ledger::Terms& terms, std::int64_t orphan_bytes) {
  // The next process of the same program holds a little more, or less, before it begins.
  const std::int64_t needed = terms.baseline.total + terms.baseline.total / kBaselineVaries +
                              orphan_bytes + terms.foreign_bytes;
  const std::int64_t left = terms.limit.limit_bytes - terms.baseline.total - orphan_bytes;
  const bool by_user = terms.limit.candidates[terms.limit.winner].source == "user";
  // In whole MiB, rounded up, and without a space: to be pasted as an option.
  Error error = make_error(
      ErrorCode::kOverBudget,
      fmt::format(
          "a limit of {} is less than the process needs at once: {} are held before anything "
          "is leased{}, and {} are set aside (foreign_bytes): this takes a limit of at "
          "least {}MiB",
          terms.limit.explain(), format_bytes(terms.baseline.total),
          orphan_bytes > 0 ? " (and " + format_bytes(orphan_bytes) + " by closed governors)"
                           : std::string(),
          format_bytes(terms.foreign_bytes), (needed + (1 << 20) - 1) >> 20),
      by_user && terms.limit.limit_bytes < 1 << 20
          ? "a number without a unit counts bytes: write 6GiB"
      : by_user
          ? "raise memory_limit, declare fewer foreign_bytes, or make the governor before what "
            "is held"
          : "memory_limit is not what holds here: free memory, or raise the bound that is named");
  error.tag = Tag::kForeign;
  error.requested_bytes = terms.foreign_bytes;
  error.available_bytes = std::max<std::int64_t>(0, left);
  error.limit_bytes = terms.limit.limit_bytes;
  error.baseline_bytes = terms.baseline.total;
  error.orphan_bytes = orphan_bytes;
  error.smallest_limit_bytes = needed;
  return error;
}

// Errors: the governor was never made, or this process was forked after it was.
Result<void> check_own(const std::shared_ptr<Ledger>& ledger, const char* call) {
  return ledger == nullptr ? tl::unexpected(closed_error()) : ledger->check_own(call);
}

// Whether there is something to change, for calls that cannot fail.
bool is_own(const std::shared_ptr<Ledger>& ledger) noexcept {
  return ledger != nullptr && !ledger->forked();
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
  if (slot_ >= 0 && !ledger_->forked()) {
    ledger_->reclaimers().remove(slot_);
  }
}

Governor::Governor(std::shared_ptr<Ledger> ledger) noexcept : ledger_(std::move(ledger)) {}

Result<Governor> Governor::create(const GovernorOptions& options) {
  Process& shared = process();
  // A cache without a user, such as the arena's free pages, does not hold up a replacement.
  if (const Governor earlier = current(); earlier.valid()) {
    earlier.ledger_->reclaimers().reclaim(PressureMove::kPurge, kUncapped);
  }
  TreeMeter meter(options.proc_root, options.cgroup_root);
  PLIMSOLL_TRY(const Measured now, measure(meter, 0));
  PLIMSOLL_TRY(Ledger::Terms terms, find_terms(options, now));
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
  terms.baseline = baseline_of(now, orphan_bytes);
  if (terms.baseline.total + orphan_bytes + terms.foreign_bytes > terms.limit.limit_bytes) {
    return tl::unexpected(baseline_refusal(terms, orphan_bytes));
  }
  const std::int64_t foreign_bytes = terms.foreign_bytes;
  auto ledger = std::make_shared<Ledger>(std::move(terms), shared.orphans);
  ledger->kernel().signals = MemorySignals::open(options.proc_root, options.cgroup_root);
  ledger->kernel().meter = std::move(meter);
  ledger->set_measured(now);
  PLIMSOLL_TRY_VOID(ledger->admit({.tag = Tag::kForeign, .floor_bytes = foreign_bytes}));
  if (shared.current != nullptr) {
    shared.current->close();
  }
  shared.current = ledger;
  return Governor(std::move(ledger));
}

std::shared_ptr<Ledger> current_ledger() noexcept {
  Process& shared = process();
  MutexLock lock(shared.mutex);
  return shared.current;
}

Governor Governor::current() noexcept {
  Process& shared = process();
  MutexLock lock(shared.mutex);
  return Governor(shared.current);
}

Result<void> Governor::admit(const PoolSpec& spec) {
  PLIMSOLL_TRY_VOID(check_own(ledger_, "admit"));
  return ledger_->admit(spec);
}

void Governor::release_admission(const PoolSpec& spec) noexcept {
  if (is_own(ledger_)) {
    ledger_->release_admission(spec);
  }
}

Result<Lease> Governor::reserve(Tag tag, std::int64_t bytes) {
  auto lease = try_reserve(tag, bytes);
  if (lease || lease.error().code != ErrorCode::kOverBudget) {
    return lease;
  }
  const std::int64_t missing = lease.error().requested_bytes - lease.error().available_bytes;
  if (ledger_->reclaimers().reclaim(PressureMove::kPurge, missing) > 0) {
    lease = try_reserve(tag, bytes);
  }
  return lease || !yield_caches(*ledger_, lease.error()) ? std::move(lease)
                                                         : try_reserve(tag, bytes);
}

Result<Lease> Governor::try_reserve(Tag tag, std::int64_t bytes) {
  PLIMSOLL_TRY_VOID(check_own(ledger_, "reserve"));
  return ledger_->grant(tag, bytes);
}

void Governor::make_elastic(Tag tag, std::int64_t elastic_bytes) noexcept {
  if (is_own(ledger_)) {
    ledger_->make_elastic(tag, elastic_bytes);
  }
}

// ---- pressure, and a limit that moves ----

bool yield_caches(Ledger& ledger, const Error& refusal) noexcept {
  const std::int64_t missing = refusal.requested_bytes - refusal.available_bytes;
  if (!ledger.check_own("reserve") || refusal.code != ErrorCode::kOverBudget ||
      refusal.cap_bytes != 0 || missing <= 0 || !ledger.may_yield()) {
    return false;
  }
  const std::int64_t began = now_ns();
  std::int64_t yielded = ledger.yield(missing);
  while (yielded < missing && now_ns() - began < std::chrono::nanoseconds(kLastMost).count()) {
    const std::int64_t given =
        ledger.reclaimers().reclaim(PressureMove::kShrink, missing - yielded) +
        ledger.reclaimers().reclaim(PressureMove::kStop, 1);
    const std::int64_t more = ledger.yield(missing - yielded);
    yielded += more;
    if (given == 0 && more == 0) {
      break;
    }
  }
  return yielded > 0;
}

namespace {

// Where the moves of one call are written down.
struct Moves {
  EvictionLog& log;
  std::int64_t& purged;
  std::int64_t& shrunk;
};

// Gives the heap's free pages back to the system.
void trim_heap(EvictionLog& log) {
  const auto before = read_resident();
  ::malloc_trim(0);
  const auto after = read_resident();
  if (before && after && after->total() < before->total()) {
    log.add({.owner = "heap",
             .given_bytes = before->total() - after->total(),
             .before_bytes = before->total(),
             .after_bytes = after->total()});
  }
}

// Has memory given back until the limit asked for fits, or nobody gives any.
Ledger::Settled follow_limit(Ledger& ledger, Ledger::Settled settled, Moves moves) {
  if (settled.restored_bytes > 0) {
    ledger.course().regrow = true;
  }
  if (settled.wanted_bytes == 0) {
    return settled;
  }
  moves.purged +=
      ledger.reclaimers().reclaim(PressureMove::kPurge, settled.wanted_bytes, &moves.log);
  settled = ledger.settle();
  for (int round = 0; round < kShrinkRounds && settled.wanted_bytes > 0; ++round) {
    const std::int64_t given =
        ledger.reclaimers().reclaim(PressureMove::kShrink, settled.wanted_bytes, &moves.log);
    moves.shrunk += given;
    settled = ledger.settle();
    if (given == 0) {
      break;
    }
  }
  trim_heap(moves.log);
  return settled;
}

// Looks, and judges what is held. An unreadable /proc is no pressure. Requires: the turn.
void read_pressure(Ledger& ledger, Look& look) {
  PressureReport& report = look.report;
  const LedgerState state = ledger.state();
  const std::int64_t threshold = share(state.limit_bytes, ledger.terms().pressure_fraction);
  auto now = measure(ledger.kernel().meter, threshold);
  if (!now) {
    report.pressure = false;
    return;
  }
  now->unexplained_bytes = std::max<std::int64_t>(
      0, unbacked(*now) - state.leased_bytes - state.orphan_bytes - ledger.baseline().anonymous);
  ledger.set_measured(*now);
  look.seen = *now;
  report.resident = now->of_tree();
  report.unexplained_bytes = now->unexplained_bytes;
  report.pressure =
      now->held_bytes() > threshold && now->unexplained_bytes > ledger.terms().foreign_bytes;
}

// What is held, less the pages of files that the kernel takes back when it needs them: those that
// came since the beginning and are no weights. They never end a run.
std::int64_t bound_bytes(const Ledger& ledger, const Measured& seen) {
  return seen.held_bytes() - std::max<std::int64_t>(0, seen.resident.file - seen.tree.mapped_bytes -
                                                           ledger.baseline().file());
}

// What may grow back where foreign memory leaves this much below the threshold.
std::int64_t room_to_grow(const Ledger& ledger, const PressureReport& seen) {
  const std::int64_t limit = ledger.state().limit_bytes;
  return share(limit, ledger.terms().pressure_fraction) - seen.resident.total() -
         share(limit, kGrowBackFraction);
}

// Without pressure: what was shrunk grows back. When nobody wants the room, all of it has.
std::int64_t grow_back(Ledger& ledger, const PressureReport& seen) {
  Ledger::Course& course = ledger.course();
  std::int64_t grown = 0;
  if (course.regrow) {
    // Floors that were promised again are the ledger's to fill, unless foreign memory is in them.
    std::int64_t room = ledger.unleased_elastic();
    if (seen.unexplained_bytes > ledger.terms().foreign_bytes) {
      room = std::min(room, room_to_grow(ledger, seen));
    }
    if (room > 0) {
      grown += ledger.reclaimers().grow_back(room);
      course.regrow = grown > 0;
    }
  }
  const std::int64_t heeded = course.heeded_ns;
  const bool left_alone = heeded != INT64_MIN && now_ns() - heeded < kLeaveNs;
  const std::int64_t room = course.shrunk && !left_alone ? room_to_grow(ledger, seen) : 0;
  if (room >= kGrowBackLeast) {
    const std::int64_t more = ledger.reclaimers().grow_back(room);
    // Nobody takes any of a room for all that was given: then all has grown back. Of a smaller one
    // a cache with larger blocks takes none.
    course.shrunk_bytes -= more;
    course.shrunk = more > 0 || room < course.shrunk_bytes;
    grown += more;
  }
  return grown;
}

void note_shrunk(Ledger::Course& course, PressureReport& report, std::int64_t given) noexcept {
  report.shrunk_bytes += given;
  course.shrunk_bytes = std::max<std::int64_t>(course.shrunk_bytes, 0) + given;
  course.shrunk = true;
}

// Under pressure: purges, and shrinks where that was not enough. With `wait`, every cache is as
// small as it can be before this says stop.
void relieve(Ledger& ledger, Look& look, bool wait) {
  PressureReport& report = look.report;
  const std::int64_t limit = ledger.state().limit_bytes;
  const std::int64_t threshold = share(limit, ledger.terms().pressure_fraction);
  Ledger::Course& course = ledger.course();
  const std::int64_t relieved_at = course.relieved_at_bytes;
  if (relieved_at == kUncapped ||
      report.resident.total() > relieved_at + share(limit, kRelapseFraction)) {
    const auto wanted = [&] { return report.resident.total() - threshold; };
    report.purged_bytes +=
        ledger.reclaimers().reclaim(PressureMove::kPurge, wanted(), &report.evictions);
    trim_heap(report.evictions);
    read_pressure(ledger, look);
    if (report.pressure) {
      note_shrunk(course, report,
                  ledger.reclaimers().reclaim(PressureMove::kShrink, wanted(), &report.evictions));
      read_pressure(ledger, look);
    }
    course.relieved_at_bytes = report.resident.total();
  }
  std::int64_t bound = bound_bytes(ledger, look.seen);
  const auto stops = [&] { return report.pressure && bound > share(limit, kStopFraction); };
  const std::int64_t outgrown = bound + share(limit, kOutgrown);
  for (const std::int64_t began = now_ns(); wait && stops() && bound < outgrown;) {
    const std::int64_t missing = std::max(report.resident.total(), bound) - threshold;
    const std::int64_t given =
        ledger.reclaimers().reclaim(PressureMove::kShrink, missing, &report.evictions) +
        ledger.reclaimers().reclaim(PressureMove::kStop, 1, &report.evictions);
    read_pressure(ledger, look);
    bound = bound_bytes(ledger, look.seen);
    note_shrunk(course, report, given);
    course.relieved_at_bytes = report.resident.total();
    if (given == 0 || now_ns() - began > std::chrono::nanoseconds(kLastMost).count()) {
      break;
    }
  }
  if (stops()) {
    report.stop = true;
    report.needed_bytes = static_cast<std::int64_t>(
        static_cast<double>(bound + share(limit, kGoOnFraction)) / kStopFraction);
  }
}

// Acts on what the kernel says, before it does: other processes may be the cause, so never stops.
void heed_kernel(Ledger& ledger, PressureReport& report) {
  Ledger::Kernel& kernel = ledger.kernel();
  const std::int64_t now = now_ns();
  if (kernel.looked_ns != INT64_MIN && now - kernel.looked_ns < kLookNs) {
    return;
  }
  kernel.looked_ns = now;
  report.kernel = kernel.signals.read();
  const std::int64_t heeded = ledger.course().heeded_ns;
  if (report.kernel == KernelPressure::kNone || (heeded != INT64_MIN && now - heeded < kHeedNs)) {
    return;
  }
  ledger.course().heeded_ns = now;
  report.purged_bytes +=
      ledger.reclaimers().reclaim(PressureMove::kPurge, kUncapped, &report.evictions);
  trim_heap(report.evictions);
  if (report.kernel == KernelPressure::kStalled) {
    note_shrunk(ledger.course(), report,
                ledger.reclaimers().reclaim(PressureMove::kShrink,
                                            share(ledger.state().limit_bytes, kKernelFraction),
                                            &report.evictions));
  }
}

// As long as it lives nobody else looks or acts.
class Turn {
 public:
  explicit Turn(Ledger& ledger) noexcept : ledger_(ledger) { ledger_.take_turn(); }
  ~Turn() { ledger_.end_turn(); }
  Turn(const Turn&) = delete;
  Turn& operator=(const Turn&) = delete;

 private:
  Ledger& ledger_;
};

// The longest way between two boundaries is forgotten by an eighth at each.
void came_by(Ledger::Course& course) noexcept {
  ++course.counted;
  const std::int64_t now = now_ns();
  const std::int64_t before = course.stepped_ns.exchange(now);
  if (before != INT64_MIN) {
    const std::int64_t longest = course.interval_ns;
    course.interval_ns = std::max(now - before, longest - longest / 8);
  }
}

}  // namespace

PressureReport Governor::step_boundary() {
  if (ledger_ == nullptr) {
    return {};
  }
  ledger_->check_own("step_boundary").or_throw();
  came_by(ledger_->course());
  return look_and_act(*ledger_, /*wait=*/true).report;
}

PressureReport act_before_stop() {
  const auto ledger = current_ledger();
  return is_own(ledger) ? look_and_act(*ledger, /*wait=*/true).report : PressureReport{};
}

Look look(Ledger& ledger) {
  Look look;
  const Turn turn(ledger);
  read_pressure(ledger, look);
  return look;
}

Look look_and_act(Ledger& ledger, bool wait) {
  Look look;
  PressureReport& report = look.report;
  const Turn turn(ledger);
  Ledger::Course& course = ledger.course();
  if (ledger.unsettled()) {
    if (course.counted >= kNeedBoundaries) {
      course.counted = 0;
      report.purged_bytes +=
          ledger.reclaimers().reclaim(PressureMove::kPurge, kUncapped, &report.evictions);
      ledger.forget_need();
    }
    auto settled = ledger.settle();
    settled.wanted_bytes = settled.missing_bytes;  // Of working room, as much as there was at once.
    settled =
        follow_limit(ledger, settled, {report.evictions, report.purged_bytes, report.shrunk_bytes});
    course.tries = settled.missing_bytes == 0 ? 0 : course.tries + 1;
    if (course.tries >= kSettleTries && now_ns() - course.asked_ns >= kSettleTime.count()) {
      report.stop = true;
      report.needed_bytes = ledger.state().limit_bytes;
    }
  }
  heed_kernel(ledger, report);
  read_pressure(ledger, look);
  if (report.pressure) {
    relieve(ledger, look, wait);
  } else {
    course.relieved_at_bytes = kUncapped;
    report.grown_bytes = grow_back(ledger, report);
  }
  return look;
}

Result<LimitChange> Governor::set_limit(const std::string& text, const std::string& source) {
  PLIMSOLL_TRY_VOID(check_own(ledger_, "set_limit"));
  Ledger& ledger = *ledger_;
  const Turn turn(ledger);
  PLIMSOLL_TRY(const Measured now, measure(ledger.kernel().meter, 0));
  LimitQuery query;
  query.user_limit = text;
  query.user_source = source;
  query.resident_bytes = now.held_bytes();
  query.proc_root = ledger.terms().proc_root;
  query.cgroup_root = ledger.terms().cgroup_root;
  PLIMSOLL_TRY(LimitReport found, find_limit(query));
  LimitChange change;
  change.before_bytes = ledger.state().limit_bytes;
  change.asked_bytes = found.limit_bytes;
  PLIMSOLL_TRY(const auto asked, ledger.set_limit(std::move(found)));
  Ledger::Course& course = ledger.course();
  course.relieved_at_bytes = kUncapped;
  course.tries = 0;
  course.asked_ns = now_ns();
  const auto settled =
      follow_limit(ledger, asked, {change.evictions, change.purged_bytes, change.shrunk_bytes});
  change.limit_bytes = change.asked_bytes + settled.missing_bytes;
  Look seen;
  read_pressure(ledger, seen);
  if (!seen.report.pressure) {
    change.grown_bytes = grow_back(ledger, seen.report);
  }
  change.resident = read_resident().value_or(seen.seen.resident);
  return change;
}

Result<ReclaimerHandle> Governor::add_reclaimer(Reclaimer* reclaimer) {
  PLIMSOLL_TRY_VOID(check_own(ledger_, "add_reclaimer"));
  return ledger_->add_reclaimer(reclaimer);
}

LedgerState Governor::state() const {
  return ledger_ == nullptr ? LedgerState{} : ledger_->state();
}

LimitReport Governor::limit() const {
  PLIMSOLL_CHECK(ledger_ != nullptr, "limit() of an empty Governor");
  return ledger_->limit();
}

std::int64_t Governor::disk_limit_bytes() const noexcept {
  return ledger_ == nullptr ? 0 : ledger_->terms().disk_limit_bytes;
}

Result<void> Governor::check_disk_limit(const std::string& what, std::int64_t bytes) const {
  const std::int64_t asked = ledger_ == nullptr ? -1 : ledger_->terms().disk_asked_bytes;
  if (asked < 0 || bytes <= asked) {
    return {};
  }
  return fail(ErrorCode::kInvalidArgument,
              fmt::format("{} may come to fill {} of disk, and the disk limit is {}", what,
                          format_bytes(bytes), format_bytes(asked)),
              "raise the disk limit (--disk-limit, or disk of a Governor)");
}

std::int64_t Governor::rebaseline() {
  if (ledger_ == nullptr) {
    return 0;
  }
  ledger_->check_own("rebaseline").or_throw();
  const Turn turn(*ledger_);
  const auto now = measure(ledger_->kernel().meter, 0);
  return now ? ledger_->rebaseline(baseline_of(*now, ledger_->orphan_bytes())).total
             : ledger_->baseline().total;
}

std::int64_t Governor::lower_baseline(std::int64_t bytes, std::int64_t anonymous_bytes) {
  PLIMSOLL_CHECK(bytes >= 0 && anonymous_bytes >= 0, "a baseline is lowered by what has gone");
  if (ledger_ == nullptr) {
    return 0;
  }
  ledger_->check_own("lower_baseline").or_throw();
  return ledger_->lower_baseline({bytes, anonymous_bytes}).total;
}

void Governor::close() noexcept {
  if (!is_own(ledger_)) {
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
