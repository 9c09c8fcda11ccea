// SPDX-License-Identifier: Apache-2.0
//
// PageRuns hands out runs of 4 KiB pages from one reserved address range, by best fit.
//
// Everything known about a page is in a side table, so nothing is written before, into or after
// the memory handed out. Free neighbours coalesce. Beside it a bitmap says which pages are
// resident: touched since they were last given back to the system.
//
// Reading order: this file, arena_pages.h, page_runs.cpp, arena_pages.cpp.
//
// Threads: single-owner; ArenaPages guards it with its mutex.
// Memory:  address space for the range, and a table of 16 bytes and one bit a page, resident only
//          where the range has been used. Nothing is allocated after reserve().
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>

#include "plimsoll/result.h"

namespace plimsoll {

inline constexpr std::int64_t kArenaPageBytes = 4096;

using PageIndex = std::uint32_t;  ///< 0 is never handed out: it means none.

enum class PageKind : std::uint8_t { kEdge, kFree, kLarge, kSmall };

/// What the side table says of one page.
struct PageRecord {
  std::uint32_t span{0};  ///< kSmall: first page of its span. Else pages of the run, on its ends.
  PageKind kind{PageKind::kEdge};
  std::uint8_t size_class{0};   ///< kSmall.
  std::uint16_t generation{0};  ///< kLarge, kSmall: which lease pays; set on a run's first page.
  std::uint64_t word{0};        ///< kSmall: free blocks that begin here. kFree: two links.
};
static_assert(sizeof(PageRecord) == 16);

/// Addresses that cost nothing until touched, then 4 KiB at a time (never a huge page).
class AddressRange {
 public:
  AddressRange() noexcept = default;
  AddressRange(const AddressRange&) = delete;
  AddressRange& operator=(const AddressRange&) = delete;
  ~AddressRange();

  /// Maps `bytes`, zero-filled when first touched; false (and errno) when the system refuses.
  bool map(std::int64_t bytes) noexcept;
  void unmap() noexcept;
  [[nodiscard]] std::byte* data() const noexcept { return data_; }
  [[nodiscard]] std::int64_t bytes() const noexcept { return bytes_; }

 private:
  std::byte* data_{nullptr};
  std::int64_t bytes_{0};
};

class PageRuns {
 public:
  /// Reserves `range_bytes` of addresses, or half as often as the system refuses it.
  /// Errors: kIo when not even kRangeMin can be had.
  Result<void> reserve(std::int64_t range_bytes);

  /// Four times the machine's memory, so that scattered addresses never refuse what fits in
  /// memory; at most half of what RLIMIT_AS and RLIMIT_DATA leave.
  [[nodiscard]] static std::int64_t default_range_bytes() noexcept;

  /// Takes the smallest free run of at least `pages` (lowest address among equals looked at) and
  /// splits off the rest. 0 when the range has no such run. Requires: pages > 0. Reserves only:
  /// mark_resident() follows once the pages are leased, or give().
  /// The caller sets kind, class and generation of the records it owns now.
  PageIndex take(std::uint32_t pages) noexcept;

  /// Gives a run back. It stays resident.
  void give(PageIndex first, std::uint32_t pages) noexcept;

  [[nodiscard]] std::int64_t resident_pages(PageIndex first, std::uint32_t pages) const noexcept;
  void mark_resident(PageIndex first, std::uint32_t pages) noexcept;

  /// Gives the resident pages of a run back to the system, at most `pages_max` of them and the
  /// highest first; returns how many. Of a free run, or of one that is about to be given.
  std::int64_t release(PageIndex first, std::uint32_t pages,
                       std::int64_t pages_max = INT64_MAX) noexcept;

  /// The same for free pages. From the longest runs down.
  std::int64_t release_free(std::int64_t pages_max) noexcept;

  [[nodiscard]] bool owns(const void* pointer) const noexcept {
    return reinterpret_cast<std::uintptr_t>(pointer) -
               reinterpret_cast<std::uintptr_t>(range_.data()) <
           static_cast<std::uintptr_t>(range_.bytes());
  }
  [[nodiscard]] std::byte* address(PageIndex page) const noexcept {
    return range_.data() + static_cast<std::int64_t>(page) * kArenaPageBytes;
  }
  [[nodiscard]] PageIndex page_of(const void* pointer) const noexcept {
    return static_cast<PageIndex>((static_cast<const std::byte*>(pointer) - range_.data()) /
                                  kArenaPageBytes);
  }
  [[nodiscard]] PageRecord& record(PageIndex page) const noexcept { return records_[page]; }
  [[nodiscard]] std::int64_t range_bytes() const noexcept { return range_.bytes(); }
  /// Free pages that are resident.
  [[nodiscard]] std::int64_t cached_pages() const noexcept { return cached_pages_; }
  /// Bytes the side tables will have touched once pages below `end` are in use. Never falls.
  [[nodiscard]] std::int64_t table_bytes(PageIndex end = 0) const noexcept;

  static constexpr std::int64_t kRangeMin = 1LL << 28;

 private:
  // Runs of fewer than 16 pages have a bin each; above, each power of two has sixteen.
  static constexpr int kBins = 464;
  static constexpr int kScanMax = 64;  // Runs looked at in one bin before the best is taken.

  static int bin_of(std::uint32_t pages) noexcept;
  PageIndex best_in(int bin, std::uint32_t pages) const noexcept;
  void link(PageIndex first, std::uint32_t pages) noexcept;
  void unlink(PageIndex first) noexcept;
  std::int64_t count_bits(PageIndex first, std::uint32_t pages) const noexcept;

  AddressRange range_;
  AddressRange record_table_;
  AddressRange resident_table_;
  PageRecord* records_{nullptr};      // In record_table_: one per page.
  std::uint64_t* resident_{nullptr};  // In resident_table_: one bit per page.
  PageIndex top_page_{0};             // One past the highest page ever marked resident.
  std::int64_t cached_pages_{0};
  std::array<PageIndex, kBins> heads_{};
  std::array<std::uint64_t, (kBins + 63) / 64> occupied_{};
};

}  // namespace plimsoll
