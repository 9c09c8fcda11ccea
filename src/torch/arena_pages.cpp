// SPDX-License-Identifier: Apache-2.0
//
// See arena_pages.h. Order here: size classes, attaching and detaching, leasing pages, small
// blocks, large blocks, purging.
#include "torch/arena_pages.h"

#include <algorithm>
#include <bit>
#include <cerrno>
#include <utility>

#include "base/check.h"
#include "base/round.h"

namespace plimsoll {
namespace {

#ifdef PLIMSOLL_ARENA_WITHOUT_TRACE  // By bench/trace_off alone.
constexpr bool kTraceable = false;
#else
constexpr bool kTraceable = true;
#endif

constexpr std::int64_t kFineMax = 1024;  // Up to here classes are 64 bytes apart.
constexpr int kFineClasses = 16;
constexpr std::int64_t kBlockStep = 64;  // Every block is aligned to this.
constexpr std::uint32_t kSpanPagesMin = 16;
constexpr std::int64_t kSpanBlocksMin = 8;

// See trade_cache(). Source: bench/w6_governor's convnet, 200 MiB live, 2-core EPYC. No bound: 262
// MiB leased, 0.70 of plain LibTorch's time; a 16th: 216 MiB, 0.75; a 32nd: 208 MiB, 0.76.
constexpr std::int64_t kSlackShare = 32;
constexpr std::int64_t kSlackMin = 8LL << 20;
constexpr std::int64_t kTableShare = 240;  // A page's record, its bit, and its part of a span's.

std::uint32_t span_pages(int size_class) noexcept {
  const std::int64_t bytes = size_class_bytes(size_class) * kSpanBlocksMin;
  return std::max(kSpanPagesMin,
                  static_cast<std::uint32_t>((bytes + kArenaPageBytes - 1) / kArenaPageBytes));
}

std::uint32_t whole_pages(std::int64_t bytes) noexcept {
  return static_cast<std::uint32_t>((bytes + kArenaPageBytes - 1) / kArenaPageBytes);
}

}  // namespace

int size_class_of(std::int64_t bytes) noexcept {
  if (bytes <= kFineMax) {
    return static_cast<int>((bytes + kBlockStep - 1) / kBlockStep) - 1;
  }
  const auto last = static_cast<std::uint64_t>(bytes - 1);
  const int log = 63 - std::countl_zero(last);
  return kFineClasses + (log - 10) * 16 + static_cast<int>(last >> (log - 4) & 15U);
}

std::int64_t size_class_bytes(int size_class) noexcept {
  if (size_class < kFineClasses) {
    return (size_class + 1) * kBlockStep;
  }
  const int log = 10 + (size_class - kFineClasses) / 16;
  const std::int64_t sixteenths = 17 + (size_class - kFineClasses) % 16;
  return sixteenths << (log - 4);
}

std::int64_t arena_block_bytes(std::int64_t bytes) noexcept {
  return bytes <= kSmallMax ? size_class_bytes(size_class_of(bytes))
                            : round_up(bytes, kArenaPageBytes);  // A plan asks for any size.
}

std::int64_t arena_leased_bytes(std::int64_t live_bytes) noexcept {
  std::int64_t spans = 0;
  for (int size_class = 0; size_class < kSizeClasses; ++size_class) {
    spans += span_pages(size_class) * kArenaPageBytes;
  }
  const std::int64_t cached = live_bytes + std::max(live_bytes / kSlackShare, kSlackMin) + spans;
  return cached + cached / kTableShare;
}

Result<void> ArenaPages::open(std::int64_t range_bytes) {
  PLIMSOLL_TRY_VOID(runs_.reserve(range_bytes));
  const std::int64_t spans = runs_.range_bytes() / kArenaPageBytes / kSpanPagesMin + 1;
  if (!small_table_.map(spans * static_cast<std::int64_t>(sizeof(SmallSpan)))) {
    return fail_io(errno, "tensor arena: no addresses for its table of spans",
                   "raise the address space limit (ulimit -v or -d)");
  }
  return {};
}

Result<void> ArenaPages::attach(Governor governor, std::int64_t cap_bytes) {
  if (!governor.valid()) {
    return fail(ErrorCode::kInvalidArgument, "tensor arena: attached to an empty Governor",
                "create the governor first");
  }
  if (forked_) {
    return fail(ErrorCode::kInvalidArgument, "tensor arena: cannot be attached after a fork",
                "start the process with spawn or exec to lease tensors in it");
  }
  PLIMSOLL_TRY(auto lease, governor.try_reserve(Tag::kTensor, 0));
  PLIMSOLL_TRY(auto reclaimer, governor.add_reclaimer(this));
  detach();
  {
    MutexLock lock(mutex_);
    std::uint16_t free_slot = 1;
    while (free_slot < kGenerations && leases_[free_slot].bytes() != 0) {
      ++free_slot;
    }
    if (free_slot == kGenerations) {
      return fail(ErrorCode::kInvalidArgument,
                  "tensor arena: tensors of 255 earlier governors are still alive",
                  "drop the tensors of earlier runs before starting another");
    }
    leases_[free_slot] = std::move(lease);
    generation_ = free_slot;
    governor_ = std::move(governor);
    cap_bytes_ = cap_bytes;
    live_high_ = stats_.live_bytes;
    table_base_ = runs_.table_bytes();
    attached_.store(true, std::memory_order_relaxed);
  }
  reclaimer_ = std::move(reclaimer);
  return {};
}

void ArenaPages::detach() noexcept {
  if (forked_) {
    return;
  }
  Governor ended;
  {
    MutexLock lock(mutex_);
    end_attachment();
    ended = std::exchange(governor_, Governor{});
  }
  reclaimer_ = ReclaimerHandle{};
}

void ArenaPages::end_attachment() noexcept {
  if (generation_ == 0) {
    return;
  }
  purge_locked();
  // Partly used spans are only freed into from now on: their lease is not for new blocks.
  partial_.fill(0);
  lower_lease(generation_, std::exchange(table_leased_, 0));
  generation_ = 0;
  attached_.store(false, std::memory_order_relaxed);
}

void ArenaPages::after_fork_in_child() {
  forked_ = true;
  partial_.fill(0);
  generation_ = 0;
  attached_.store(false, std::memory_order_relaxed);
  mutex_.unlock();
}

// ---- Leasing pages ----

void ArenaPages::lower_lease(std::uint16_t generation, std::int64_t bytes) noexcept {
  stats_.leased_bytes -= bytes;
  if (forked_) {
    return;
  }
  Lease& lease = leases_[generation];
  lease.shrink(lease.bytes() - bytes);
  if (lease.bytes() == 0 && generation != generation_) {
    lease = Lease{};  // Lets go of a ledger that may have ended.
  }
}

Error ArenaPages::own_refusal(std::int64_t wanted, std::int64_t cap, const char* advice) const {
  const LedgerState ledger = governor_.state();
  Error error;
  error.code = ErrorCode::kOverBudget;
  error.tag = Tag::kTensor;
  error.requested_bytes = wanted;
  error.available_bytes = std::max<std::int64_t>(0, cap - leases_[generation_].bytes());
  error.limit_bytes = ledger.limit_bytes;
  error.baseline_bytes = ledger.baseline_bytes;
  error.orphan_bytes = ledger.orphan_bytes;
  error.cap_bytes = cap;
  for (std::size_t tag = 0; tag < error.held_bytes.size(); ++tag) {
    error.held_bytes[tag] = std::max(ledger.pools[tag].floor_bytes, ledger.pools[tag].leased_bytes);
  }
  error.advice = advice;
  return error;
}

// Leases what a run needs beyond its resident pages: `fresh` of them, and their table entries.
Result<void> ArenaPages::lease_pages(PageIndex first, std::uint32_t pages, std::int64_t fresh) {
  Lease& lease = leases_[generation_];
  const std::int64_t table = runs_.table_bytes(first + pages) - table_base_;
  const std::int64_t more = fresh * kArenaPageBytes + table - table_leased_;
  if (more > cap_bytes_ - lease.bytes()) {
    return tl::unexpected(own_refusal(more, cap_bytes_,
                                      "the cap that the tensor arena was attached with, or lower "
                                      "batch_size"));
  }
  PLIMSOLL_TRY_VOID(lease.grow(lease.bytes() + more));
  table_leased_ = table;
  stats_.leased_bytes += more;
  stats_.leased_peak_bytes = std::max(stats_.leased_peak_bytes, stats_.leased_bytes);
  return {};
}

// Keeps leased within a 32nd, or 8 MiB, of the highest live bytes: before growing past that, as
// much of the cache goes back to the system as is about to be touched elsewhere. Holes between
// blocks then cost page faults, not memory.
void ArenaPages::trade_cache(std::int64_t bytes_more) noexcept {
  const std::int64_t high = std::max(live_high_, stats_.live_bytes + bytes_more);
  const std::int64_t target = high + std::max(high / kSlackShare, kSlackMin);
  const std::int64_t excess = stats_.leased_bytes + bytes_more - target;
  if (excess > 0 && runs_.cached_pages() > 0) {
    const std::int64_t released = runs_.release_free(whole_pages(excess)) * kArenaPageBytes;
    lower_lease(generation_, released);
  }
}

Result<PageIndex> ArenaPages::take_leased(std::uint32_t pages) {
  const PageIndex first = runs_.take(pages);
  if (first == 0) {
    return tl::unexpected(own_refusal(pages * kArenaPageBytes, runs_.range_bytes(),
                                      "the address space limit (ulimit -v or -d)"));
  }
  const std::int64_t fresh = pages - runs_.resident_pages(first, pages);
  if (fresh > 0) {
    trade_cache(fresh * kArenaPageBytes);
    auto leased = lease_pages(first, pages, fresh);
    if (!leased && leased.error().code == ErrorCode::kOverBudget && purge_locked() > 0) {
      leased = lease_pages(first, pages, fresh);
    }
    if (!leased) {
      runs_.give(first, pages);
      Error error = std::move(leased).error();
      // Say it of the block itself: its pages that are resident already count as available.
      const std::int64_t more = pages * kArenaPageBytes - error.requested_bytes;
      error.requested_bytes += more;
      error.available_bytes = std::max<std::int64_t>(0, error.available_bytes + more);
      return tl::unexpected(std::move(error));
    }
    runs_.mark_resident(first, pages);
  }
  runs_.record(first).generation = generation_;
  return first;
}

// Into the cache; or to the system, when the lease that pays is not the current one.
void ArenaPages::give_back(PageIndex first, std::uint32_t pages) noexcept {
  const std::uint16_t generation = runs_.record(first).generation;
  if (generation != generation_) {
    lower_lease(generation, runs_.release(first, pages) * kArenaPageBytes);
  }
  runs_.give(first, pages);
}

void ArenaPages::count_live(std::int64_t bytes) noexcept {
  ++stats_.allocations;
  stats_.live_bytes += bytes;
  stats_.live_peak_bytes = std::max(stats_.live_peak_bytes, stats_.live_bytes);
  live_high_ = std::max(live_high_, stats_.live_bytes);
}

Result<ArenaBlock> ArenaPages::allocate(std::int64_t bytes) {
  MutexLock lock(mutex_);
  if (generation_ == 0) {
    return ArenaBlock{};
  }
  if (bytes > runs_.range_bytes()) {
    ++stats_.refusals;
    return tl::unexpected(
        own_refusal(bytes, runs_.range_bytes(),
                    "the address space limit (ulimit -v or -d), or check the shape"));
  }
  if (until_refused_ > 0 && --until_refused_ == 0 && refused_left_ > 0) {
    until_refused_ = --refused_left_ > 0 ? 1 : 0;
    ++stats_.refusals;
    return tl::unexpected(own_refusal(bytes, 0, "the fault that a test asked for"));
  }
  auto block = bytes <= kSmallMax ? allocate_small(bytes) : allocate_large(bytes);
  if (block) {
    count_live(block->bytes);
    if (kTraceable && ring_ != nullptr) {
      ring_->record(TraceKind::kAllocate, block->data, bytes);
    }
  } else if (block.error().code != ErrorCode::kOverBudget) {
    end_attachment();  // The governor was closed or replaced under us.
    return ArenaBlock{};
  } else {
    ++stats_.refusals;
  }
  return block;
}

std::int64_t ArenaPages::free(void* data) noexcept {
  MutexLock lock(mutex_);
  const PageIndex page = runs_.page_of(data);
  const PageRecord record = runs_.record(page);
  std::int64_t bytes = 0;
  if (record.kind == PageKind::kSmall) {
    bytes = size_class_bytes(record.size_class);
    free_small(data, record.span);
  } else if (record.kind == PageKind::kLarge) {
    bytes = record.span * kArenaPageBytes;
    give_back(page, record.span);
  }
  stats_.live_bytes -= bytes;
  if (kTraceable && ring_ != nullptr) {
    ring_->record(TraceKind::kFree, data, bytes);
  }
  return bytes;
}

Result<ArenaBlock> ArenaPages::allocate_large(std::int64_t bytes) {
  const std::uint32_t pages = whole_pages(bytes);
  PLIMSOLL_TRY(const PageIndex first, take_leased(pages));
  return ArenaBlock{runs_.address(first), pages * kArenaPageBytes};
}

// ---- Small blocks ----

ArenaPages::SmallSpan& ArenaPages::small(PageIndex head) noexcept {
  return reinterpret_cast<SmallSpan*>(small_table_.data())[head / kSpanPagesMin];
}

void ArenaPages::link_small(PageIndex head, int size_class) noexcept {
  PageIndex& list = partial_[static_cast<std::size_t>(size_class)];
  SmallSpan& span = small(head);
  span.previous = 0;
  span.next = list;
  if (list != 0) {
    small(list).previous = head;
  }
  list = head;
}

void ArenaPages::unlink_small(PageIndex head, int size_class) noexcept {
  const SmallSpan& span = small(head);
  if (span.next != 0) {
    small(span.next).previous = span.previous;
  }
  if (span.previous != 0) {
    small(span.previous).next = span.next;
  } else {
    partial_[static_cast<std::size_t>(size_class)] = span.next;
  }
}

Result<PageIndex> ArenaPages::new_small_span(int size_class) {
  const std::uint32_t pages = span_pages(size_class);
  PLIMSOLL_TRY(const PageIndex head, take_leased(pages));
  const std::int64_t step = size_class_bytes(size_class);
  const std::int64_t capacity = pages * kArenaPageBytes / step;
  for (PageIndex page = head; page < head + pages; ++page) {
    runs_.record(page) = {.span = head,
                          .kind = PageKind::kSmall,
                          .size_class = static_cast<std::uint8_t>(size_class),
                          .generation = generation_};
  }
  for (std::int64_t block = 0; block < capacity; ++block) {
    const std::int64_t offset = block * step;
    const auto page = head + static_cast<PageIndex>(offset / kArenaPageBytes);
    runs_.record(page).word |= 1ULL << (offset % kArenaPageBytes / kBlockStep);
  }
  small(head) = {.capacity = static_cast<std::uint16_t>(capacity),
                 .pages = static_cast<std::uint16_t>(pages)};
  link_small(head, size_class);
  empty_span_bytes_ += pages * kArenaPageBytes;
  return head;
}

Result<ArenaBlock> ArenaPages::allocate_small(std::int64_t bytes) {
  const int size_class = size_class_of(bytes);
  PageIndex head = partial_[static_cast<std::size_t>(size_class)];
  if (head == 0) {
    PLIMSOLL_TRY(head, new_small_span(size_class));
  }
  SmallSpan& span = small(head);
  if (span.used == 0) {
    empty_span_bytes_ -= span.pages * kArenaPageBytes;
  }
  while (runs_.record(head + span.first_free).word == 0) {
    ++span.first_free;  // Ends: a span in the list has a free block.
  }
  std::uint64_t& blocks = runs_.record(head + span.first_free).word;
  const int bit = std::countr_zero(blocks);
  blocks &= blocks - 1;
  if (++span.used == span.capacity) {
    unlink_small(head, size_class);
  }
  return ArenaBlock{runs_.address(head + span.first_free) + bit * kBlockStep,
                    size_class_bytes(size_class)};
}

void ArenaPages::free_small(void* data, PageIndex head) noexcept {
  const PageIndex page = runs_.page_of(data);
  PageRecord& record = runs_.record(page);
  const auto offset = static_cast<std::byte*>(data) - runs_.address(page);
  record.word |= 1ULL << (offset / kBlockStep);
  const int size_class = record.size_class;
  SmallSpan& span = small(head);
  span.first_free = std::min(span.first_free, static_cast<std::uint16_t>(page - head));
  const bool was_full = span.used == span.capacity;
  --span.used;
  if (record.generation != generation_) {
    if (span.used == 0) {
      give_back(head, span.pages);
    }
    return;
  }
  if (was_full) {
    link_small(head, size_class);
  }
  if (span.used > 0) {
    return;
  }
  // Keep one empty span of a class, so that one block allocated and freed in turn costs no span.
  if (span.next == 0 && span.previous == 0) {
    empty_span_bytes_ += span.pages * kArenaPageBytes;
  } else {
    unlink_small(head, size_class);
    give_back(head, span.pages);
  }
}

// ---- Purging ----

std::int64_t ArenaPages::purge_locked() noexcept {
  if (generation_ == 0) {
    return 0;  // Detached: freed pages went back at once.
  }
  for (int size_class = 0; empty_span_bytes_ > 0 && size_class < kSizeClasses; ++size_class) {
    PageIndex head = partial_[static_cast<std::size_t>(size_class)];
    while (head != 0) {
      const SmallSpan span = small(head);
      if (span.used == 0) {
        empty_span_bytes_ -= span.pages * kArenaPageBytes;
        unlink_small(head, size_class);
        give_back(head, span.pages);
      }
      head = span.next;
    }
  }
  const std::int64_t released = runs_.release_free(INT64_MAX) * kArenaPageBytes;
  ++stats_.purges;
  lower_lease(generation_, released);
  if (leases_[generation_].bytes() == table_leased_) {
    // Nothing is live: let go of the tables too, so that the governor counts as holding nothing.
    lower_lease(generation_, std::exchange(table_leased_, 0));
    table_base_ = runs_.table_bytes();
  }
  return released;
}

std::int64_t ArenaPages::purge() noexcept {
  MutexLock lock(mutex_);
  return purge_locked();
}

std::int64_t ArenaPages::reclaim(PressureMove move, std::int64_t /*wanted_bytes*/) noexcept {
  return move == PressureMove::kPurge ? purge() : 0;
}

ArenaStats ArenaPages::stats() noexcept {
  MutexLock lock(mutex_);
  ArenaStats copy = stats_;
  copy.cached_bytes = runs_.cached_pages() * kArenaPageBytes + empty_span_bytes_;
  return copy;
}

void ArenaPages::refuse(std::int64_t first, std::int64_t count) noexcept {
  MutexLock lock(mutex_);
  until_refused_ = first;
  refused_left_ = count;
}

void ArenaPages::trace(TraceRing* ring) noexcept {
  MutexLock lock(mutex_);
  ring_ = ring;
}

void ArenaPages::reset_peak() noexcept {
  MutexLock lock(mutex_);
  stats_.live_peak_bytes = stats_.live_bytes;
  stats_.leased_peak_bytes = stats_.leased_bytes;
}

}  // namespace plimsoll
