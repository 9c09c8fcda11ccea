// SPDX-License-Identifier: Apache-2.0
//
// The page cache's eviction and writes.
//
// Threads: see embedding_page_cache.h.   Memory: see embedding_page_cache.h.
#include <algorithm>
#include <array>
#include <bit>
#include <chrono>
#include <utility>

#include "base/check.h"
#include "store/embedding_page_cache.h"

namespace plimsoll {
namespace {

// Long enough that a disk need not seek, short enough that several are under way at once.
constexpr std::int64_t kWriteBytesMost = 1 << 20;
constexpr std::int64_t kRefillMost = 64;
constexpr std::int64_t kReserveShare = 64;  // Of the bound on disk, one part in so many at a time,
constexpr std::int64_t kReserveUsed = 4;    // and of what is used.

// Rounds of disuse after which a page's use count is worth half; falls linearly in between.
// Source: bench/w2_skewed_ids/README.md, its real streams and Zipf streams of other skews and seeds
// than its own: with 4, and counts halved every 16 rounds, those whose popular pages change read
// less (sprite 1.94 for 2.09 of the optimum), and the others, as ids of people and things are, more
// (gowalla 1.43 for 1.41, Zipf 1.05: 1.46 for 1.43, 1.3: 1.31 for 1.28); the mean is the same.
constexpr int kFadeAfter = 8;
constexpr std::size_t kUseBits = 12;
static_assert(255 * 2 * kFadeAfter < 1 << kUseBits, "as often as can be");

constexpr double kRateWeight = 1.0 / 16;
constexpr std::int64_t kDirtyBytesLeast = 8 << 20;
constexpr std::int64_t kDirtyCompared = 1024;  // Of which the least used are written.

}  // namespace

bool PageCache::pinned(const Frame& frame) const {
  return pin_ != 0 && frame.pin == pin_;
}

// Empties a frame, whatever it was meant to hold.
void PageCache::drop(std::uint32_t index) {
  Frame& frame = frames_[index];
  PLIMSOLL_DCHECK((frame.flags & (kDirty | kWriting)) == 0, "nothing may be lost");
  unhint(frame);
  frame_of_[frame.page] = kNone;
  heat_[frame.page] = frame.heat;
  frame.page = kNone;
  frame.pin = 0;
  frame.state = State::kEmpty;
  frame.flags &= kListed;
  if (index < present_) {
    free_[static_cast<std::size_t>(free_count_++)] = index;
  }
}

// How often a page was used, less where that was long ago; kUseBits bits.
std::uint32_t PageCache::often_used(const Frame& frame) const {
  const int unused = static_cast<std::uint8_t>(rounds_ - frame.round);
  const int fraction = 2 * kFadeAfter - unused % kFadeAfter;
  return static_cast<std::uint32_t>(frame.heat * fraction) >> (unused / kFadeAfter);
}

// What keeping a page is worth, in 31 bits. Nobody has announced a use of it: whether the last two
// requests used it (apply() wants what gather() just had), then how often it was used, less where
// that was long ago, then dirty (its eviction costs a write), then how lately. Else: how soon it
// will be used.
std::uint64_t PageCache::worth(const Frame& frame) const {
  if ((frame.flags & kHinted) != 0) {
    return (~frame.coming.first()) >> 1;
  }
  const std::uint64_t age = std::min<std::uint32_t>(request_ - frame.used_at, 0xFFFF);
  const std::uint64_t in_step = age <= 1 ? 1 : 0;
  const std::uint64_t dirty = (frame.flags & kDirty) != 0 ? 1 : 0;
  return in_step << 29 | std::uint64_t{often_used(frame)} << 17 | dirty << 16 | (0xFFFF - age);
}

// Fills candidates_ with frames that may be evicted, from the hand on; returns how many there are.
std::size_t PageCache::find_candidates(bool hinted) {
  std::size_t count = 0;
  for (std::int64_t step = 0; step < present_ && count < candidates_.size(); ++step) {
    const std::uint32_t index = hand_;
    hand_ = hand_ + 1 == present_ ? 0 : hand_ + 1;
    const Frame& frame = frames_[index];
    if (frame.state == State::kReady && !pinned(frame) && (frame.flags & kWriting) == 0 &&
        ((frame.flags & kHinted) != 0) == hinted) {
      candidates_[count++] = worth(frame) << 32 | index;
    }
  }
  return count;
}

// Frees frames, and chooses some that must be cleaned first; returns how many are chosen. Only the
// owner takes hinted pages, when there are no others.
std::int64_t PageCache::sweep(Lane& lane) {
  std::size_t found = find_candidates(false);
  if (found == 0 && !lane.background) {
    found = find_candidates(true);
  }
  const auto candidates = candidates_.first(found);
  const auto wanted = std::min(
      found, static_cast<std::size_t>(std::clamp<std::int64_t>(present_ / 32, 1, kRefillMost)));
  std::nth_element(candidates.begin(), candidates.begin() + static_cast<std::ptrdiff_t>(wanted),
                   candidates.end());
  std::int64_t chosen = 0;
  for (const std::uint64_t candidate : candidates.first(wanted)) {
    const auto index = static_cast<std::uint32_t>(candidate);
    Frame& frame = frames_[index];
    if ((frame.flags & kDirty) == 0) {
      ++stats_.evictions_clean;
      drop(index);
    } else if (chosen < static_cast<std::int64_t>(lane.cleaning.size())) {
      unhint(frame);
      frame.flags |= kWriting;
      lane.cleaning[static_cast<std::size_t>(chosen++)] = index;
    }
  }
  return chosen;
}

// Makes frames free. For the owner at least one, waiting for the other lanes if it must; for the
// look-ahead none is an answer.
Result<void> PageCache::refill(Lane& lane) {
  const Stall stall(stats_.stall_ns, !lane.background);
  while (free_count_ == 0) {
    const std::int64_t chosen = sweep(lane);
    if (chosen > 0) {
      PLIMSOLL_TRY_VOID(write_frames(lane, chosen));
      for (std::int64_t i = 0; i < chosen; ++i) {
        const std::uint32_t index = lane.cleaning[static_cast<std::size_t>(i)];
        const Frame& frame = frames_[index];
        // While the lock was open the other lane may have come to need it.
        if (frame.state == State::kReady && !pinned(frame) &&
            (frame.flags & (kDirty | kWriting | kHinted)) == 0) {
          ++stats_.evictions_dirty;
          drop(index);
        }
      }
    } else if (free_count_ == 0) {
      if (lane.background) {
        return {};
      }
      PLIMSOLL_CHECK(look_ahead_busy_ || writers_ > 0, "a frame that is not in use");
      changed_.wait(mutex_);
    }
  }
  return {};
}

// Writes the frames of the lane's list, which are flagged kWriting, to new blocks.
Result<void> PageCache::write_frames(Lane& lane, std::int64_t count) {
  if (poison_) {
    for (std::int64_t i = 0; i < count; ++i) {
      frames_[lane.cleaning[static_cast<std::size_t>(i)]].flags &=
          static_cast<std::uint8_t>(~kWriting);
    }
    return tl::unexpected(*poison_);
  }
  begin_write(lane, count);
  mutex_.unlock();
  const auto began = std::chrono::steady_clock::now();
  auto result = table_.pool->run(copy_and_seal(lane, count));
  const std::chrono::duration<double> took = std::chrono::steady_clock::now() - began;
  mutex_.lock();
  if (count >= sizes_.write_batch / 2 && took.count() > 0) {
    const auto bytes = static_cast<double>(count * table_.shape.page_bytes);
    write_rate_ += (bytes / took.count() - write_rate_) * kRateWeight;
  }
  set_blocks(lane, count, result.has_value());
  let_go(lane, count, result);
  return result;
}

void PageCache::sort_by_page(std::span<std::uint32_t> indexes) const {
  const std::span<const Frame> frames = frames_;
  std::sort(indexes.begin(), indexes.end(),
            [frames](std::uint32_t a, std::uint32_t b) { return frames[a].page < frames[b].page; });
}

// Orders the frames by page, so that neighbours stay neighbours on disk, and gives them blocks.
void PageCache::begin_write(Lane& lane, std::int64_t count) {
  const auto frames = lane.cleaning.first(static_cast<std::size_t>(count));
  sort_by_page(frames);
  ++writers_;
  for (std::size_t i = 0; i < frames.size(); ++i) {
    Frame& frame = frames_[frames[i]];
    frame.flags &= static_cast<std::uint8_t>(~kDirty);
    frame.flags |= kCopying;
    --dirty_;
    lane.write_pages[i] = frame.page;
  }
  for (std::int64_t i = 0; i < count;) {
    const BlockMap::Run run = map_.allocate(count - i);
    for (std::int64_t k = 0; k < run.count; ++k, ++i) {
      lane.written[static_cast<std::size_t>(i)].block = run.first + static_cast<std::uint32_t>(k);
    }
    reserve(lane, run);
  }
}

// Even where there is nothing to do, a reservation makes the next sync wait for the file system's
// journal (ext4 does so); a small table's file is whole from the start, and its commits need none.
void PageCache::found_file(std::int64_t bytes) {
  const MutexLock lock(mutex_);
  reserved_ = bytes / table_.shape.page_bytes;
}

// Blocks are taken round the file. Those that nobody has written yet get a place on disk many at a
// time: a write that has to find its own holds up every other write and read of the file.
void PageCache::reserve(Lane& lane, const BlockMap::Run& run) {
  const std::int64_t end = std::int64_t{run.first} - 1 + run.count;
  if (end > reserved_) {
    if (lane.reserve_to == lane.reserve_from) {
      lane.reserve_from = reserved_;
    }
    const std::int64_t ahead = std::min(map_.blocks() / kReserveShare, end / kReserveUsed);
    reserved_ = std::min(end + ahead, map_.blocks());
    lane.reserve_to = reserved_;
  }
}

// Copies and seals the frames (nobody changes one that is flagged kCopying), lets go of them, and
// returns the requests that write the copies, neighbouring blocks together.
std::span<IoRequest> PageCache::copy_and_seal(Lane& lane, std::int64_t count) {
  const TableShape& shape = table_.shape;
  const auto page_bytes = static_cast<std::size_t>(shape.page_bytes);
  for (std::size_t i = 0; i < static_cast<std::size_t>(count); ++i) {
    const auto copy = lane.buffer.subspan(i * page_bytes, page_bytes);
    const auto page = frame_data(lane.cleaning[i]);
    std::copy(page.begin(), page.end(), copy.begin());
    lane.written[i].crc = seal_page(shape, table_.fingerprint, lane.write_pages[i], copy);
  }
  {
    const MutexLock lock(mutex_);
    for (std::size_t i = 0; i < static_cast<std::size_t>(count); ++i) {
      frames_[lane.cleaning[i]].flags &= static_cast<std::uint8_t>(~kCopying);
    }
    changed_.notify_all();
  }
  if (lane.reserve_to > lane.reserve_from) {
    table_.file->reserve(lane.reserve_from * shape.page_bytes, lane.reserve_to * shape.page_bytes);
    lane.reserve_from = lane.reserve_to;
  }
  std::size_t requests = 0;
  for (std::size_t i = 0; i < static_cast<std::size_t>(count);) {
    std::size_t next = i + 1;
    while (next < static_cast<std::size_t>(count) &&
           lane.written[next].block == lane.written[next - 1].block + 1 &&
           static_cast<std::int64_t>((next + 1 - i) * page_bytes) <= kWriteBytesMost) {
      ++next;
    }
    lane.requests[requests++] = {
        .file = table_.file,
        .offset = (lane.written[i].block - 1) * shape.page_bytes,
        .bytes = lane.buffer.subspan(i * page_bytes, (next - i) * page_bytes),
        .kind = IoKind::kWrite};
    i = next;
  }
  return lane.requests.first(requests);
}

// The blocks hold the pages now; or, the write having failed, are free.
void PageCache::set_blocks(const Lane& lane, std::int64_t count, bool ok) {
  for (std::size_t i = 0; i < static_cast<std::size_t>(count); ++i) {
    if (ok) {
      map_.set(lane.write_pages[i], lane.written[i].block, lane.written[i].crc);
    } else {
      map_.release(lane.written[i].block);
    }
  }
}

// What was being written can be evicted, or is dirty again.
void PageCache::let_go(Lane& lane, std::int64_t count, const Result<void>& result) {
  --writers_;
  for (const std::uint32_t index : lane.cleaning.first(static_cast<std::size_t>(count))) {
    frames_[index].flags &= static_cast<std::uint8_t>(~kWriting);
    if (!result) {
      mark_dirty(index);
    }
  }
  if (result) {
    stats_.pages_written += count;
    stats_.bytes_written += count * table_.shape.page_bytes;
  } else if (!poison_) {
    poison_ = result.error();
  }
  changed_.notify_all();
  room_.notify_all();
}

// ---- Dirty pages ------------------------------------------------------------------------------

std::int64_t PageCache::dirty_most() const {
  if (sizes_.dirty_most > 0) {
    return present_ == sizes_.frames ? sizes_.dirty_most
                                     : std::min(sizes_.dirty_most, present_ / 2);
  }
  if (resident()) {
    return sizes_.frames;
  }
  const auto bytes =
      static_cast<std::int64_t>(write_rate_ * commit_seconds(now_ns() - committed_ns_));
  return std::min(std::max(bytes, kDirtyBytesLeast) / table_.shape.page_bytes, present_ / 2);
}

// From half of the bound on, so that a request seldom waits; never when nothing bounds it.
bool PageCache::wants_write_back() const {
  return (sizes_.dirty_most > 0 || !resident()) && dirty_ > dirty_most() / 2;
}

// Waits until a request of `rows` rows may make its pages dirty.
void PageCache::await_dirty_room(std::int64_t rows) {
  const auto full = [&]() PLIMSOLL_REQUIRES(mutex_) {
    const std::int64_t most = dirty_most();
    return most < present_ && dirty_ > most - std::min(rows, most / 2);
  };
  if (!full()) {
    return;
  }
  const Stall stall(stats_.stall_ns);
  // The bound grows with time: the write-back, which looks a moment later, may see room enough.
  owner_waits_ = true;
  while (full() && !poison_ && !stopping_) {
    dirtied_.notify_one();
    changed_.wait(mutex_);
  }
  owner_waits_ = false;
}

// Appends to the list, moving it to the front when it has come to the end. A frame is in it at
// most once, so there is room.
void PageCache::list_dirty(std::uint32_t frame) {
  if (listed_ == static_cast<std::int64_t>(dirty_list_.size())) {
    std::copy(dirty_list_.begin() + list_head_, dirty_list_.end(), dirty_list_.begin());
    listed_ -= std::exchange(list_head_, 0);
  }
  dirty_list_[static_cast<std::size_t>(listed_++)] = frame;
}

// Of the frames that have been dirty for longest, but for those in use, the ones that are used
// least: what is used often would soon be dirty again, and have been written in vain. For a commit,
// all.
std::int64_t PageCache::choose_dirty(Lane& lane) {
  std::int64_t chosen = 0;
  for (std::int64_t unseen = listed_ - list_head_; unseen > 0 && chosen == 0;) {
    const std::int64_t count = committing_ ? unseen : std::min(unseen, kDirtyCompared);
    chosen = choose_among(lane, count);
    unseen -= count;
  }
  return chosen;
}

// Among the first `count` of the list. Those that are left go to its end.
std::int64_t PageCache::choose_among(Lane& lane, std::int64_t count) {
  const auto writable = [this](const Frame& frame) PLIMSOLL_REQUIRES(mutex_) {
    return (frame.flags & (kDirty | kWriting)) == kDirty && !pinned(frame);
  };
  const auto bits_of_use = [this](const Frame& frame) PLIMSOLL_REQUIRES(mutex_) {
    return static_cast<std::size_t>(std::bit_width(often_used(frame)));
  };
  const auto most = static_cast<std::int64_t>(lane.cleaning.size());
  std::array<std::int64_t, kUseBits + 1> wanted{};  // By bits of use.
  if (committing_) {
    wanted.fill(most);
  } else {
    for (std::int64_t i = 0; i < count; ++i) {
      const Frame& frame = frames_[dirty_list_[static_cast<std::size_t>(list_head_ + i)]];
      wanted[bits_of_use(frame)] += writable(frame) ? 1 : 0;
    }
    std::int64_t left = most;
    for (std::int64_t& of_these : wanted) {
      of_these = std::min(of_these, left);
      left -= of_these;
    }
  }
  std::int64_t chosen = 0;
  for (std::int64_t i = 0; i < count && chosen < most; ++i) {
    const std::uint32_t index = dirty_list_[static_cast<std::size_t>(list_head_++)];
    Frame& frame = frames_[index];
    if (writable(frame) && wanted[bits_of_use(frame)]-- > 0) {
      frame.flags &= static_cast<std::uint8_t>(~kListed);
      frame.flags |= kWriting;
      lane.cleaning[static_cast<std::size_t>(chosen++)] = index;
    } else if ((frame.flags & kDirty) != 0) {
      list_dirty(index);
    } else {
      frame.flags &= static_cast<std::uint8_t>(~kListed);
    }
  }
  return chosen;
}

// Changed pages in frames that are to be given back.
std::int64_t PageCache::choose_leaving(Lane& lane) {
  std::int64_t chosen = 0;
  const auto most = static_cast<std::int64_t>(lane.cleaning.size());
  for (std::int64_t index = sizes_.frames - 1; index >= present_ && chosen < most; --index) {
    Frame& frame = frames_[static_cast<std::size_t>(index)];
    if ((frame.flags & (kDirty | kWriting)) == kDirty && !pinned(frame)) {
      frame.flags |= kWriting;
      lane.cleaning[static_cast<std::size_t>(chosen++)] = static_cast<std::uint32_t>(index);
    }
  }
  return chosen;
}

bool PageCache::write_back() {
  {
    const MutexLock lock(mutex_);
    for (;;) {
      if (stopping_ || poison_) {
        return false;
      }
      if (leaving_ && !committing_) {
        if (const std::int64_t chosen = choose_leaving(write_back_); chosen > 0) {
          if (!write_frames(write_back_, chosen)) {
            return false;
          }
          break;
        }
      }
      if (committing_ || owner_waits_ || wants_write_back()) {
        if (const std::int64_t chosen = choose_dirty(write_back_); chosen > 0) {
          return write_frames(write_back_, chosen).has_value();
        }
      }
      dirtied_.wait(mutex_);
    }
  }
  const MutexLock resizing(resize_mutex_);
  give_regions();
  return true;
}

Result<std::span<IoRequest>> PageCache::begin_commit() {
  const MutexLock lock(mutex_);
  const Stall stall(stats_.stall_ns);
  // One batch is not worth waking the write-back thread for.
  committing_ = dirty_ > static_cast<std::int64_t>(owner_.cleaning.size());
  auto last = write_listed();
  committing_ = false;
  return last;
}

// All that is dirty but a last batch, together with the write-back thread, which takes its share
// while committing_.
Result<std::span<IoRequest>> PageCache::write_listed() {
  sort_by_page(dirty_list_.subspan(static_cast<std::size_t>(list_head_),
                                   static_cast<std::size_t>(listed_ - list_head_)));
  if (committing_) {
    dirtied_.notify_one();
  }
  std::size_t requests = 0;
  for (;;) {
    const std::int64_t chosen = choose_dirty(owner_);
    if (chosen > 0 && chosen == dirty_ && writers_ == 0 && !poison_) {
      requests = seal_last(chosen);
      break;
    }
    if (chosen > 0) {
      PLIMSOLL_TRY_VOID(write_frames(owner_, chosen));
    } else if (writers_ > 0) {
      changed_.wait(mutex_);
    } else {
      break;
    }
  }
  if (poison_) {
    return tl::unexpected(*poison_);
  }
  PLIMSOLL_CHECK(dirty_ == 0, "a page that is dirty and not to be written");
  return owner_.requests.first(requests + 1);
}

// Nothing else is dirty or being written, so from here on the page table is that of the commit.
std::size_t PageCache::seal_last(std::int64_t count) {
  begin_write(owner_, count);
  mutex_.unlock();
  const std::size_t requests = copy_and_seal(owner_, count).size();
  mutex_.lock();
  set_blocks(owner_, count, true);
  owner_.sealed = count;
  return requests;
}

void PageCache::end_commit(const Result<void>& written, std::int64_t took_ns) {
  const MutexLock lock(mutex_);
  stats_.stall_ns += took_ns;
  if (const std::int64_t count = std::exchange(owner_.sealed, 0); count > 0) {
    let_go(owner_, count, written);  // On an error the page table is wrong, and never used again.
  }
}

}  // namespace plimsoll
