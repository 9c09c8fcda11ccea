// SPDX-License-Identifier: Apache-2.0
//
// The page cache's eviction and writes.
//
// Threads: see embedding_page_cache.h.   Memory: see embedding_page_cache.h.
#include <algorithm>
#include <utility>

#include "base/check.h"
#include "store/embedding_page_cache.h"

namespace plimsoll {
namespace {

// Long enough that a disk need not seek, short enough that several are under way at once.
constexpr std::int64_t kWriteBytesMost = 1 << 20;
constexpr std::int64_t kRefillMost = 64;

}  // namespace

bool PageCache::pinned(const Frame& frame) const {
  return pin_ != 0 && frame.pin == pin_;
}

// Takes a clean page out of its frame.
void PageCache::evict(std::uint32_t frame) {
  drop(frame);
}

// Empties a frame, whatever it was meant to hold.
void PageCache::drop(std::uint32_t index) {
  Frame& frame = frames_[index];
  PLIMSOLL_DCHECK((frame.flags & (kDirty | kWriting)) == 0, "nothing may be lost");
  unhint(frame);
  frame_of_[frame.page] = kNone;
  frame.page = kNone;
  frame.pin = 0;
  frame.state = State::kEmpty;
  frame.flags &= kListed;
  free_[static_cast<std::size_t>(free_count_++)] = index;
}

// Moves the hand until enough frames are free or chosen for cleaning; returns how many are chosen.
// Two rounds clear and then respect the reference bits; in a third the owner takes hinted pages.
std::int64_t PageCache::sweep(Lane& lane) {
  const std::int64_t wanted = std::clamp<std::int64_t>(sizes_.frames / 32, 1, kRefillMost);
  const std::int64_t patience = (lane.background ? 2 : 4) * sizes_.frames;
  std::int64_t chosen = 0;
  for (std::int64_t step = 0; step < patience && free_count_ + chosen < wanted; ++step) {
    const std::uint32_t index = hand_;
    hand_ = hand_ + 1 == frames_.size() ? 0 : hand_ + 1;
    Frame& frame = frames_[index];
    if (frame.state != State::kReady || pinned(frame) || (frame.flags & kWriting) != 0) {
      continue;
    }
    if ((frame.flags & kHinted) != 0) {
      if (step < 2 * sizes_.frames || free_count_ + chosen > 0) {
        continue;
      }
      unhint(frame);
    }
    if ((frame.flags & kReferenced) != 0) {
      frame.flags &= static_cast<std::uint8_t>(~kReferenced);
    } else if ((frame.flags & kDirty) == 0) {
      ++stats_.evictions_clean;
      evict(index);
    } else if (chosen < static_cast<std::int64_t>(lane.cleaning.size())) {
      frame.flags |= kWriting;
      lane.cleaning[static_cast<std::size_t>(chosen++)] = index;
    }
  }
  return chosen;
}

// Makes frames free. For the owner at least one, waiting for the look-ahead if it must; for the
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
          evict(index);
        }
      }
    } else if (free_count_ == 0) {
      if (lane.background) {
        return {};
      }
      PLIMSOLL_CHECK(look_ahead_busy_, "a frame that is neither pinned nor in use");
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
  auto result = copy_and_write(lane, count);
  mutex_.lock();
  end_write(lane, count, result);
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
  }
}

// Copies and seals the frames (nobody changes one that is flagged kCopying), lets go of them, and
// writes the copies, neighbouring blocks together.
Result<void> PageCache::copy_and_write(Lane& lane, std::int64_t count) {
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
        .write = true};
    i = next;
  }
  return table_.pool->run(lane.requests.first(requests));
}

void PageCache::end_write(Lane& lane, std::int64_t count, const Result<void>& result) {
  --writers_;
  for (std::size_t i = 0; i < static_cast<std::size_t>(count); ++i) {
    const std::uint32_t index = lane.cleaning[i];
    frames_[index].flags &= static_cast<std::uint8_t>(~kWriting);
    if (result) {
      map_.set(lane.write_pages[i], lane.written[i].block, lane.written[i].crc);
    } else {
      map_.release(lane.written[i].block);
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

Result<void> PageCache::write_dirty() {
  const MutexLock lock(mutex_);
  const Stall stall(stats_.stall_ns);
  const auto listed = dirty_list_.first(static_cast<std::size_t>(listed_));
  sort_by_page(listed);
  std::int64_t chosen = 0;
  for (const std::uint32_t index : listed) {
    Frame& frame = frames_[index];
    while ((frame.flags & kWriting) != 0) {
      changed_.wait(mutex_);
    }
    if ((frame.flags & kDirty) == 0) {
      continue;
    }
    frame.flags |= kWriting;
    owner_.cleaning[static_cast<std::size_t>(chosen++)] = index;
    if (chosen == static_cast<std::int64_t>(owner_.cleaning.size())) {
      PLIMSOLL_TRY_VOID(write_frames(owner_, chosen));
      chosen = 0;
    }
  }
  if (chosen > 0) {
    PLIMSOLL_TRY_VOID(write_frames(owner_, chosen));
  }
  while (writers_ > 0) {
    changed_.wait(mutex_);
  }
  if (poison_) {
    return tl::unexpected(*poison_);
  }
  for (const std::uint32_t index : listed) {
    frames_[index].flags &= static_cast<std::uint8_t>(~kListed);
  }
  listed_ = 0;
  return {};
}

}  // namespace plimsoll
