// SPDX-License-Identifier: Apache-2.0
#include "memory/ledger.h"

#include <algorithm>
#include <utility>

#include <fmt/core.h>

#include "base/check.h"
#include "plimsoll/bytes.h"

namespace plimsoll {

namespace {

// What to change when the limit refuses, by tag. Options by the names that they have in Python and
// in files; the command line writes them with dashes.
constexpr std::array<const char*, kTagCount> kLimitAdvice{
    "raise memory_limit or lower batch_size",
    "raise memory_limit or lower store_bytes",
    "raise memory_limit or lower cache_bytes",
    "raise memory_limit or lower queue_bytes",
    "raise memory_limit or lower batch_size",
    "raise memory_limit or lower cache_bytes",
    "raise memory_limit or declare fewer foreign_bytes",
    "raise memory_limit",
};
static_assert(kLimitAdvice.back() != nullptr, "a tag without advice");

std::int64_t saturating_add(std::int64_t a, std::int64_t b) noexcept {
  return a > INT64_MAX - b ? INT64_MAX : a + b;
}

}  // namespace

Error closed_error() noexcept {
  Error error;
  error.code = ErrorCode::kInvalidArgument;
  error.advice = "this governor was closed or replaced: use the current one";
  return error;
}

// Holds the mutex for a scope, but in a forked child: there nothing is written.
class PLIMSOLL_ANNOTATE(scoped_lockable) Ledger::ReadLock {
 public:
  explicit ReadLock(const Ledger& ledger) PLIMSOLL_ANNOTATE(acquire_capability(ledger.mutex_))
      : mutex_(ledger.forked() ? nullptr : &ledger.mutex_) {
    if (mutex_ != nullptr) {
      mutex_->lock();
    }
  }
  ~ReadLock() PLIMSOLL_ANNOTATE(release_capability()) {
    if (mutex_ != nullptr) {
      mutex_->unlock();
    }
  }
  ReadLock(const ReadLock&) = delete;
  ReadLock& operator=(const ReadLock&) = delete;

