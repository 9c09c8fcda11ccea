// SPDX-License-Identifier: Apache-2.0
//
// Pins, loads and hints. Eviction and writes are in embedding_page_writes.cpp.
//
// Threads: see embedding_page_cache.h.   Memory: see embedding_page_cache.h.
#include "store/embedding_page_cache.h"

#include <algorithm>
#include <array>
#include <cstring>
#include <functional>
#include <limits>
#include <utility>

#include <fmt/format.h>

#include "base/check.h"
#include "base/round.h"
#include "store/row_init.h"

namespace plimsoll {
namespace {

// How far ahead of the key being looked up its page's entry and frame are fetched into the cache.
// Source: bench/w3_update --table-mib 1024, AMD EPYC 7003: ratio to memcpy 0.88 with 24, 0.95 with
// 8, 1.26 without.
constexpr std::size_t kEntryAhead = 24;
constexpr std::size_t kFrameAhead = 12;

// Rounds, of a use per frame each, after which use counts are halved; 256 is a multiple. See
// kFadeAfter for where it comes from.
constexpr int kAgeAfter = 32;
constexpr std::int64_t kCandidates = 1024;  // Frames compared with each other at once.
// How many ticks a hint may be behind. More than the look-ahead's queue holds, and few of all that
// a tick can be: where nobody says which request is at hand, none is late until ticks have run out.
constexpr std::uint32_t kLateMost = 1024;

std::uint32_t ordinal_of(std::uint64_t key) {
  return static_cast<std::uint32_t>(key >> 32);
}

std::int64_t lane_bytes(const TableShape& shape, const PageCache::Sizes& sizes) {
  const std::int64_t most = std::max(sizes.write_batch, sizes.read_batch);
  const std::int64_t block = static_cast<std::int64_t>(sizeof(BlockEntry));
  return sizes.write_batch * shape.page_bytes + kBlockUnit +
         round_up((most + 1) * static_cast<std::int64_t>(sizeof(IoRequest)), 64) +
         2 * round_up(sizes.write_batch * 4, 64) + round_up(sizes.write_batch * block, 64) +
         2 * round_up(sizes.read_batch * 4, 64) + round_up(sizes.read_batch * block, 64);
}

}  // namespace

std::int64_t PageCache::frame_bytes(const TableShape& shape) noexcept {
  // The frame, its entry, its place in the free stack and in the list of dirty ones.
  return shape.page_bytes + static_cast<std::int64_t>(sizeof(Frame)) + 4 + 4;
}

std::int64_t PageCache::buffer_bytes(const TableShape& shape, const Sizes& sizes) noexcept {
  return 3 * lane_bytes(shape, sizes) + kBlockUnit + 4 * 64 +
         round_up(kCandidates * static_cast<std::int64_t>(sizeof(std::uint64_t)), 64);
}

std::int64_t PageCache::index_bytes(const TableShape& shape) noexcept {
  return round_up(shape.pages * 4, 64) + round_up(shape.pages, 64);
}

PageCache::PageCache(const Table& table, const Sizes& sizes, BlockMap& map, Slab& slab)
    : table_(table),
      sizes_(sizes),
      slab_(slab),
      map_(map),
      owner_(make_lane(sizes, slab, false)),
      look_ahead_(make_lane(sizes, slab, true)),
      write_back_(make_lane(sizes, slab, true)) {
  data_ = slab.take<std::byte>(sizes.frames * table.shape.page_bytes, kBlockUnit);
  const auto into = static_cast<std::int64_t>(reinterpret_cast<std::uintptr_t>(data_.data()) %
                                              static_cast<std::uintptr_t>(kRegionBytes));
  head_bytes_ = into == 0 ? 0 : kRegionBytes - into;
  const std::int64_t behind_head = static_cast<std::int64_t>(data_.size()) - head_bytes_;
  regions_ = std::max<std::int64_t>(0, behind_head / kRegionBytes);
  regions_held_ = regions_;
  frames_ = slab.take<Frame>(sizes.frames);
  frame_of_ = slab.take<std::uint32_t>(table.shape.pages);
  heat_ = slab.take<std::uint8_t>(table.shape.pages);
  candidates_ = slab.take<std::uint64_t>(kCandidates);
  free_ = slab.take<std::uint32_t>(sizes.frames);
  dirty_list_ = slab.take<std::uint32_t>(sizes.frames);
  std::fill(frames_.begin(), frames_.end(), Frame{});
  std::fill(frame_of_.begin(), frame_of_.end(), kNone);
  // Popped from the back: the first page loaded gets the first frame.
  for (std::int64_t i = 0; i < sizes.frames; ++i) {
    free_[static_cast<std::size_t>(i)] = static_cast<std::uint32_t>(sizes.frames - 1 - i);
  }
  free_count_ = sizes.frames;
  present_ = sizes.frames;
}

PageCache::Lane PageCache::make_lane(const Sizes& sizes, Slab& slab, bool background) const {
  Lane lane;
  lane.buffer = slab.take<std::byte>(sizes.write_batch * table_.shape.page_bytes, kBlockUnit);
  lane.requests = slab.take<IoRequest>(std::max(sizes.write_batch, sizes.read_batch) + 1);
  lane.cleaning = slab.take<std::uint32_t>(sizes.write_batch);
  lane.write_pages = slab.take<std::uint32_t>(sizes.write_batch);
  lane.written = slab.take<BlockEntry>(sizes.write_batch);
  lane.reading = slab.take<std::uint32_t>(sizes.read_batch);
  lane.pages = slab.take<std::uint32_t>(sizes.read_batch);
  lane.sources = slab.take<BlockEntry>(sizes.read_batch);
  lane.background = background;
  return lane;
}

std::span<std::byte> PageCache::frame_data(std::uint32_t frame) const noexcept {
  const auto bytes = static_cast<std::size_t>(table_.shape.page_bytes);
  return data_.subspan(frame * bytes, bytes);
}

bool PageCache::resident() const {
  return present_ >= table_.shape.pages;
}

std::int64_t PageCache::hint_most() const {
  return resident() ? present_ : present_ / 2;
}

// ---- The owner --------------------------------------------------------------------------------

std::int64_t PageCache::pin_limit() const {
  const MutexLock lock(mutex_);
  return pin_most();
}

std::int64_t PageCache::pin_most() const {
  return resident() ? std::numeric_limits<std::int64_t>::max() : present_ / 2;
}

Result<void> PageCache::begin_request() {
  bool leaving = false;
  {
    const MutexLock lock(mutex_);
    if (poison_) {
      return tl::unexpected(*poison_);
    }
    ++request_;
    leaving = leaving_;
  }
  if (leaving) {
    const MutexLock resizing(resize_mutex_);
    give_regions();
  }
  return {};
}

// Counts a request's use of a page, once. An apply() right after the gather() of the same page is
// the same step: it was announced as one use, and says no more about the next.
void PageCache::use(Frame& frame, bool to_write) {
  const std::uint32_t since = request_ - frame.used_at;
  frame.used_at = request_;
  if (since == 0 || (to_write && since == 1)) {
    return;
  }
  frame.heat = static_cast<std::uint8_t>(std::min(frame.heat + 1, 255));
  frame.round = rounds_;
  if ((frame.flags & kHinted) != 0 && !frame.coming.pass()) {
    unhint(frame);
  }
  if (++uses_ >= present_ && !resident()) {
    uses_ = 0;
    if (++rounds_ % kAgeAfter == 0) {
      age();
    }
  }
}

void PageCache::age() {
  for (std::uint8_t& heat : heat_) {
    heat = static_cast<std::uint8_t>(heat >> 1);
  }
  for (Frame& frame : frames_) {
    frame.heat = static_cast<std::uint8_t>(frame.heat >> 1);
    if (static_cast<std::uint8_t>(rounds_ - frame.round) > kRoundsMost) {
      frame.round = static_cast<std::uint8_t>(rounds_ - kRoundsMost);  // Before the count wraps.
    }
  }
}

void PageCache::reached(std::uint32_t tick) noexcept {
  const MutexLock lock(mutex_);
  reached_ = tick;
}

bool PageCache::is_late(std::uint32_t tick) const {
  return reached_ - tick < kLateMost;
}

void PageCache::add_hint(Frame& frame, std::uint32_t tick) {
  frame.hinted_at = request_;
  if ((frame.flags & kHinted) != 0) {
    frame.coming.add(tick);
    return;
  }
  frame.flags |= kHinted;
  frame.coming = NextUse(tick);
  ++hinted_;
}

void PageCache::unhint(Frame& frame) {
  if ((frame.flags & kHinted) != 0) {
    frame.flags &= static_cast<std::uint8_t>(~kHinted);
    --hinted_;
  }
}

void PageCache::mark_dirty(std::uint32_t frame) {
  Frame& f = frames_[frame];
  if ((f.flags & kDirty) != 0) {
    return;
  }
  f.flags |= kDirty;
  stats_.dirty_bytes_max = std::max(stats_.dirty_bytes_max, ++dirty_ * table_.shape.page_bytes);
  if ((f.flags & kListed) == 0) {
    f.flags |= kListed;
    list_dirty(frame);
  }
}

void PageCache::await_copy(std::uint32_t frame) {
  while ((frames_[frame].flags & kCopying) != 0) {
    changed_.wait(mutex_);
  }
}

Result<std::int64_t> PageCache::pin(std::span<const std::uint64_t> keys, bool to_write,
                                    std::span<std::byte*> records) {
  const auto rows_per_page = static_cast<std::uint32_t>(table_.shape.rows_per_page);
  const auto record_bytes = static_cast<std::size_t>(table_.shape.record_bytes);
  const auto page_bytes = static_cast<std::size_t>(table_.shape.page_bytes);
  const MutexLock lock(mutex_);
  if (to_write) {
    await_dirty_room(static_cast<std::int64_t>(keys.size()));
  }
  if (++pin_last_ == 0) {  // The numbers have run out: nothing is pinned, so begin again.
    for (Frame& frame : frames_) {
      frame.pin = 0;
    }
    pin_last_ = 1;
  }
  pin_ = pin_last_;
  std::int64_t pages = 0;
  bool unsettled = false;
  std::size_t i = 0;
  for (; i < keys.size(); ++i) {
    if (i + kEntryAhead < keys.size()) {
      __builtin_prefetch(&frame_of_[ordinal_of(keys[i + kEntryAhead]) / rows_per_page]);
      if (const auto next = frame_of_[ordinal_of(keys[i + kFrameAhead]) / rows_per_page];
          next != kNone) {
        __builtin_prefetch(&frames_[next], 1);
      }
    }
    const std::uint32_t ordinal = ordinal_of(keys[i]);
    const std::uint32_t page = ordinal / rows_per_page;
    std::uint32_t index = frame_of_[page];
    if (index == kNone || frames_[index].pin != pin_) {
      if (pages >= pin_most()) {
        break;
      }
      if (index == kNone) {
        auto started = start_load(owner_, page);
        if (!started) {
          pin_ = 0;
          return tl::unexpected(std::move(started).error());
        }
        index = *started;
      }
      frames_[index].pin = pin_;
      ++pages;
    }
    Frame& frame = frames_[index];
    ++stats_.requests;
    if (frame.state == State::kReady) {
      ++stats_.hits;
      stats_.prefetch_hits += (frame.flags & kFetched) != 0 ? 1 : 0;
      use(frame, to_write);
      if (to_write) {
        await_copy(index);
        mark_dirty(index);
      }
    } else {
      unsettled = true;
    }
    records[i] = data_.data() + index * page_bytes + kPageHeaderBytes +
                 (ordinal - page * rows_per_page) * record_bytes;
  }
  if (unsettled) {
    if (auto settled = settle(keys.first(i), to_write, records); !settled) {
      pin_ = 0;
      return tl::unexpected(std::move(settled).error());
    }
  }
  return static_cast<std::int64_t>(i);
}

// Finishes the loads of a pin: the owner's own, and those of the look-ahead that it must wait for
// (or repeat, where they failed there).
Result<void> PageCache::settle(std::span<const std::uint64_t> keys, bool to_write,
                               std::span<std::byte*> records) {
  const auto rows_per_page = static_cast<std::uint32_t>(table_.shape.rows_per_page);
  PLIMSOLL_TRY_VOID(finish_loads(owner_));
  for (std::size_t i = 0; i < keys.size(); ++i) {
    const std::uint32_t page = ordinal_of(keys[i]) / rows_per_page;
    std::uint32_t index = frame_of_[page];
    while (index == kNone || frames_[index].state != State::kReady) {
      if (index == kNone) {
        PLIMSOLL_TRY(index, start_load(owner_, page));
        PLIMSOLL_TRY_VOID(finish_loads(owner_));
      } else {
        const Stall stall(stats_.stall_ns);
        changed_.wait(mutex_);
      }
      index = frame_of_[page];
    }
    Frame& frame = frames_[index];
    frame.pin = pin_;
    use(frame, to_write);
    if (to_write) {
      await_copy(index);
      mark_dirty(index);
    }
    records[i] = frame_data(index).data() + kPageHeaderBytes +
                 (ordinal_of(keys[i]) - page * rows_per_page) * table_.shape.record_bytes;
  }
  return {};
}

void PageCache::unpin() noexcept {
  const MutexLock lock(mutex_);
  pin_ = 0;
  if (look_ahead_waits_) {
    room_.notify_one();
  }
  if (wants_write_back()) {
    dirtied_.notify_one();
  }
}

Result<void> PageCache::snapshot(std::int64_t first, std::span<std::byte> out) {
  const auto page_bytes = static_cast<std::size_t>(table_.shape.page_bytes);
  const auto count = static_cast<std::int64_t>(out.size() / page_bytes);
  std::size_t reads = 0;
  for (std::int64_t i = 0; i < count; ++i) {
    const auto page = static_cast<std::uint32_t>(first + i);
    const auto into = out.subspan(static_cast<std::size_t>(i) * page_bytes, page_bytes);
    MutexLock lock(mutex_);
    std::uint32_t index = frame_of_[page];
    while (index != kNone && frames_[index].state != State::kReady) {
      changed_.wait(mutex_);
      index = frame_of_[page];
    }
    if (index != kNone) {
      // Copied under the lock: one page, and nobody has to be told that it is in use.
      std::memcpy(into.data(), frame_data(index).data(), page_bytes);
      continue;
    }
    const BlockEntry entry = map_.entry(page);
    lock.unlock();
    if (entry.block == 0) {
      PLIMSOLL_TRY_VOID(init_page(page, into));
      continue;
    }
    owner_.requests[reads] = {.file = table_.file,
                              .offset = (entry.block - 1) * table_.shape.page_bytes,
                              .bytes = into,
                              .kind = IoKind::kRead};
    owner_.write_pages[reads] = page;
    owner_.written[reads] = entry;
    ++reads;
  }
  PLIMSOLL_TRY_VOID(table_.pool->run(owner_.requests.first(reads)));
  for (std::size_t i = 0; i < reads; ++i) {
    PLIMSOLL_TRY_VOID(
        check_page(owner_.write_pages[i], owner_.written[i], owner_.requests[i].bytes));
  }
  return {};
}

void PageCache::poison(const Error& error) {
  const MutexLock lock(mutex_);
  if (!poison_) {
    poison_ = error;
  }
  changed_.notify_all();
}

Result<void> PageCache::poisoned() const {
  const MutexLock lock(mutex_);
  if (poison_) {
    return tl::unexpected(*poison_);
  }
  return {};
}

void PageCache::committed(int slot, bool keep, bool still_pinned, std::int64_t syncs) noexcept {
  const MutexLock lock(mutex_);
  if (!still_pinned) {
    map_.release_pinned();
  }
  if (keep) {
    map_.keep_pinned(slot);
  }
  map_.committed(slot);
  committed_ns_ = now_ns();
  ++stats_.commits;
  stats_.syncs += syncs;
}

StoreStats PageCache::stats() const {
  const MutexLock lock(mutex_);
  StoreStats stats = stats_;
  stats.dirty_bytes = dirty_ * table_.shape.page_bytes;
  stats.resident_pages = present_ - free_count_;
  stats.frames = present_;
  return stats;
}

// ---- Loads ------------------------------------------------------------------------------------

// Gives `page` a frame and puts it on the lane's list of reads; opens the lock while frames must be
// cleaned or the list is full. Returns kNone to the look-ahead when there is no frame to be had.
Result<std::uint32_t> PageCache::start_load(Lane& lane, std::uint32_t page) {
  for (;;) {
    if (frame_of_[page] != kNone) {
      return frame_of_[page];  // The other lane was here while the lock was open.
    }
    if (lane.read_count == static_cast<std::int64_t>(lane.reading.size())) {
      PLIMSOLL_TRY_VOID(finish_loads(lane));
    } else if (free_count_ == 0) {
      if (auto refilled = refill(lane); !refilled) {
        for (std::int64_t i = 0; i < lane.read_count; ++i) {
          drop(lane.reading[static_cast<std::size_t>(i)]);
        }
        lane.read_count = 0;
        changed_.notify_all();
        return tl::unexpected(std::move(refilled).error());
      }
      if (free_count_ == 0 && lane.background) {
        return kNone;
      }
    } else {
      break;
    }
  }
  const std::uint32_t index = free_[static_cast<std::size_t>(--free_count_)];
  Frame& frame = frames_[index];
  frame.page = page;
  frame.state = State::kReading;
  frame.pin = lane.background ? 0 : pin_;
  frame.flags &= kListed;
  frame.used_at = request_ - 2;  // Not yet used, and not just before.
  frame.heat = heat_[page];
  frame.round = rounds_;
  if (lane.background) {
    frame.flags |= kBackground | kFetched;
  }
  frame_of_[page] = index;
  lane.pages[static_cast<std::size_t>(lane.read_count)] = page;
  lane.reading[static_cast<std::size_t>(lane.read_count++)] = index;
  return index;
}

// Reads what start_load() listed. On an error the pages that could not be read have no frame.
Result<void> PageCache::finish_loads(Lane& lane) {
  const std::int64_t count = std::exchange(lane.read_count, 0);
  if (count == 0) {
    return {};
  }
  const Stall stall(stats_.stall_ns, !lane.background);
  for (std::int64_t i = 0; i < count; ++i) {
    const auto at = static_cast<std::size_t>(i);
    lane.sources[at] = map_.entry(lane.pages[at]);
    stats_.pages_read += lane.sources[at].block != 0 ? 1 : 0;
  }
  mutex_.unlock();
  Result<void> result;
  try {
    result = read_pages(lane, count);
  } catch (const std::bad_alloc&) {  // For want of memory for an error's text.
    result = tl::unexpected(Error{.code = ErrorCode::kIo});
  }
  mutex_.lock();
  stats_.bytes_read = stats_.pages_read * table_.shape.page_bytes;
  for (std::int64_t i = 0; i < count; ++i) {
    const std::uint32_t index = lane.reading[static_cast<std::size_t>(i)];
    if (result) {
      frames_[index].state = State::kReady;
      frames_[index].flags &= static_cast<std::uint8_t>(~kBackground);
    } else {
      drop(index);
    }
  }
  changed_.notify_all();
  return result;
}

// Fills the frames of the lane's list: from disk, or from the initialiser, which has to know the
// ids of the rows: those are read along, into the frame that is to hold the rows. Without the lock:
// a frame that is being read belongs to the lane.
Result<void> PageCache::read_pages(Lane& lane, std::int64_t count) {
  std::size_t requests = 0;
  bool all_written = true;  // Then request r is for page r of the list.
  for (std::int64_t i = 0; i < count; ++i) {
    const auto at = static_cast<std::size_t>(i);
    const auto bytes = frame_data(lane.reading[at]);
    all_written = all_written && lane.sources[at].block != 0;
    if (lane.sources[at].block != 0) {
      lane.requests[requests++] = {.file = table_.file,
                                   .offset = (lane.sources[at].block - 1) * table_.shape.page_bytes,
                                   .bytes = bytes,
                                   .kind = IoKind::kRead};
    } else if (const auto ids = table_.ids->order_read(lane.pages[at] * table_.shape.rows_per_page,
                                                       bytes.first(kIdPageBytes));
               ids && (requests == 0 || lane.requests[requests - 1].file != ids->file ||
                       lane.requests[requests - 1].offset != ids->offset)) {
      lane.requests[requests++] = *ids;
    }
  }
  if (all_written) {
    return read_written(lane, requests);
  }
  PLIMSOLL_TRY_VOID(table_.pool->run(lane.requests.first(requests)));
  std::size_t next = 0;  // Of the requests.
  for (std::int64_t i = 0; i < count; ++i) {
    const auto at = static_cast<std::size_t>(i);
    const auto bytes = frame_data(lane.reading[at]);
    const std::uint32_t page = lane.pages[at];
    const bool read = next < requests && lane.requests[next].bytes.data() == bytes.data();
    next += read ? 1 : 0;
    if (lane.sources[at].block != 0) {
      PLIMSOLL_TRY_VOID(check_page(page, lane.sources[at], bytes));
      continue;
    }
    if (read) {
      PLIMSOLL_TRY_VOID(
          table_.ids->order_was_read(page * table_.shape.rows_per_page, bytes.first(kIdPageBytes)));
    }
    PLIMSOLL_TRY_VOID(init_page(page, bytes));
  }
  return {};
}

// Pages are checked while others are still under way.
Result<void> PageCache::read_written(const Lane& lane, std::size_t count) const {
  std::size_t flawed = count;  // The first of them.
  const auto check = [&](std::size_t at) {
    if (!page_is_sound(table_.shape, table_.fingerprint, lane.pages[at], lane.sources[at].crc,
                       lane.requests[at].bytes)) {
      flawed = std::min(flawed, at);
    }
  };
  PLIMSOLL_TRY_VOID(table_.pool->run(lane.requests.first(count), std::cref(check)));
  return flawed == count
             ? Result<void>{}
             : check_page(lane.pages[flawed], lane.sources[flawed], lane.requests[flawed].bytes);
}

Result<void> PageCache::check_page(std::uint32_t page, BlockEntry entry,
                                   std::span<const std::byte> bytes) const {
  if (page_is_sound(table_.shape, table_.fingerprint, page, entry.crc, bytes)) {
    return {};
  }
  return fail(ErrorCode::kCorrupt,
              fmt::format("{}: page {} (block {}) fails its checksum", table_.file->path().string(),
                          page, entry.block),
              "restore the table from a copy, or resume from an older run");
}

Result<void> PageCache::init_page(std::uint32_t page, std::span<std::byte> bytes) const {
  const TableShape& shape = table_.shape;
  const std::int64_t first = page * shape.rows_per_page;
  // Places behind the rows of the table's creation have none until an insert writes it.
  const std::int64_t rows =
      std::clamp<std::int64_t>(table_.ids->rows() - first, 0, shape.rows_in_page(page));
  std::fill_n(bytes.begin(), kPageHeaderBytes, std::byte{0});
  std::fill(bytes.begin() + kPageHeaderBytes + rows * shape.record_bytes, bytes.end(),
            std::byte{0});
  std::array<std::int64_t, 128> ids;
  for (std::int64_t row = 0; row < rows; ++row) {
    const std::int64_t in_piece = row % static_cast<std::int64_t>(ids.size());
    if (in_piece == 0) {
      const auto piece = std::min(rows - row, static_cast<std::int64_t>(ids.size()));
      PLIMSOLL_TRY_VOID(
          table_.ids->ids_at(first + row, std::span(ids).first(static_cast<std::size_t>(piece))));
    }
    const std::int64_t id = ids[static_cast<std::size_t>(in_piece)];
    init_record(shape, table_.init, id, id,
                bytes.data() + kPageHeaderBytes + row * shape.record_bytes);
  }
  return {};
}

// ---- The look-ahead ---------------------------------------------------------------------------

std::size_t PageCache::load_hinted(std::span<const Hint> hints) {
  const MutexLock lock(mutex_);
  if (poison_ || stopping_) {
    return hints.size();
  }
  look_ahead_busy_ = true;
  std::size_t done = 0;
  for (; done < hints.size(); ++done) {
    const auto [page, tick] = hints[done];
    if (is_late(tick)) {
      continue;  // The page would be protected for a use that has been.
    }
    if (const std::uint32_t index = frame_of_[page]; index != kNone) {
      if (hinted_ < hint_most() || (frames_[index].flags & kHinted) != 0) {
        add_hint(frames_[index], tick);
      }
      continue;
    }
    if (hinted_ >= hint_most()) {
      break;
    }
    const auto started = start_load(look_ahead_, page);
    if (!started) {
      done = hints.size();  // A write failed: the cache is poisoned, and its owner will be told.
      break;
    }
    if (*started != kNone && !is_late(tick)) {
      add_hint(frames_[*started], tick);
    }
  }
  // A page that cannot be read is left to the owner, who will meet the error when it needs it.
  static_cast<void>(finish_loads(look_ahead_));
  look_ahead_busy_ = false;
  changed_.notify_all();
  return done;
}

void PageCache::wait_for_room() {
  const MutexLock lock(mutex_);
  const std::uint32_t began = request_;
  const auto crowded = [&]() PLIMSOLL_REQUIRES(mutex_) {
    const std::int64_t most = hint_most();
    return hinted_ > most - std::max<std::int64_t>(1, std::min(sizes_.read_batch, most / 4));
  };
  look_ahead_waits_ = true;
  while (!stopping_ && !poison_ && crowded() && request_ - began < kStaleRequests) {
    room_.wait(mutex_);
  }
  look_ahead_waits_ = false;
  if (crowded()) {
    for (Frame& frame : frames_) {
      if ((frame.flags & kHinted) != 0 && request_ - frame.hinted_at >= kStaleRequests) {
        unhint(frame);
      }
    }
  }
}

void PageCache::stop() {
  const MutexLock lock(mutex_);
  stopping_ = true;
  room_.notify_all();
  dirtied_.notify_all();
}

}  // namespace plimsoll
