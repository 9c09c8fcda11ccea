// SPDX-License-Identifier: Apache-2.0
//
// ArenaPages is the tensor arena without torch: blocks in leased pages.
//
// Blocks up to 32 KiB come from spans of one size class (sixteenths of a power of two, at least
// 64 bytes apart); larger ones are runs of pages. Free pages stay resident and leased: they are
// the cache. A page is leased before it is first touched, so that
//
//   leased = live blocks + cached pages + slack (unused parts of spans, rounding to pages, tables)
//
// is at any time at least what the arena has resident, and the cache is bounded: leased grows past
// 33/32 of the highest live bytes (+ 8 MiB) only by slack. Each attachment to a governor is a
// generation with its own lease; a span remembers the generation that pays for it.
//
// Reading order: page_runs.h, this file, arena_pages.cpp, tensor_arena.cpp.
//
// Threads: thread-safe, one mutex. Under it only Lease::grow and shrink are called, whose mutex
//          is a leaf: docs/CONCURRENCY.md.
// Memory:  the leased bytes; a table of 0.4 % of them (page_runs.h; leased as slack while attached)
//          and 256 generations of 32 bytes. Nothing is allocated after open().
#pragma once

#include <array>
#include <atomic>
#include <cstdint>

#include "base/mutex.h"
#include "plan/trace_ring.h"
#include "plimsoll/arena_stats.h"
#include "plimsoll/governor.h"
#include "torch/page_runs.h"

namespace plimsoll {

inline constexpr std::int64_t kSmallMax = 32 << 10;  ///< Largest block of a size class, in bytes.
inline constexpr int kSizeClasses = 96;

/// The class of a block of `bytes`. Requires: 0 < bytes <= kSmallMax.
[[nodiscard]] int size_class_of(std::int64_t bytes) noexcept;
/// The bytes that blocks of a class take: a multiple of 64, at most a sixteenth above any request
/// of more than 1024 bytes.
[[nodiscard]] std::int64_t size_class_bytes(int size_class) noexcept;
/// What a block of `bytes` costs in live_bytes: its class, or whole pages.
[[nodiscard]] std::int64_t arena_block_bytes(std::int64_t bytes) noexcept;
/// The most that is leased for so many live bytes: the cache's bound, a partly used span of every
/// class, and the tables.
[[nodiscard]] std::int64_t arena_leased_bytes(std::int64_t live_bytes) noexcept;

/// A block, or data == nullptr: not attached, the caller passes through.
struct ArenaBlock {
  void* data{nullptr};
  std::int64_t bytes{0};  ///< As counted in live_bytes.
};

class ArenaPages final : public Reclaimer {
 public:
  ArenaPages() noexcept = default;
  ~ArenaPages() override = default;
  ArenaPages(const ArenaPages&) = delete;
  ArenaPages& operator=(const ArenaPages&) = delete;

  /// Reserves the address range; once, before anything else. Errors: kIo.
  Result<void> open(std::int64_t range_bytes);

  /// Leases from `governor` from now on, at most `cap_bytes`; ends an earlier attachment.
  /// Errors: kInvalidArgument for an empty handle, after a fork, or when 255 earlier attachments
  /// all still have living blocks; what the governor says to a lease or a reclaimer.
  Result<void> attach(Governor governor, std::int64_t cap_bytes);

  /// Gives the cache back. Living blocks keep their lease; their pages go back when freed.
  void detach() noexcept;

  [[nodiscard]] bool attached() const noexcept { return attached_.load(std::memory_order_relaxed); }
  [[nodiscard]] bool owns(const void* pointer) const noexcept { return runs_.owns(pointer); }

  /// A block aligned to 64 bytes. When the lease is refused, gives the cache back and tries once
  /// more; never calls a reclaimer. When the governor has ended, detaches and passes through.
  /// Requires: bytes > 0. Errors: kOverBudget; nothing has changed but the cache.
  Result<ArenaBlock> allocate(std::int64_t bytes);

  /// Takes a block back; returns its bytes as counted in live_bytes. Requires: owns(data).
  std::int64_t free(void* data) noexcept;

  /// Gives every free page back to the system; returns the bytes.
  std::int64_t purge() noexcept;

  [[nodiscard]] ArenaStats stats() noexcept;
  void reset_peak() noexcept;

  /// For tests: the `first`-th allocation from now on (1 is the next) and the `count - 1` after it
  /// are refused as if the limit did; 0: none.
  void refuse(std::int64_t first, std::int64_t count) noexcept;

  /// From now on records every block handed out and taken back; nullptr: no more.
  void trace(TraceRing* ring) noexcept;

  std::int64_t reclaim(PressureMove move, std::int64_t wanted_bytes) noexcept override;
  [[nodiscard]] const char* name() const noexcept override { return "arena"; }

