// SPDX-License-Identifier: Apache-2.0
//
// commit and scan.
//
// A commit writes the dirty pages to free blocks and what has changed of the page table to the map
// file that neither superblock names, and makes both durable, side by side; then it writes the
// older superblock's slot and makes it durable. Until then both superblocks and all that they refer
// to are untouched.
//
// A commit that somebody reads (commit_pins.h) keeps its blocks when its superblock is replaced.
//
// Threads: see embedding_store.h.   Memory: the page cache's scratch.
#include <algorithm>
#include <array>
#include <chrono>
#include <cstring>
#include <utility>

#include <fmt/format.h>

#include "base/check.h"
#include "os/crash_point.h"
#include "store/embedding_store_impl.h"

namespace plimsoll {
namespace {

constexpr std::int64_t kSyncs = 3;         // Of rows.dat, a map.N and super.
constexpr std::int64_t kUnitsAtOnce = 64;  // 256 KiB of the map: several are under way at once.

}  // namespace

Result<void> EmbeddingStore::Impl::make_durable(std::int64_t step) {
  PLIMSOLL_TRY(const auto last, cache_->begin_commit());
  crash_point("store.commit.pages");
  const int slot = other_slot();
  const CommitPins::Replacing replacing(pins_, slot);
  const bool keep = holds_commit(slot) && replacing.pinned(superblock(slot).step);
  const bool still_pinned = !map_->any_pinned() || pins_.any();
  const int map = super_.free_map();

  const auto began = std::chrono::steady_clock::now();
  const auto written = write_pages_and_map(map, last);
  const std::chrono::nanoseconds took = std::chrono::steady_clock::now() - began;
  cache_->end_commit(written, took.count());
  PLIMSOLL_TRY_VOID(written);

  PLIMSOLL_TRY_VOID(write_superblock({.step = step,
                                      .pages = shape_.pages,
                                      .blocks_used = map_->used_blocks(),
                                      .map_crc = map_->root(map),
                                      .map = map}));
  map_->mark_same(map);
  cache_->committed(slot, keep, still_pinned, kSyncs);
  return {};
}

// Makes both durable. Neither is worth anything without the other, so the disk may take them in any
// order. `last`: what is left of the pages to write, and behind them a request for the map.
Result<void> EmbeddingStore::Impl::write_pages_and_map(int map, std::span<IoRequest> last) {
  // Nothing else is dirty or being written: the page table cannot change under us.
  if (growing_) {
    growing_->touch(*map_);
  }
  const auto pages = last.first(last.size() - 1);
  const BlockMap::Units units = map_->stale_units(map, 0);
  const bool in_one_piece = units.count > 0 && units.count <= kUnitsAtOnce &&
                            map_->stale_units(map, units.first + units.count).count == 0;
  if (!in_one_piece) {
    PLIMSOLL_TRY_VOID(pool_.run(pages));
    PLIMSOLL_TRY_VOID(write_map(map));
    crash_point("store.commit.map");
    std::array<IoRequest, 2> both{IoRequest{.file = &rows_file_, .kind = IoKind::kSync},
                                  IoRequest{.file = &map_file(map), .kind = IoKind::kSync}};
    return pool_.run(both);
  }
  // The pages are longer: while they are written the map is not only written, but durable.
  last.back() = map_request(map, units.first, units.count);
  last.back().kind = IoKind::kWriteAndSync;
  if (pages.size() == 1) {
    pages.front().kind = IoKind::kWriteAndSync;
  }
  PLIMSOLL_TRY_VOID(pool_.run(last));
  crash_point("store.commit.map");
  return pages.size() == 1 ? Result<void>{} : rows_file_.sync();
}

IoRequest EmbeddingStore::Impl::map_request(int map, std::int64_t first, std::int64_t count) {
  const std::int64_t offset = first * kBlockUnit;
  return {.file = &map_file(map),
          .offset = offset,
          .bytes = map_->bytes().subspan(static_cast<std::size_t>(offset),
                                         static_cast<std::size_t>(count * kBlockUnit)),
          .kind = IoKind::kWrite};
}

// Writes what has changed since map.`map` was written last, three commits ago.
Result<void> EmbeddingStore::Impl::write_map(int map) {
  std::array<IoRequest, 32> requests;
  std::size_t count = 0;
  for (std::int64_t from = 0;;) {
    const BlockMap::Units units = map_->stale_units(map, from);
    const std::int64_t some = std::min(units.count, kUnitsAtOnce);
    if (count == requests.size() || some == 0) {
      PLIMSOLL_TRY_VOID(pool_.run(std::span(requests).first(count)));
      count = 0;
    }
    if (some == 0) {
      return {};
    }
    requests[count++] = map_request(map, units.first, some);
    from = units.first + some;
  }
}

// The rows of whole pages, `first` and on.
Result<void> EmbeddingStore::Impl::show_pages(std::int64_t first, std::span<const std::byte> pages,
                                              Shown& rows) const {
  const std::int64_t begin = first * shape_.rows_per_page;
  const std::int64_t end =
      std::min(begin + std::ssize(pages) / shape_.page_bytes * shape_.rows_per_page, shape_.rows);
  for (std::int64_t place = begin; place < end; ++place) {
    if (growing_) {
      place = growing_->next_held(place);
      if (place < 0 || place >= end) {
        break;
      }
    }
    const std::int64_t row = place - begin;
    const std::byte* const record = pages.data() + row / shape_.rows_per_page * shape_.page_bytes +
                                    kPageHeaderBytes +
                                    row % shape_.rows_per_page * shape_.record_bytes;
    RowHeader header;
    std::memcpy(&header, record, sizeof header);
    if (growing_ && place >= table_.ids.rows && header.id != growing_->id_at(place)) {
      return fail(
          ErrorCode::kCorrupt,
          fmt::format("{}: place {} holds a row of id {}, and not of id {}",
                      rows_file_.path().string(), place, header.id, growing_->id_at(place)));
    }
    PLIMSOLL_TRY_VOID(rows.add(header.id, record));
  }
  return rows.flush();
}

Result<void> EmbeddingStore::Impl::scan(const Visit& visit) {
  PLIMSOLL_TRY_VOID(sound());
  // Half of the scratch for pages, half for what is in them: ids, sequences and values of a row
  // are together shorter than its record; than two of its records, when its weights are bfloat16.
  const std::span<std::byte> scratch = cache_->scratch();
  const auto page_bytes = static_cast<std::size_t>(shape_.page_bytes);
  const std::size_t parts = shape_.dtype == RowDType::kFloat32 ? 2 : 3;
  const auto pages_at_once = static_cast<std::int64_t>(scratch.size() / page_bytes / parts);
  Shown rows(scratch.subspan(static_cast<std::size_t>(pages_at_once) * page_bytes), shape_, visit);
  for (std::int64_t first = 0; first < shape_.pages; first += pages_at_once) {
    if (growing_) {  // Pages without rows are passed over.
      const std::int64_t held = growing_->next_held(first * shape_.rows_per_page);
      if (held < 0) {
        return {};
      }
      first = held / shape_.rows_per_page;
    }
    const std::int64_t pages = std::min(pages_at_once, shape_.pages - first);
    const auto in = scratch.first(static_cast<std::size_t>(pages) * page_bytes);
    PLIMSOLL_TRY_VOID(cache_->snapshot(first, in));
    PLIMSOLL_TRY_VOID(show_pages(first, in, rows));
  }
  return {};
}

}  // namespace plimsoll