 private:
  Mutex* mutex_;
};

Result<void> Ledger::check_own(const char* call) const {
  return mark_.check("Governor", call, "make a Governor in this process");
}

Ledger::Ledger(Terms terms, std::shared_ptr<OrphanAccount> orphans)
    : terms_(std::move(terms)),
      orphans_(std::move(orphans)),
      baseline_(terms_.baseline),
      limit_(std::make_shared<const LimitReport>(terms_.limit)),
      limit_bytes_(terms_.limit.limit_bytes),
      asked_bytes_(terms_.limit.limit_bytes) {}

std::int64_t Ledger::held_bytes() const {
  return baseline_.total + orphan_bytes() + committed_;
}

std::int64_t Ledger::free_bytes() const {
  return limit_bytes_ - held_bytes();
}

// What is left of the limit, and of the pool's own floor.
std::int64_t Ledger::below_limit(const PoolState& pool) const {
  return free_bytes() + std::max<std::int64_t>(0, pool.floor_bytes - pool.leased_bytes);
}

Error Ledger::refusal(Tag tag, std::int64_t requested, std::int64_t available) const {
  Error error;
  error.code = ErrorCode::kOverBudget;
  error.tag = tag;
  error.requested_bytes = requested;
  error.available_bytes = std::max<std::int64_t>(0, available);
  error.limit_bytes = limit_bytes_;
  error.baseline_bytes = baseline_.total;
  error.orphan_bytes = orphan_bytes();
  for (std::size_t i = 0; i < pools_.size(); ++i) {
    error.held_bytes[i] = std::max(pools_[i].state.floor_bytes, pools_[i].state.leased_bytes);
  }
  error.advice = kLimitAdvice[static_cast<std::size_t>(tag)];
  return error;
}

// The one place where a pool's numbers change, so that the sums follow.
void Ledger::set_pool(Pool& pool, std::int64_t floor, std::int64_t leased) {
  PoolState& state = pool.state;
  committed_ += std::max(floor, leased) - std::max(state.floor_bytes, state.leased_bytes);
  leased_ += leased - state.leased_bytes;
  state.floor_bytes = floor;
  state.leased_bytes = leased;
  state.peak_bytes = std::max(state.peak_bytes, leased);
  leased_peak_ = std::max(leased_peak_, leased_);
  beyond_peak_ = std::max(beyond_peak_, beyond_floors());
}

// What is leased above the floors as they were admitted.
std::int64_t Ledger::beyond_floors() const {
  std::int64_t bytes = 0;
  for (const Pool& one : pools_) {
    const PoolState& now = one.state;
    bytes += std::max<std::int64_t>(0, now.leased_bytes - now.floor_bytes - now.yielded_bytes);
  }
  return bytes;
}

Result<void> Ledger::admit(const PoolSpec& spec) {
  if (spec.floor_bytes < 0 || spec.cap_bytes < spec.floor_bytes || spec.elastic_bytes < 0 ||
      spec.elastic_bytes > spec.floor_bytes) {
    return fail(ErrorCode::kInvalidArgument,
                fmt::format("{}: a floor of {}, {} of it elastic, with a cap of {}",
                            tag_name(spec.tag), format_bytes(spec.floor_bytes),
                            format_bytes(spec.elastic_bytes), format_bytes(spec.cap_bytes)),
                spec.option);
  }
  MutexLock lock(mutex_);
  if (closed_) {
    return tl::unexpected(closed_error());
  }
  Pool& mine = pool(spec.tag);
  const PoolState& now = mine.state;
  // Bytes leased above the floor already are committed: a floor may grow over them for nothing.
  const std::int64_t available =
      free_bytes() + std::max<std::int64_t>(0, now.leased_bytes - now.floor_bytes);
  if (spec.floor_bytes > std::max<std::int64_t>(0, available)) {
    Error error = refusal(spec.tag, spec.floor_bytes, available);
    error.smallest_limit_bytes = error.limit_bytes + spec.floor_bytes - available;
    return tl::unexpected(std::move(error));
  }
  set_pool(mine, now.floor_bytes + spec.floor_bytes, now.leased_bytes);
  ++mine.admissions;
  mine.elastic_bytes += spec.elastic_bytes;
  mine.option = spec.option;
  if (spec.cap_bytes == kUncapped) {
    ++mine.uncapped_admissions;
  } else {
    mine.cap_sum = saturating_add(mine.cap_sum, spec.cap_bytes);
  }
  mine.state.cap_bytes = mine.uncapped_admissions > 0 ? kUncapped : mine.cap_sum;
  return {};
}

void Ledger::release_admission(const PoolSpec& spec) noexcept {
  MutexLock lock(mutex_);
  Pool& mine = pool(spec.tag);
  if (mine.admissions == 0) {
    return;
  }
  --mine.admissions;
  const std::int64_t admitted = std::max<std::int64_t>(
      0, mine.state.floor_bytes + mine.state.yielded_bytes - spec.floor_bytes);
  mine.elastic_bytes = std::max<std::int64_t>(0, mine.elastic_bytes - spec.elastic_bytes);
  const std::int64_t yielded = std::min({mine.state.yielded_bytes, mine.elastic_bytes, admitted});
  yielded_ += yielded - mine.state.yielded_bytes;
  mine.state.yielded_bytes = yielded;
  set_pool(mine, admitted - yielded, mine.state.leased_bytes);
  if (spec.cap_bytes == kUncapped) {
    mine.uncapped_admissions = std::max(0, mine.uncapped_admissions - 1);
  } else {
    mine.cap_sum = std::max<std::int64_t>(0, mine.cap_sum - spec.cap_bytes);
  }
  const bool uncapped = mine.uncapped_admissions > 0 || mine.admissions == 0;
  mine.state.cap_bytes = uncapped ? kUncapped : mine.cap_sum;
}

Result<Lease> Ledger::grant(Tag tag, std::int64_t bytes) {
  if (bytes < 0) {
    return fail(ErrorCode::kInvalidArgument,
                fmt::format("{}: a lease of {} bytes", tag_name(tag), bytes));
  }
  PLIMSOLL_TRY_VOID(take(tag, bytes));
  return Lease(shared_from_this(), tag, bytes);
}

Result<void> Ledger::take(Tag tag, std::int64_t bytes) {
  MutexLock lock(mutex_);
  if (closed_) {
    return tl::unexpected(closed_error());
  }
  Pool& mine = pool(tag);
  const PoolState& now = mine.state;
  const std::int64_t below_cap = now.cap_bytes - now.leased_bytes;
  const std::int64_t available = below_limit(now);
  if (bytes > below_cap) {
    Error error = refusal(tag, bytes, std::min(below_cap, available));
    error.cap_bytes = now.cap_bytes;
    error.advice = mine.option;
    return tl::unexpected(std::move(error));
  }
  if (bytes > available && bytes > 0) {
    return tl::unexpected(refusal(tag, bytes, available));
  }
  set_pool(mine, now.floor_bytes, now.leased_bytes + bytes);
  return {};
}

void Ledger::give_back(Tag tag, std::int64_t bytes) noexcept {
  MutexLock lock(mutex_);
  Pool& mine = pool(tag);
  set_pool(mine, mine.state.floor_bytes, mine.state.leased_bytes - bytes);
  if (closed_) {
    orphans_->fetch_sub(bytes, std::memory_order_relaxed);
  }
}

// ---- a limit that moves ----

void Ledger::make_elastic(Tag tag, std::int64_t bytes) noexcept {
  MutexLock lock(mutex_);
  pool(tag).elastic_bytes += std::max<std::int64_t>(0, bytes);
}

Result<Ledger::Settled> Ledger::set_limit(LimitReport limit) {
  auto made = std::make_shared<const LimitReport>(std::move(limit));
  MutexLock lock(mutex_);  // Released before the old report is.
  if (closed_) {
    return tl::unexpected(closed_error());
  }
  whole_limit_ = yielded_ == 0 ? limit_bytes_ : whole_limit_;
  asked_bytes_ = made->limit_bytes;
  if (asked_bytes_ >= whole_limit_) {
    // What yielded to others is whole again, until they need it.
    beyond_peak_ = beyond_before_ = beyond_floors();
  }
  limit_bytes_ = std::max(limit_bytes_, asked_bytes_);
  limit_.swap(made);
  return settle_now();  // At once: what is owed to a pool is not free for others.
}

Ledger::Settled Ledger::settle() noexcept {
  MutexLock lock(mutex_);
  return settle_now();
}

Ledger::Settled Ledger::settle_now() {
  Settled settled;
  const std::int64_t needed = held_bytes() + working_room();
  if (needed > asked_bytes_ && asked_bytes_ < whole_limit_) {
    yield_floors(needed - asked_bytes_);
    settled.wanted_bytes = std::max<std::int64_t>(0, held_bytes() + working_room() - asked_bytes_);
  } else if (needed < asked_bytes_) {
    settled.restored_bytes = restore_floors(asked_bytes_ - needed);
  }
  // Who cannot keep to it is stopped at a step boundary, and not by a refusal on the way there.
  const std::int64_t held = held_bytes();
  const std::int64_t stays = held > asked_bytes_ ? held + working_room() : held;
  limit_bytes_ = std::max(asked_bytes_, std::min(limit_bytes_, stays));
  settled.missing_bytes = limit_bytes_ - asked_bytes_;
  return settled;
}

std::int64_t Ledger::yield(std::int64_t bytes) noexcept {
  MutexLock lock(mutex_);
  whole_limit_ = yielded_ == 0 ? limit_bytes_ : whole_limit_;
  return yield_floors(bytes);
}

bool Ledger::may_yield() const noexcept {
  MutexLock lock(mutex_);
  return std::ranges::any_of(
      pools_, [](const Pool& one) { return one.elastic_bytes > one.state.yielded_bytes; });
}

std::int64_t Ledger::working_room() const {
  if (asked_bytes_ >= whole_limit_ && yielded_ == 0) {
    return 0;
  }
  return std::max(beyond_peak_, beyond_before_) - beyond_floors();
}

void Ledger::forget_need() noexcept {
  MutexLock lock(mutex_);
  beyond_before_ = std::exchange(beyond_peak_, beyond_floors());
}

std::int64_t Ledger::yield_floors(std::int64_t bytes) {
  std::int64_t yielded = 0;
  for (Pool& mine : pools_) {
    const PoolState& now = mine.state;
    const std::int64_t most =
        std::min(std::max<std::int64_t>(0, now.floor_bytes - now.leased_bytes),
                 mine.elastic_bytes - now.yielded_bytes);
    const std::int64_t part = std::clamp<std::int64_t>(most, 0, bytes - yielded);
    mine.state.yielded_bytes += part;
    set_pool(mine, now.floor_bytes - part, now.leased_bytes);
    yielded += part;
  }
  yielded_ += yielded;
  return yielded;
}

std::int64_t Ledger::restore_floors(std::int64_t room) {
  std::int64_t restored = 0;
  for (Pool& mine : pools_) {
    const PoolState& now = mine.state;
    // Over what is leased above the floor already, a floor grows for nothing.
    const std::int64_t above = std::max<std::int64_t>(0, now.leased_bytes - now.floor_bytes);
    const std::int64_t part = std::min(now.yielded_bytes, above + room);
    mine.state.yielded_bytes -= part;
    set_pool(mine, now.floor_bytes + part, now.leased_bytes);
    room -= std::max<std::int64_t>(0, part - above);
    restored += part;
  }
  yielded_ -= restored;
  return restored;
}

bool Ledger::unsettled() const noexcept {
  MutexLock lock(mutex_);
  return limit_bytes_ > asked_bytes_ || yielded_ > 0;
}

LimitReport Ledger::limit() const {
  std::shared_ptr<const LimitReport> now;
  {
    const ReadLock lock(*this);
    now = limit_;
  }
  return *now;
}

std::int64_t Ledger::room(Tag tag) const noexcept {
  const ReadLock lock(*this);
  const PoolState& now = pools_[static_cast<std::size_t>(tag)].state;
  const std::int64_t room = std::min(below_limit(now), now.cap_bytes - now.leased_bytes);
  return closed_ ? 0 : std::max<std::int64_t>(0, room);
}

std::int64_t Ledger::unleased_elastic() const noexcept {
  MutexLock lock(mutex_);
  std::int64_t bytes = 0;
  for (const Pool& one : pools_) {
    bytes += std::clamp<std::int64_t>(one.state.floor_bytes - one.state.leased_bytes, 0,
                                      one.elastic_bytes);
  }
  return bytes;
}

void Ledger::close() noexcept {
  MutexLock lock(mutex_);
  if (!closed_) {
    closed_ = true;
    orphans_->fetch_add(leased_, std::memory_order_relaxed);
  }
}

LedgerState Ledger::state() const {
  const ReadLock lock(*this);
  LedgerState copy{.limit_bytes = limit_bytes_,
                   .asked_bytes = asked_bytes_,
                   .baseline_bytes = baseline_.total,
                   .leased_bytes = leased_,
                   .leased_peak_bytes = leased_peak_,
                   .committed_bytes = committed_,
                   .orphan_bytes = orphan_bytes()};
  for (std::size_t i = 0; i < pools_.size(); ++i) {
    copy.pools[i] = pools_[i].state;
  }
  return copy;
}

Ledger::Baseline Ledger::baseline() const {
  MutexLock lock(mutex_);
  return baseline_;
}

Ledger::Baseline Ledger::rebaseline(const Baseline& measured) {
  MutexLock lock(mutex_);
  if (leased_ == 0 && !closed_) {
    baseline_ = measured;
  }
  return baseline_;
}

Ledger::Baseline Ledger::lower_baseline(const Baseline& gone) {
  MutexLock lock(mutex_);
  baseline_.total = std::max<std::int64_t>(0, baseline_.total - gone.total);
  baseline_.anonymous = std::max<std::int64_t>(0, baseline_.anonymous - gone.anonymous);
  return baseline_;
}

void Ledger::set_measured(const Measured& measured) noexcept {
  MutexLock lock(mutex_);
  measured_ = measured;
}

Measured Ledger::measured() const noexcept {
  const ReadLock lock(*this);
  return measured_;
}

void Ledger::take_turn() noexcept {
  MutexLock lock(turn_mutex_);
  while (turn_taken_) {
    turn_ended_.wait(turn_mutex_);
  }
  turn_taken_ = true;
}

void Ledger::end_turn() noexcept {
  MutexLock lock(turn_mutex_);
  turn_taken_ = false;
  turn_ended_.notify_one();
}

Result<ReclaimerHandle> Ledger::add_reclaimer(Reclaimer* reclaimer) {
  const int slot = reclaimers_.add(reclaimer);
  if (slot < 0) {
    return fail(ErrorCode::kInternal, fmt::format("{}: all {} places for reclaimers are taken",
                                                  reclaimer->name(), kMaxReclaimers));
  }
  ReclaimerHandle handle;
  handle.ledger_ = shared_from_this();
  handle.slot_ = slot;
  return handle;
}

std::string LedgerState::to_string() const {
  std::int64_t yielded = 0;
  std::string text =
      fmt::format("{:<10}{:>12}{:>12}{:>12}{:>12}\n", "owner", "floor", "leased", "peak", "cap");
  for (int i = 0; i < kTagCount; ++i) {
    const PoolState& pool = pools[static_cast<std::size_t>(i)];
    yielded += pool.yielded_bytes;
    if (pool.floor_bytes == 0 && pool.leased_bytes == 0 && pool.peak_bytes == 0) {
      continue;
    }
    text += fmt::format("{:<10}{:>12}{:>12}{:>12}{:>12}\n", tag_name(static_cast<Tag>(i)),
                        format_bytes(pool.floor_bytes), format_bytes(pool.leased_bytes),
                        format_bytes(pool.peak_bytes),
                        pool.cap_bytes == kUncapped ? "-" : format_bytes(pool.cap_bytes));
  }
  const auto line = [&](const char* name, std::int64_t bytes) {
    text += fmt::format("{:<10}{:>24}\n", name, format_bytes(bytes));
  };
  line("baseline", baseline_bytes);
  if (orphan_bytes > 0) {
    line("orphans", orphan_bytes);
  }
  line("committed", committed_bytes);
  if (yielded > 0) {
    line("yielded", yielded);  // Of admitted floors, to a lower limit.
  }
  line("free", free_bytes());
  line("limit", limit_bytes);
  if (asked_bytes < limit_bytes) {
    line("asked", asked_bytes);
  }
  return text;
}

}  // namespace plimsoll