  /// Around fork(): the child's copy of the ledger may be torn, so the child never leases again.
  void before_fork() PLIMSOLL_ANNOTATE(acquire_capability(mutex_)) { mutex_.lock(); }
  void after_fork_in_parent() PLIMSOLL_ANNOTATE(release_capability(mutex_)) { mutex_.unlock(); }
  void after_fork_in_child() PLIMSOLL_ANNOTATE(release_capability(mutex_));

 private:
  static constexpr int kGenerations = 256;  // Generation 0 is never used: it means detached.

  // A span of one size class: the entry of its first page / 16. Spans have at least 16 pages.
  struct SmallSpan {
    PageIndex next{0};
    PageIndex previous{0};
    std::uint16_t used{0};
    std::uint16_t capacity{0};
    std::uint16_t pages{0};
    std::uint16_t first_free{0};  // No page of the span before this one has a free block.
  };
  static_assert(sizeof(SmallSpan) == 16);

  SmallSpan& small(PageIndex head) noexcept;
  Result<PageIndex> take_leased(std::uint32_t pages) PLIMSOLL_REQUIRES(mutex_);
  Result<void> lease_pages(PageIndex first, std::uint32_t pages, std::int64_t fresh)
      PLIMSOLL_REQUIRES(mutex_);
  void trade_cache(std::int64_t bytes_more) noexcept PLIMSOLL_REQUIRES(mutex_);
  void give_back(PageIndex first, std::uint32_t pages) noexcept PLIMSOLL_REQUIRES(mutex_);
  Result<ArenaBlock> allocate_small(std::int64_t bytes) PLIMSOLL_REQUIRES(mutex_);
  Result<ArenaBlock> allocate_large(std::int64_t bytes) PLIMSOLL_REQUIRES(mutex_);
  Result<PageIndex> new_small_span(int size_class) PLIMSOLL_REQUIRES(mutex_);
  void free_small(void* data, PageIndex head) noexcept PLIMSOLL_REQUIRES(mutex_);
  void link_small(PageIndex head, int size_class) noexcept PLIMSOLL_REQUIRES(mutex_);
  void unlink_small(PageIndex head, int size_class) noexcept PLIMSOLL_REQUIRES(mutex_);
  void count_live(std::int64_t bytes) noexcept PLIMSOLL_REQUIRES(mutex_);
  std::int64_t purge_locked() noexcept PLIMSOLL_REQUIRES(mutex_);
  void lower_lease(std::uint16_t generation, std::int64_t bytes) noexcept PLIMSOLL_REQUIRES(mutex_);
  void end_attachment() noexcept PLIMSOLL_REQUIRES(mutex_);
  Error own_refusal(std::int64_t wanted, std::int64_t cap, const char* advice) const
      PLIMSOLL_REQUIRES(mutex_);

  Mutex mutex_;
  PageRuns runs_;
  AddressRange small_table_;  // SmallSpan, one per 16 pages.
  std::array<PageIndex, kSizeClasses> partial_ PLIMSOLL_GUARDED_BY(mutex_){};
  std::array<Lease, kGenerations> leases_ PLIMSOLL_GUARDED_BY(mutex_);
  Governor governor_ PLIMSOLL_GUARDED_BY(mutex_);
  ReclaimerHandle reclaimer_;  // Reset without the mutex held: the governor calls us back.
  ArenaStats stats_ PLIMSOLL_GUARDED_BY(mutex_);
  std::int64_t until_refused_ PLIMSOLL_GUARDED_BY(mutex_){0};  // 0: no refusal is planned.
  std::int64_t refused_left_ PLIMSOLL_GUARDED_BY(mutex_){0};
  TraceRing* ring_ PLIMSOLL_GUARDED_BY(mutex_){nullptr};
  std::int64_t empty_span_bytes_ PLIMSOLL_GUARDED_BY(mutex_){0};  // Kept spans with no block.
  std::int64_t live_high_ PLIMSOLL_GUARDED_BY(mutex_){0};         // Highest live while attached.
  std::int64_t cap_bytes_ PLIMSOLL_GUARDED_BY(mutex_){kUncapped};
  std::int64_t table_base_ PLIMSOLL_GUARDED_BY(mutex_){0};  // Touched before: in the baseline.
  std::int64_t table_leased_ PLIMSOLL_GUARDED_BY(mutex_){0};
  std::uint16_t generation_ PLIMSOLL_GUARDED_BY(mutex_){0};
  std::atomic<bool> attached_{false};  // Written under mutex_; read without it as a hint.
  bool forked_{false};                 // Written by the only thread of a child.
};

}  // namespace plimsoll
