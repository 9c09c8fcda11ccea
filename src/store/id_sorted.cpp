// SPDX-License-Identifier: Apache-2.0
//
// Threads: see id_sorted.h.   Memory: see id_sorted.h; a look-up uses 6 KiB of stack, and a batch
// of reads as much again.
#include "store/id_sorted.h"

#include <algorithm>
#include <utility>

#include <fmt/format.h>

#include "base/check.h"
#include "base/round.h"
#include "store/id_page.h"

namespace plimsoll {
namespace {

constexpr std::int64_t kMissed = -2;  // Less the page: what stands for an ordinal until it is read.

std::uint32_t page_missed(std::int64_t ordinal) {
  return static_cast<std::uint32_t>(kMissed - ordinal);
}

}  // namespace

// ---- IdFrame ----------------------------------------------------------------------------------

void IdFrame::fill(std::span<const std::byte> page) noexcept {
  IdLine unused{.ids = {}, .ordinals = {}, .overflows = 0};
  unused.ids.fill(id_page_id(page, 0));
  unused.ordinals.fill(id_page_ordinal(page, 0));
  lines.fill(unused);
  std::array<std::uint8_t, kLines> used{};
  for (std::int64_t i = 0; i < id_page_count(page); ++i) {
    const std::int64_t id = id_page_id(page, i);
    std::uint32_t at = home(id);
    while (used[at] == IdLine::kIds) {
      lines[at].overflows |= overflow_bit(id);
      at = next(at);
    }
    lines[at].ids[used[at]] = id;
    lines[at].ordinals[used[at]++] = id_page_ordinal(page, i);
  }
}

// ---- Opening ----------------------------------------------------------------------------------

Result<void> check_sorted(
    const File& file, std::int64_t rows,
    const std::function<void(std::int64_t, std::span<const std::byte>)>& page_seen) {
  alignas(64) std::array<std::byte, kIdPageBytes> page;
  const std::int64_t pages = id_pages(IdPageKind::kSorted, rows);
  std::int64_t previous = 0;
  for (std::int64_t number = 0; number < pages; ++number) {
    PLIMSOLL_TRY_VOID(file.read_at(number * kIdPageBytes, page));
    PLIMSOLL_TRY_VOID(check_id_page(page, IdPageKind::kSorted, number, file.path()));
    const std::int64_t count = id_page_count(page);
    if (count != std::min(kIdsPerSortedPage, rows - number * kIdsPerSortedPage)) {
      return fail(ErrorCode::kCorrupt,
                  fmt::format("{}: page {} holds {} ids", file.path().string(), number, count));
    }
    for (std::int64_t i = 0; i < count; ++i) {
      const std::int64_t id = id_page_id(page, i);
      if ((number > 0 || i > 0) && id <= previous) {
        return fail(ErrorCode::kCorrupt,
                    fmt::format("{}: page {} is out of order", file.path().string(), number));
      }
      if (id_page_ordinal(page, i) >= rows) {
        return fail(ErrorCode::kCorrupt,
                    fmt::format("{}: page {} names row {} of {}", file.path().string(), number,
                                id_page_ordinal(page, i), rows));
      }
      previous = id;
    }
    page_seen(number, page);
  }
  return {};
}

SortedIds::Shape SortedIds::shape_of(std::int64_t rows, std::int64_t cached_pages) noexcept {
  const std::int64_t pages = std::max<std::int64_t>(id_pages(IdPageKind::kSorted, rows), 1);
  const std::int64_t slots = std::clamp<std::int64_t>(cached_pages, 1, pages);
  const auto most = static_cast<std::int64_t>(kReadsMost);
  return {.pages = pages,
          .slots = slots,
          .reads = slots == pages ? 0 : std::clamp<std::int64_t>(slots / 4, 2, most),
          .starts = divide_up(pages, 8)};
}

std::int64_t SortedIds::memory_bytes(std::int64_t rows, std::int64_t cached_pages) noexcept {
  const Shape shape = shape_of(rows, cached_pages);
  const std::int64_t buffers = shape.reads == 0 ? 0 : (shape.reads + 1) * kIdPageBytes;
  return round_up(shape.pages * 8, 64) + round_up(shape.starts * 4, 64) +
         round_up(shape.slots * 4, 64) + shape.slots * std::int64_t{sizeof(IdFrame)} + buffers +
         4 * 64;
}

SortedIds::SortedIds(const Shape& shape, Slab& slab, IoPool& pool)
    : pool_(pool),
      slots_(static_cast<std::uint32_t>(shape.slots)),
      fences_(slab.take<std::int64_t>(shape.pages)),
      starts_(slab.take<std::uint32_t>(shape.starts)),
      buffers_(
          slab.take<std::byte>(shape.reads * kIdPageBytes, shape.reads == 0 ? 64 : kIdPageBytes)),
      frames_(slab.take<IdFrame>(shape.slots)),
      tags_(slab.take<std::uint32_t>(shape.slots)) {
  std::fill(tags_.begin(), tags_.end(), kNone);
}

Result<std::unique_ptr<SortedIds>> SortedIds::open(const std::filesystem::path& path,
                                                   std::int64_t rows, Slab& slab,
                                                   std::int64_t cached_pages, IoPool& pool) {
  const Shape shape = shape_of(rows, cached_pages);
  PLIMSOLL_TRY(auto file, open_id_pages(path, shape.pages));
  std::unique_ptr<SortedIds> ids(new SortedIds(shape, slab, pool));
  PLIMSOLL_TRY_VOID(
      check_sorted(file, rows, [&](std::int64_t number, std::span<const std::byte> page) {
        ids->fences_[static_cast<std::size_t>(number)] = id_page_id(page, 0);
        if (number < shape.slots) {
          ids->put(static_cast<std::uint32_t>(number), page);
        }
      }));
  ids->find_starts();
  file.drop_cache();  // Either in the slab now, or read past the kernel's cache.
  if (shape.slots < shape.pages) {
    PLIMSOLL_TRY(ids->file_, File::open(path, FileMode::kRead, true));
  }
  return ids;
}

// ---- Looking up -------------------------------------------------------------------------------

// Ids that are spread evenly, as hashes are, leave a few pages to be searched; others leave more.
void SortedIds::find_starts() noexcept {
  const auto range =
      static_cast<std::uint64_t>(fences_.back()) - static_cast<std::uint64_t>(fences_.front());
  while (shift_ < 63 && range >> shift_ >= starts_.size()) {
    ++shift_;
  }
  std::uint32_t page = 0;
  for (std::size_t i = 0; i < starts_.size(); ++i) {
    // The last page that begins before this part of the range; the first of it may be in there.
    while (page + 1 < fences_.size() && start_of(fences_[page + 1]) < i) {
      ++page;
    }
    starts_[i] = page;
    span_ = std::max(span_, page - starts_[i > 0 ? i - 1 : 0] + 1);
  }
  const auto pages = static_cast<std::uint32_t>(fences_.size());
  span_ = std::min(std::max(span_, pages - starts_.back()), pages);
  for (std::uint32_t& start : starts_) {
    start = std::min(start, pages - span_);
  }
}

// The last page of each id whose fence is not above it, or the first: a binary search for several
// ids at once, without a branch, so that they wait for memory together.
void SortedIds::find_pages(std::span<const std::int64_t> ids,
                           std::span<std::uint32_t> pages) const noexcept {
  for (std::size_t i = 0; i < ids.size(); ++i) {
    pages[i] = starts_[start_of(ids[i])];
  }
  for (std::uint32_t left = span_; left > 1;) {
    const std::uint32_t half = left / 2;
    for (std::size_t i = 0; i < ids.size(); ++i) {
      pages[i] += half & (0U - static_cast<std::uint32_t>(fences_[pages[i] + half] <= ids[i]));
    }
    left -= half;
  }
}

// Of ids that have no ordinal yet. What remains missed are those whose pages are not there.
bool SortedIds::look(std::span<const std::int64_t> ids, std::span<std::int64_t> ordinals) {
  bool missed = false;
  for (std::size_t at = 0; at < ids.size(); at += kAtOnce) {
    const std::size_t count = std::min(kAtOnce, ids.size() - at);
    missed = look_piece(ids.subspan(at, count), ordinals.subspan(at, count)) || missed;
  }
  return missed;
}

bool SortedIds::look_piece(std::span<const std::int64_t> ids, std::span<std::int64_t> ordinals) {
  std::array<std::uint32_t, kAtOnce> pages;
  std::array<std::uint32_t, kAtOnce> lines;
  std::array<std::uint32_t, kAtOnce> rest;  // Those to be looked for in another line.
  std::size_t left = 0;
  bool missed = false;
  const MutexLock lock(mutex_);
  const auto line_of = [&](std::size_t i) PLIMSOLL_REQUIRES(mutex_) -> const IdLine& {
    return frames_[slot_of(pages[i])].lines[lines[i]];
  };
  const auto look_at = [&](std::size_t i) PLIMSOLL_REQUIRES(mutex_) {
    const IdLine& line = line_of(i);
    ordinals[i] = line.find(ids[i]);
    if (ordinals[i] < 0 && (line.overflows & IdFrame::overflow_bit(ids[i])) != 0) {
      lines[i] = IdFrame::next(lines[i]);
      __builtin_prefetch(&line_of(i));
      rest[left++] = static_cast<std::uint32_t>(i);
    }
  };
  for (std::size_t begin = 0; begin < ids.size() + kStep; begin += kStep) {
    const std::size_t end = std::min(begin + kStep, ids.size());
    if (begin < end) {
      find_pages(ids.subspan(begin, end - begin), std::span(pages).subspan(begin, end - begin));
    }
    for (std::size_t i = begin; i < end; ++i) {
      lines[i] = IdFrame::home(ids[i]);
      __builtin_prefetch(&line_of(i));
    }
    for (std::size_t i = begin < kStep ? end : begin - kStep; i < std::min(begin, ids.size());
         ++i) {
      if (ordinals[i] >= 0) {
        continue;
      }
      if (tags_[slot_of(pages[i])] == pages[i]) {
        look_at(i);
      } else {
        ordinals[i] = kMissed - pages[i];
        missed = true;
      }
    }
  }
  for (std::size_t some = left; some > 0; some = left) {
    left = 0;
    for (std::size_t r = 0; r < some; ++r) {
      look_at(rest[r]);
    }
  }
  return missed;
}

Result<void> SortedIds::find_rest(std::span<const std::int64_t> ids,
                                  std::span<std::int64_t> ordinals) {
  if (!look(ids, ordinals)) {
    return {};
  }
  bool waited = false;
  {
    const MutexLock lock(mutex_);
    for (; reading_; waited = true) {
      turn_ended_.wait(mutex_);
    }
    reading_ = true;
  }
  auto done = waited && !look(ids, ordinals) ? Result<void>{} : read_missed(ids, ordinals);
  {
    const MutexLock lock(mutex_);
    reading_ = false;
  }
  turn_ended_.notify_one();
  return done;
}

std::span<std::byte> SortedIds::buffer(std::size_t i) const noexcept {
  return buffers_.subspan(i * static_cast<std::size_t>(kIdPageBytes), kIdPageBytes);
}

// Reads as many of the missed pages as there are buffers, answers for all ids in them, and goes on
// with the rest: so no page is read twice, whatever the frames have room for. Requires: the turn.
Result<void> SortedIds::read_missed(std::span<const std::int64_t> ids,
                                    std::span<std::int64_t> ordinals) {
  const std::size_t most = buffers_.size() / static_cast<std::size_t>(kIdPageBytes);
  for (;;) {
    std::array<std::uint32_t, kReadsMost> pages;  // Ascending.
    auto end = pages.begin();
    const auto place_of = [&](std::int64_t ordinal) {
      return std::lower_bound(pages.begin(), end, page_missed(ordinal));
    };
    for (std::size_t i = 0; i < ordinals.size() && end != pages.begin() + most; ++i) {
      if (ordinals[i] > kMissed) {
        continue;
      }
      const auto place = place_of(ordinals[i]);
      if (place == end || *place != page_missed(ordinals[i])) {
        std::copy_backward(place, end, end + 1);
        *place = page_missed(ordinals[i]);
        ++end;
      }
    }
    if (end == pages.begin()) {
      return {};
    }
    PLIMSOLL_TRY_VOID(read_pages({pages.begin(), end}));
    for (std::size_t i = 0; i < ordinals.size(); ++i) {
      if (ordinals[i] > kMissed) {
        continue;
      }
      const auto place = place_of(ordinals[i]);
      if (place != end && *place == page_missed(ordinals[i])) {
        const auto read = static_cast<std::size_t>(place - pages.begin());
        ordinals[i] = search_id_page(buffer(read), ids[i]);
      }
    }
  }
}

// Into the buffers, and from there into frames.
Result<void> SortedIds::read_pages(std::span<const std::uint32_t> pages) {
  std::array<IoRequest, kReadsMost> requests;
  for (std::size_t i = 0; i < pages.size(); ++i) {
    requests[i] = {.file = &file_,
                   .offset = pages[i] * kIdPageBytes,
                   .bytes = buffer(i),
                   .kind = IoKind::kRead};
  }
  PLIMSOLL_TRY_VOID(pool_.run(std::span(requests).first(pages.size())));
  for (std::size_t i = 0; i < pages.size(); ++i) {
    PLIMSOLL_TRY_VOID(check_id_page(buffer(i), IdPageKind::kSorted, pages[i], file_.path()));
    put(pages[i], buffer(i));
  }
  return {};
}

void SortedIds::put(std::uint32_t number, std::span<const std::byte> page) {
  const MutexLock lock(mutex_);
  const std::uint32_t slot = slot_of(number);
  frames_[slot].fill(page);
  tags_[slot] = number;
}

}  // namespace plimsoll
