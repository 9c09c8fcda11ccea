// SPDX-License-Identifier: Apache-2.0
//
// Frames that are given back while the table is open, and come again.
//
// A cache of `present_` frames works as one that was opened with as many: the boundary is moved
// first, and from then on the frames behind it take in nothing. They are emptied without a
// transfer: a clean page is dropped, a changed one (or one that was announced) takes the place of a
// clean one in front, or is written by the write-back thread. Frames of a region are given back
// together once all of them are empty, and regions are whole huge pages, so that none of the
// kernel's comes back with a page nobody leased. What is being read, written or pinned just now
// stays where it is; the owner's next request tries it again, and so does the write-back thread
// when it has written some.
//
// Threads: any.   Memory: gives the slab's.
#include <algorithm>
#include <chrono>
#include <cstring>
#include <utility>

#include "base/round.h"
#include "store/embedding_page_cache.h"

namespace plimsoll {
namespace {

constexpr std::chrono::milliseconds kFlushMost{2000};
constexpr std::chrono::milliseconds kFlushLooks{10};

}  // namespace

// Frames that lie whole in front of region `regions`.
std::int64_t PageCache::frames_in(std::int64_t regions) const noexcept {
  return regions >= regions_ ? sizes_.frames
                             : (head_bytes_ + regions * kRegionBytes) / table_.shape.page_bytes;
}

// As few as leave frames enough to work with, and as many again as are pinned.
std::int64_t PageCache::regions_least() const {
  std::int64_t frames = sizes_.frames_least;
  if (pin_ != 0) {
    const auto pins = std::count_if(frames_.begin(), frames_.end(),
                                    [pin = pin_](const Frame& frame) { return frame.pin == pin; });
    frames = std::max(frames, 2 * static_cast<std::int64_t>(pins));
  }
  const std::int64_t bytes = frames * table_.shape.page_bytes - head_bytes_;
  return bytes <= 0 ? 0 : std::min(divide_up(bytes, kRegionBytes), regions_);
}

// In the slab.
std::int64_t PageCache::region_offset(std::int64_t region) const noexcept {
  return (data_.data() - slab_.data()) + head_bytes_ + region * kRegionBytes;
}

void PageCache::set_present(std::int64_t frames) {
  const std::int64_t before = std::exchange(present_, frames);
  hand_ = 0;
  if (frames < before) {
    const auto end = std::remove_if(free_.begin(), free_.begin() + free_count_,
                                    [frames](std::uint32_t index) { return index >= frames; });
    free_count_ = end - free_.begin();
    leaving_ = true;
  }
  for (std::int64_t index = before; index < frames; ++index) {
    if (frames_[static_cast<std::size_t>(index)].state == State::kEmpty) {
      free_[static_cast<std::size_t>(free_count_++)] = static_cast<std::uint32_t>(index);
    }
  }
  changed_.notify_all();
  room_.notify_all();
}

std::int64_t PageCache::shrink(std::int64_t wanted_bytes) noexcept {
  const MutexLock resizing(resize_mutex_);
  {
    const MutexLock lock(mutex_);
    const std::int64_t wanted = std::min(wanted_bytes, regions_ * kRegionBytes);
    const std::int64_t most = regions_held_ - regions_least();
    if (wanted <= 0 || most <= 0) {
      return 0;
    }
    stats_.shrinks += regions_held_ == regions_ ? 1 : 0;
    regions_held_ -= std::min(divide_up(wanted, kRegionBytes), most);
    set_present(frames_in(regions_held_));
  }
  return give_regions();
}

// Gives back those regions behind the frames present that are empty, or can be made so.
std::int64_t PageCache::give_regions() {
  const auto page_bytes = table_.shape.page_bytes;
  std::int64_t given = 0;
  std::uint32_t spare = 0;
  bool left = false;
  for (std::int64_t region = regions_ - 1; region >= regions_held_; --region) {
    bool empty = true;
    {
      const MutexLock lock(mutex_);
      const std::int64_t begin = head_bytes_ + region * kRegionBytes;
      const std::int64_t end = region + 1 == regions_
                                   ? sizes_.frames  // What is behind the last region goes with it.
                                   : divide_up(begin + kRegionBytes, page_bytes);
      for (std::int64_t index = begin / page_bytes; index < end; ++index) {
        empty = vacate(static_cast<std::uint32_t>(index), spare) && empty;
      }
    }
    left = left || !empty;
    if (empty) {
      given += slab_.release_pages(region_offset(region), kRegionBytes);
    }
  }
  const MutexLock lock(mutex_);
  leaving_ = left;
  dirtied_.notify_all();  // Only now: what is being written cannot leave.
  changed_.notify_all();
  return given;
}

// Makes a frame empty; false: it is in use. Requires: it is behind those present.
bool PageCache::vacate(std::uint32_t index, std::uint32_t& spare) {
  const Frame& frame = frames_[index];
  if (frame.state == State::kEmpty) {
    return true;
  }
  if (frame.state == State::kReading || pinned(frame) ||
      (frame.flags & (kWriting | kCopying)) != 0) {
    return false;
  }
  if ((frame.flags & (kDirty | kHinted)) != 0 && move_page(index, spare)) {
    return true;
  }
  if ((frame.flags & kDirty) != 0) {
    return false;
  }
  ++stats_.evictions_clean;
  drop(index);
  return true;
}

// Moves a page to a free frame, or to that of a clean page that nobody has announced; there is none
// from frame `spare` on: false.
bool PageCache::move_page(std::uint32_t from, std::uint32_t& spare) {
  for (; free_count_ == 0 && spare < present_; ++spare) {
    const Frame& frame = frames_[spare];
    if (frame.state == State::kReady && !pinned(frame) &&
        (frame.flags & (kDirty | kHinted | kWriting | kCopying)) == 0) {
      ++stats_.evictions_clean;
      drop(spare);
    }
  }
  if (free_count_ == 0) {
    return false;
  }
  const std::uint32_t to = free_[static_cast<std::size_t>(--free_count_)];
  std::memcpy(frame_data(to).data(), frame_data(from).data(), frame_data(from).size());
  Frame& old = frames_[from];
  Frame& moved = frames_[to];
  const auto listed = static_cast<std::uint8_t>(moved.flags & kListed);
  const auto old_listed = static_cast<std::uint8_t>(old.flags & kListed);
  moved = old;
  moved.flags = static_cast<std::uint8_t>((old.flags & ~kListed) | listed);
  frame_of_[moved.page] = to;
  old = Frame{};
  old.flags = old_listed;  // Its place in the list is passed over there.
  if ((moved.flags & kDirty) != 0 && listed == 0) {
    moved.flags |= kListed;
    list_dirty(to);
  }
  return true;
}

std::int64_t PageCache::flush() noexcept {
  const std::int64_t before = given_bytes();
  const auto deadline = std::chrono::steady_clock::now() + kFlushMost;
  for (;;) {
    {
      const MutexLock resizing(resize_mutex_);
      give_regions();  // What the owner has written, too.
      if (const std::int64_t given = slab_.bytes() - slab_.leased_bytes(); given > before) {
        return given - before;
      }
    }
    const auto now = std::chrono::steady_clock::now();
    const MutexLock lock(mutex_);
    if (!leaving_ || stopping_ || poison_ || now >= deadline) {
      return 0;
    }
    static_cast<void>(changed_.wait_until(mutex_, std::min(deadline, now + kFlushLooks)));
  }
}

std::int64_t PageCache::grow_back(std::int64_t wanted_bytes) noexcept {
  const MutexLock resizing(resize_mutex_);
  const std::int64_t most =
      std::min(std::max<std::int64_t>(wanted_bytes, 0) / kRegionBytes, regions_ - regions_held_);
  std::int64_t more = 0;  // Until one is refused: the table stays as small as it must.
  while (more < most &&
         slab_.reacquire_pages(region_offset(regions_held_ + more), kRegionBytes).has_value()) {
    ++more;
  }
  if (more == 0) {
    return 0;
  }
  regions_held_ += more;
  const MutexLock lock(mutex_);
  set_present(frames_in(regions_held_));
  return more * kRegionBytes;
}

std::int64_t PageCache::given_bytes() const {
  const MutexLock resizing(resize_mutex_);
  return slab_.bytes() - slab_.leased_bytes();
}

}  // namespace plimsoll
