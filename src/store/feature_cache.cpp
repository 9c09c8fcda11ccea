// SPDX-License-Identifier: Apache-2.0
//
// BlockCache: see feature_cache.h. The life of a frame:
//
//   kEmpty ─claim→ kLoading ─settle→ kReady ─evict→ kLoading (another block)
//                     └─ failed → kFailed (until its last waiter has seen it) → kEmpty
//   kEmpty, kReady ─shrink→ kLeaving → kAbsent ─grow_back→ kComing → kEmpty
//
// Threads, Memory: as the header says.
#include "store/feature_cache.h"

#include <algorithm>
#include <array>
#include <bit>
#include <utility>

#include <fmt/core.h>

#include "base/check.h"
#include "base/philox.h"
#include "os/clock.h"
#include "store/feature_table.h"

namespace plimsoll {
namespace {

constexpr std::uint32_t kNoFrame = UINT32_MAX;

std::int64_t table_slots(std::int64_t frames) noexcept {
  return static_cast<std::int64_t>(std::bit_ceil(static_cast<std::uint64_t>(frames) * 2));
}

// The share of frames for blocks that were read once, and of such blocks the share that is kept.
constexpr std::int64_t kFramesAPassing = 8;
constexpr std::int64_t kReadsAKept = 16;

enum class Standing : std::uint8_t {
  kKept,
  kPassing,   // Read once.
  kAnnounced  // Read, and not used yet.
};

enum class FrameState : std::uint8_t {
  kEmpty,
  kLoading,
  kReady,
  kFailed,
  kLeaving,
  kAbsent,
  kComing
};

}  // namespace

struct BlockCache::Frame {
  std::int64_t key{0};  // Meaningful while mapped: kLoading and kReady.
  std::uint32_t pins{0};
  FrameState state{FrameState::kEmpty};
  Standing standing{Standing::kKept};
  bool used{false};  // Since a hand of the clock last passed.
};

struct BlockCache::Batch {
  std::span<const std::int64_t> keys;
  std::span<const StoredBlock> stored;
  std::span<std::uint32_t> frames;
  std::span<bool> hits;
  bool ahead{false};
  std::array<std::uint16_t, kPinsMax> mine{};  // Positions this call loads.
  std::size_t mine_count{0};
  std::array<std::uint16_t, kPinsMax> joined{};  // Positions another call is loading.
  std::size_t joined_count{0};
  BlockReader::Counts counts{};  // Of what this call read.
};

std::int64_t BlockCache::memory_bytes(std::int64_t frames, std::int64_t block_bytes) noexcept {
  return frames * (block_bytes + static_cast<std::int64_t>(sizeof(Frame))) +
         table_slots(frames) * 4 + kFeaturePage + 2 * 64;
}

BlockCache::BlockCache(Slab& slab, BlockReader& reader, std::vector<BlockSource> sources,
                       std::int64_t frames, std::int64_t block_bytes)
    : slab_(slab), reader_(reader), sources_(std::move(sources)), block_bytes_(block_bytes) {
  PLIMSOLL_CHECK(frames >= kFramesMin && frames < kNoFrame, "number of frames out of range");
  blocks_ = slab.take<std::byte>(frames * block_bytes, kFeaturePage).data();
  frames_ = slab.take<Frame>(frames);
  table_ = slab.take<std::uint32_t>(table_slots(frames));
  std::fill(frames_.begin(), frames_.end(), Frame{});
  pins_free_ = frames;
  stats_.frames = frames;
}

std::int64_t BlockCache::reserve(std::int64_t wanted) {
  MutexLock lock(mutex_);
  // A quarter at most, so that a few readers can work side by side in a small slab.
  const auto frames = static_cast<std::int64_t>(frames_.size()) - absent_;
  wanted = std::min({wanted, kPinsMax, std::max<std::int64_t>(1, frames / 4)});
  while (pins_free_ == 0) {
    pins_freed_.wait(mutex_);
  }
  const std::int64_t got = std::min(wanted, pins_free_);
  pins_free_ -= got;
  return got;
}

void BlockCache::release(std::int64_t reserved) noexcept {
  {
    MutexLock lock(mutex_);
    pins_free_ += reserved;
  }
  pins_freed_.notify_all();
}

Result<void> BlockCache::pin(std::span<const std::int64_t> keys,
                             std::span<const StoredBlock> stored, std::span<std::uint32_t> frames,
                             std::span<bool> hits, bool ahead) {
  PLIMSOLL_CHECK(static_cast<std::int64_t>(keys.size()) <= kPinsMax, "more than was reserved");
  Batch batch{.keys = keys, .stored = stored, .frames = frames, .hits = hits, .ahead = ahead};
  {
    MutexLock lock(mutex_);
    for (std::size_t i = 0; i < keys.size(); ++i) {
      claim(batch, i);
    }
    stats_.joined += static_cast<std::int64_t>(batch.joined_count);
  }
  if (batch.mine_count == 0 && batch.joined_count == 0) {
    return {};
  }
  const std::int64_t began = now_ns();
  Result<void> result;
  if (batch.mine_count > 0) {
    result = load(batch);
    settle(batch, result.has_value());
  }
  if (result) {
    result = wait_for_joined(batch);
  }
  {
    MutexLock lock(mutex_);
    stats_.stall_ns += now_ns() - began;
  }
  if (!result) {
    unpin(frames.first(keys.size()));
  }
  return result;
}

void BlockCache::unpin(std::span<const std::uint32_t> frames) noexcept {
  MutexLock lock(mutex_);
  for (const std::uint32_t frame : frames) {
    if (frame != kNoFrame) {
      drop_pin(frame);
    }
  }
}

void BlockCache::take_pin(Frame& frame) {
  passing_ -= frame.pins++ == 0 && frame.standing == Standing::kPassing ? 1 : 0;
}

void BlockCache::drop_pin(std::uint32_t frame) {
  Frame& held = frames_[frame];
  if (--held.pins > 0) {
    return;
  }
  passing_ += held.standing == Standing::kPassing ? 1 : 0;
  if (held.state == FrameState::kFailed) {
    held.state = FrameState::kEmpty;
  }
}

// ---- claiming ----

void BlockCache::claim(Batch& batch, std::size_t i) {
  const std::int64_t key = batch.keys[i];
  const std::uint32_t found = find(key);
  if (found != kNoFrame) {
    Frame& frame = frames_[found];
    take_pin(frame);
    if (frame.standing == Standing::kAnnounced && !batch.ahead) {
      pass(frame);
    } else {
      frame.used = true;
    }
    batch.frames[i] = found;
    batch.hits[i] = frame.state == FrameState::kReady;
    if (!batch.hits[i]) {
      batch.joined[batch.joined_count++] = static_cast<std::uint16_t>(i);
    }
    return;
  }
  const std::uint32_t taken = take_victim();
  Frame& frame = frames_[taken];
  frame.key = key;
  frame.pins = 1;
  frame.used = batch.ahead;
  if (batch.ahead) {
    frame.standing = Standing::kAnnounced;
  } else if (frame.state == FrameState::kReady) {
    pass(frame);
  }
  frame.state = FrameState::kLoading;
  map(key, taken);
  batch.frames[i] = taken;
  batch.hits[i] = false;
  batch.mine[batch.mine_count++] = static_cast<std::uint16_t>(i);
}

// A block that is used for the first time makes way before those that were asked for again, but for
// one of many. Requires: it is pinned.
void BlockCache::pass(Frame& frame) {
  frame.standing = ++passed_ % kReadsAKept == 0 ? Standing::kKept : Standing::kPassing;
  frame.used = false;
}

// A frame that is kEmpty, or kReady and its block forgotten.
std::uint32_t BlockCache::take_victim() {
  const auto count = static_cast<std::int64_t>(frames_.size());
  // Two rounds clear every mark; then whatever is not pinned will do.
  for (std::int64_t tries = 0; tries < 4 * count; ++tries) {
    const bool passing = passing_ > count / kFramesAPassing;
    std::int64_t& hand = passing ? passing_hand_ : hand_;
    const auto at = static_cast<std::uint32_t>(hand);
    hand = hand + 1 == count ? 0 : hand + 1;
    Frame& frame = frames_[at];
    if (frame.pins > 0) {
      continue;
    }
    if (frame.state == FrameState::kEmpty) {
      return at;
    }
    const bool fits = (frame.standing == Standing::kPassing) == passing || tries >= 2 * count;
    if (frame.state != FrameState::kReady || !fits) {
      continue;
    }
    const bool used = std::exchange(frame.used, false);
    if (used && frame.standing == Standing::kAnnounced) {
      continue;
    }
    keep(frame);
    if (used) {
      continue;
    }
    unmap(frame.key);
    --stats_.resident_frames;
    return at;
  }
  PLIMSOLL_CHECK(false, "more pins than frames");  // Reservations never pass what is present.
  return kNoFrame;
}

// No longer one of those that pass, or are announced.
void BlockCache::keep(Frame& frame) {
  passing_ -= frame.pins == 0 && frame.standing == Standing::kPassing ? 1 : 0;
  frame.standing = Standing::kKept;
}

// ---- loading ----

Result<void> BlockCache::load(Batch& batch) {
  std::array<BlockReader::Wanted, kPinsMax> blocks;
  for (std::size_t m = 0; m < batch.mine_count; ++m) {
    blocks[m] = wanted(batch, batch.mine[m]);
  }
  const auto mine = std::span(blocks).first(batch.mine_count);
  const bool self_checked = batch.stored.empty();
  PLIMSOLL_TRY(batch.counts, reader_.read(mine, !self_checked));
  for (const BlockReader::Wanted& block : mine) {
    if (self_checked) {
      PLIMSOLL_TRY_VOID(
          check_table_pages(block.out, block.stored.offset / kFeaturePage, block.file->path()));
    }
  }
  return {};
}

// What has to be read for position i of a batch, and into which frame.
BlockReader::Wanted BlockCache::wanted(const Batch& batch, std::size_t i) const {
  std::byte* frame = blocks_ + batch.frames[i] * block_bytes_;
  const BlockSource& source = sources_[source_of(batch.keys[i])];
  const std::int64_t number = block_of(batch.keys[i]);
  if (!batch.stored.empty()) {
    return {.file = source.file,
            .stored = batch.stored[i],
            .number = number,
            .out = {frame, static_cast<std::size_t>(block_bytes_)}};
  }
  const std::int64_t offset = number * block_bytes_;
  const std::int64_t size = std::min(block_bytes_, source.bytes - offset);
  return {.file = source.file,
          .stored = {.offset = offset, .bytes = size},
          .number = number,
          .out = {frame, static_cast<std::size_t>(size)}};
}

void BlockCache::settle(Batch& batch, bool loaded) {
  {
    MutexLock lock(mutex_);
    stats_.reads += batch.counts.reads;
    stats_.bytes_read += batch.counts.bytes;
    for (std::size_t m = 0; m < batch.mine_count; ++m) {
      const std::size_t i = batch.mine[m];
      Frame& frame = frames_[batch.frames[i]];
      if (loaded) {
        frame.state = FrameState::kReady;
        ++stats_.resident_frames;
        ++stats_.blocks_read;
      } else {
        // The whole batch failed together; a waiter for one of its good blocks reads that again.
        keep(frame);
        unmap(frame.key);
        frame.state = FrameState::kFailed;
      }
    }
  }
  loads_ended_.notify_all();
}

Result<void> BlockCache::wait_for_joined(Batch& batch) {
  for (std::size_t j = 0; j < batch.joined_count; ++j) {
    const std::size_t i = batch.joined[j];
    {
      MutexLock lock(mutex_);
      const std::uint32_t frame = batch.frames[i];
      while (frames_[frame].state == FrameState::kLoading) {
        loads_ended_.wait(mutex_);
      }
      if (frames_[frame].state == FrameState::kReady) {
        continue;
      }
    }
    // The other reader failed. Read it ourselves: our answer must be about our own request.
    std::array<std::uint32_t, 1> again{};
    std::array<bool, 1> hit{};
    unpin(batch.frames.subspan(i, 1));
    auto retried =
        pin(batch.keys.subspan(i, 1),
            batch.stored.empty() ? batch.stored : batch.stored.subspan(i, 1), again, hit);
    if (retried) {
      batch.frames[i] = again[0];
      continue;
    }
    // Keep the caller's promise that every frame in `frames` is pinned once: drop this one.
    for (std::size_t rest = j; rest < batch.joined_count; ++rest) {
      if (rest > j) {
        unpin(batch.frames.subspan(batch.joined[rest], 1));
      }
      batch.frames[batch.joined[rest]] = kNoFrame;
    }
    return retried;
  }
  return {};
}

// ---- giving back, growing back ----

// Takes a frame out of use, its pin with it. From frame `at` on; kNoFrame: none can go.
std::uint32_t BlockCache::take_leaver(std::int64_t& at) {
  const auto count = static_cast<std::int64_t>(frames_.size());
  for (; count - absent_ > kFramesMin && pins_free_ > 0 && at < count; ++at) {
    Frame& frame = frames_[static_cast<std::size_t>(at)];
    const bool ready = frame.state == FrameState::kReady;
    if (frame.pins > 0 || (!ready && frame.state != FrameState::kEmpty)) {
      continue;
    }
    if (ready) {
      keep(frame);
      unmap(frame.key);
      --stats_.resident_frames;
    }
    frame.state = FrameState::kLeaving;
    ++absent_;
    --pins_free_;
    return static_cast<std::uint32_t>(at);
  }
  return kNoFrame;
}

std::int64_t BlockCache::shrink(std::int64_t wanted_bytes) noexcept {
  std::int64_t given = 0;
  std::int64_t at = 0;
  while (given < wanted_bytes) {
    std::uint32_t frame = kNoFrame;
    {
      MutexLock lock(mutex_);
      frame = take_leaver(at);
    }
    if (frame == kNoFrame) {
      break;
    }
    {
      MutexLock lease_lock(lease_mutex_);
      given += slab_.release_pages(blocks_ - slab_.data() + frame * block_bytes_, block_bytes_);
    }
    MutexLock lock(mutex_);
    frames_[frame].state = FrameState::kAbsent;
  }
  return given;
}

std::int64_t BlockCache::grow_back(std::int64_t wanted_bytes) noexcept {
  wanted_bytes = std::min(wanted_bytes, slab_.room_bytes());
  std::int64_t taken = 0;
  std::size_t at = 0;
  bool refused = false;
  while (!refused && wanted_bytes - taken >= block_bytes_) {
    {
      MutexLock lock(mutex_);
      while (at < frames_.size() && frames_[at].state != FrameState::kAbsent) {
        ++at;
      }
      if (at == frames_.size()) {
        break;
      }
      frames_[at].state = FrameState::kComing;
    }
    {
      MutexLock lease_lock(lease_mutex_);
      const auto offset = blocks_ - slab_.data() + static_cast<std::int64_t>(at) * block_bytes_;
      refused = !slab_.reacquire_pages(offset, block_bytes_).has_value();
    }
    {
      MutexLock lock(mutex_);
      frames_[at].state = refused ? FrameState::kAbsent : FrameState::kEmpty;
      absent_ -= refused ? 0 : 1;
      pins_free_ += refused ? 0 : 1;
    }
    taken += refused ? 0 : block_bytes_;
    pins_freed_.notify_all();
  }
  return taken;
}

BlockCacheStats BlockCache::stats() const {
  MutexLock lock(mutex_);
  return stats_;
}

// ---- the map from blocks to frames: open addressing, linear probing, no tombstones ----

std::size_t BlockCache::home(std::int64_t key) const noexcept {
  return static_cast<std::size_t>(mix64(static_cast<std::uint64_t>(key))) & (table_.size() - 1);
}

std::uint32_t BlockCache::find(std::int64_t key) const {
  for (std::size_t at = home(key);; at = (at + 1) & (table_.size() - 1)) {
    if (table_[at] == 0) {
      return kNoFrame;
    }
    if (frames_[table_[at] - 1].key == key) {
      return table_[at] - 1;
    }
  }
}

void BlockCache::map(std::int64_t key, std::uint32_t frame) {
  std::size_t at = home(key);
  while (table_[at] != 0) {
    at = (at + 1) & (table_.size() - 1);
  }
  table_[at] = frame + 1;
}

void BlockCache::unmap(std::int64_t key) {
  const std::size_t mask = table_.size() - 1;
  std::size_t hole = home(key);
  while (frames_[table_[hole] - 1].key != key) {
    hole = (hole + 1) & mask;
  }
  // Move later entries of the run back over the hole, as far as their home allows.
  for (std::size_t at = (hole + 1) & mask; table_[at] != 0; at = (at + 1) & mask) {
    const std::size_t wanted = home(frames_[table_[at] - 1].key);
    if (((at - wanted) & mask) >= ((at - hole) & mask)) {
      table_[hole] = table_[at];
      hole = at;
    }
  }
  table_[hole] = 0;
}

}  // namespace plimsoll
