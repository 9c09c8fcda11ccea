// SPDX-License-Identifier: Apache-2.0
//
// See page_runs.h. A free run keeps its length in the records of its first and last page, so both
// neighbours find it without a search, and its list links in the first.
#include "torch/page_runs.h"

#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <bit>
#include <cerrno>
#include <string>

#include "plimsoll/limits.h"

namespace plimsoll {
namespace {

constexpr std::int64_t kRangeMax = 8LL << 40;  // PageIndex has 32 bits; leave one free.
constexpr std::int64_t kRecordBytes = sizeof(PageRecord);

std::int64_t bitmap_bytes(std::int64_t pages) noexcept {
  return (pages + 63) / 64 * 8 + 8;
}

std::uint64_t links(PageIndex next, PageIndex previous) noexcept {
  return static_cast<std::uint64_t>(previous) << 32 | next;
}
PageIndex next_of(const PageRecord& record) noexcept {
  return static_cast<PageIndex>(record.word);
}
PageIndex previous_of(const PageRecord& record) noexcept {
  return static_cast<PageIndex>(record.word >> 32);
}

// Calls visit(word_index, mask) for the words of a bitmap that hold bits [first, first + count).
template <class Visit>
void for_words(PageIndex first, std::uint32_t count, Visit visit) {
  std::uint64_t at = first;
  const std::uint64_t end = at + count;
  while (at < end) {
    const std::uint64_t begin_bit = at % 64;
    const std::uint64_t bits = std::min<std::uint64_t>(64 - begin_bit, end - at);
    const std::uint64_t mask = (bits == 64 ? ~0ULL : (1ULL << bits) - 1) << begin_bit;
    visit(at / 64, mask);
    at += bits;
  }
}

}  // namespace

AddressRange::~AddressRange() {
  unmap();
}

bool AddressRange::map(std::int64_t bytes) noexcept {
  void* at = ::mmap(nullptr, static_cast<std::size_t>(bytes), PROT_READ | PROT_WRITE,
                    MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (at == MAP_FAILED) {
    return false;
  }
  // A huge page would make 2 MiB resident for 4 KiB leased, and gains nothing: plain LibTorch took
  // 1.38 s for a Transformer's step with and without them (bench/w6_governor/README.md).
  ::madvise(at, static_cast<std::size_t>(bytes), MADV_NOHUGEPAGE);
  data_ = static_cast<std::byte*>(at);
  bytes_ = bytes;
  return true;
}

void AddressRange::unmap() noexcept {
  if (data_ != nullptr) {
    ::munmap(data_, static_cast<std::size_t>(bytes_));
  }
  data_ = nullptr;
  bytes_ = 0;
}

std::int64_t PageRuns::default_range_bytes() noexcept {
  const auto memory = static_cast<std::int64_t>(::sysconf(_SC_PHYS_PAGES)) *
                      static_cast<std::int64_t>(::sysconf(_SC_PAGESIZE));
  std::int64_t range = std::clamp<std::int64_t>(memory * 4, 64LL << 30, kRangeMax);
  range = std::min(range, address_limit_bytes() / 2);
  return range / kArenaPageBytes * kArenaPageBytes;
}

Result<void> PageRuns::reserve(std::int64_t range_bytes) {
  int os_errno = ENOMEM;
  for (std::int64_t bytes = std::min(range_bytes, kRangeMax); bytes >= kRangeMin; bytes /= 2) {
    const std::int64_t pages = bytes / kArenaPageBytes;
    if (!range_.map(pages * kArenaPageBytes) || !record_table_.map(pages * kRecordBytes) ||
        !resident_table_.map(bitmap_bytes(pages))) {
      os_errno = errno;
      range_.unmap();
      record_table_.unmap();
      continue;
    }
    records_ = reinterpret_cast<PageRecord*>(record_table_.data());
    resident_ = reinterpret_cast<std::uint64_t*>(resident_table_.data());
    // Page 0 and the last page stay kEdge (all zero), so that no run looks past the range.
    link(1, static_cast<std::uint32_t>(pages - 2));
    top_page_ = 1;
    return {};
  }
  return fail_io(
      os_errno,
      "tensor arena: no address range of " + std::to_string(kRangeMin) + " bytes can be reserved",
      "raise the address space limit (ulimit -v or -d)");
}

int PageRuns::bin_of(std::uint32_t pages) noexcept {
  if (pages < 16) {
    return static_cast<int>(pages);
  }
  const int log = 31 - std::countl_zero(pages);
  return (log - 3) * 16 + static_cast<int>((pages >> (log - 4)) & 15U);
}

void PageRuns::link(PageIndex first, std::uint32_t pages) noexcept {
  const int bin = bin_of(pages);
  const PageIndex head = heads_[static_cast<std::size_t>(bin)];
  if (head != 0) {
    records_[head].word = links(next_of(records_[head]), first);
  }
  PageRecord& last = records_[first + pages - 1];
  last.span = pages;
  last.kind = PageKind::kFree;
  records_[first] = {.span = pages, .kind = PageKind::kFree, .word = links(head, 0)};
  heads_[static_cast<std::size_t>(bin)] = first;
  occupied_[static_cast<std::size_t>(bin) / 64] |= 1ULL << (bin % 64);
}

void PageRuns::unlink(PageIndex first) noexcept {
  const PageRecord& record = records_[first];
  const int bin = bin_of(record.span);
  const PageIndex next = next_of(record);
  const PageIndex previous = previous_of(record);
  if (next != 0) {
    records_[next].word = links(next_of(records_[next]), previous);
  }
  if (previous != 0) {
    records_[previous].word = links(next, previous_of(records_[previous]));
    return;
  }
  heads_[static_cast<std::size_t>(bin)] = next;
  if (next == 0) {
    occupied_[static_cast<std::size_t>(bin) / 64] &= ~(1ULL << (bin % 64));
  }
}

PageIndex PageRuns::best_in(int bin, std::uint32_t pages) const noexcept {
  PageIndex best = 0;
  int seen = 0;
  for (PageIndex at = heads_[static_cast<std::size_t>(bin)]; at != 0 && seen < kScanMax;
       at = next_of(records_[at]), ++seen) {
    const std::uint32_t span = records_[at].span;
    if (span >= pages &&
        (best == 0 || span < records_[best].span || (span == records_[best].span && at < best))) {
      best = at;
    }
  }
  return best;
}

PageIndex PageRuns::take(std::uint32_t pages) noexcept {
  const int own_bin = bin_of(pages);
  PageIndex best = best_in(own_bin, pages);
  for (int word = own_bin / 64; best == 0 && word < static_cast<int>(occupied_.size()); ++word) {
    std::uint64_t bits = occupied_[static_cast<std::size_t>(word)];
    if (word == own_bin / 64) {
      bits &= own_bin % 64 == 63 ? 0 : ~0ULL << (own_bin % 64 + 1);
    }
    if (bits != 0) {
      best = best_in(word * 64 + std::countr_zero(bits), pages);
    }
  }
  if (best == 0) {
    return 0;
  }
  const std::uint32_t span = records_[best].span;
  unlink(best);
  if (span > pages) {
    link(best + pages, span - pages);
  }
  records_[best] = {.span = pages, .kind = PageKind::kLarge};
  PageRecord& last = records_[best + pages - 1];
  last.span = pages;
  last.kind = PageKind::kLarge;
  cached_pages_ -= count_bits(best, pages);
  return best;
}

void PageRuns::give(PageIndex first, std::uint32_t pages) noexcept {
  cached_pages_ += count_bits(first, pages);
  if (const PageRecord& after = records_[first + pages]; after.kind == PageKind::kFree) {
    unlink(first + pages);
    pages += after.span;
  }
  if (const PageRecord& before = records_[first - 1]; before.kind == PageKind::kFree) {
    first -= before.span;
    pages += before.span;
    unlink(first);
  }
  link(first, pages);
}

std::int64_t PageRuns::count_bits(PageIndex first, std::uint32_t pages) const noexcept {
  std::int64_t count = 0;
  // Nothing at or above top_page_ has ever been touched: the last free run is mostly that.
  const PageIndex end = std::min(first + pages, top_page_);
  if (first < end) {
    for_words(first, end - first, [&](std::uint64_t word, std::uint64_t mask) {
      count += std::popcount(resident_[word] & mask);
    });
  }
  return count;
}

std::int64_t PageRuns::resident_pages(PageIndex first, std::uint32_t pages) const noexcept {
  return count_bits(first, pages);
}

void PageRuns::mark_resident(PageIndex first, std::uint32_t pages) noexcept {
  for_words(first, pages, [&](std::uint64_t word, std::uint64_t mask) { resident_[word] |= mask; });
  top_page_ = std::max(top_page_, first + pages);
}

std::int64_t PageRuns::release(PageIndex first, std::uint32_t pages,
                               std::int64_t pages_max) noexcept {
  const bool is_free = records_[first].kind == PageKind::kFree;
  const auto bit_at = [this](PageIndex page) {
    return (resident_[page / 64] >> (page % 64) & 1U) != 0;
  };
  std::int64_t released = 0;
  PageIndex end = std::min(first + pages, top_page_);
  while (end > first && released < pages_max) {
    if (!bit_at(end - 1)) {
      --end;
      continue;
    }
    PageIndex begin = end - 1;
    while (begin > first && bit_at(begin - 1) && end - begin < pages_max - released) {
      --begin;
    }
    const std::uint32_t run = end - begin;
    // Fails only for locked pages (mlockall), which nothing can give back.
    ::madvise(address(begin), static_cast<std::size_t>(run) * kArenaPageBytes, MADV_DONTNEED);
    for_words(begin, run,
              [&](std::uint64_t word, std::uint64_t mask) { resident_[word] &= ~mask; });
    released += run;
    end = begin;
  }
  if (is_free) {
    cached_pages_ -= released;
  }
  return released;
}

std::int64_t PageRuns::release_free(std::int64_t pages_max) noexcept {
  std::int64_t released = 0;
  for (int bin = kBins - 1; bin >= 0 && cached_pages_ > 0 && released < pages_max; --bin) {
    for (PageIndex at = heads_[static_cast<std::size_t>(bin)]; at != 0 && released < pages_max;
         at = next_of(records_[at])) {
      released += release(at, records_[at].span, pages_max - released);
    }
  }
  return released;
}

std::int64_t PageRuns::table_bytes(PageIndex end) const noexcept {
  const std::int64_t pages = std::max(end, top_page_);
  const std::int64_t touched = pages * kRecordBytes + pages / 8;
  return (touched + kArenaPageBytes - 1) / kArenaPageBytes * kArenaPageBytes;
}

}  // namespace plimsoll
