// SPDX-License-Identifier: Apache-2.0
//
// BlockCache: a fixed number of frames for blocks of a feature store's files.
//
// Readers first reserve pins, then pin the blocks they want (which reads those that are missing,
// all at once), copy, and unpin. Reservations never add up to more than there are frames, so a
// reader that has one always finds a frame to evict, however small the slab. A block that another
// reader is loading is waited for, not read twice.
//
// Which block makes way: an epoch in a new order reads each once, and by the next few of the last
// ones read are asked for in time. So what was read once passes through an eighth of the frames,
// one in sixteen excepted; what fills a free frame, or was asked for again, is kept, and what was
// announced stays until it is used. Among either CLOCK chooses. Measured in docs/decisions/0051.
// Source: bimodal insertion; Qureshi et al., "Adaptive Insertion Policies for High Performance
// Caching", ISCA 2007, section 4.2.
//
// shrink() gives frames back together with their pins, so that what is left works as a cache made
// that small; grow_back() brings them again, and does with fewer where memory is refused.
//
// Reading order: this file, feature_cache.cpp, feature_store.cpp.
//
// Threads: thread-safe. One mutex over the frames' states; it is held across no I/O, no copy and
//          no call to the governor. A second one makes changes of the slab's lease take turns.
// Memory:  memory_bytes(), taken from the slab at creation, and 24 bytes a source. Nothing is
//          allocated afterwards.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "base/mutex.h"
#include "memory/slab.h"
#include "os/file.h"
#include "plimsoll/result.h"
#include "store/feature_block_reader.h"

namespace plimsoll {

/// A file of which blocks are cached: records, or pages of feature_table.h, which check themselves.
/// Of these block b is bytes [b × block_bytes, …), short at the end.
struct BlockSource {
  File* file{nullptr};  // Null: the store has no such file.
  std::int64_t bytes{0};
};

/// What the cache counts since it was made.
struct BlockCacheStats {
  std::int64_t blocks_read{0};
  std::int64_t reads{0};
  std::int64_t bytes_read{0};
  std::int64_t joined{0};
  std::int64_t stall_ns{0};
  std::int64_t frames{0};
  std::int64_t resident_frames{0};  // Holding a block.
};

class BlockCache {
 public:
  static constexpr std::int64_t kFramesMin = 8;
  static constexpr std::int64_t kPinsMax =
      static_cast<std::int64_t>(BlockReader::kBlocksMax);  // Of one reservation.

  struct Frame;

  /// Bytes taken from the slab, alignment slack included.
  static std::int64_t memory_bytes(std::int64_t frames, std::int64_t block_bytes) noexcept;

  /// What stands for block `block` of source `source`.
  [[nodiscard]] static constexpr std::int64_t key_of(std::size_t source,
                                                     std::int64_t block) noexcept {
    return (static_cast<std::int64_t>(source) << kSourceShift) | block;
  }
  [[nodiscard]] static constexpr std::size_t source_of(std::int64_t key) noexcept {
    return static_cast<std::size_t>(key >> kSourceShift);
  }
  [[nodiscard]] static constexpr std::int64_t block_of(std::int64_t key) noexcept {
    return key & ((std::int64_t{1} << kSourceShift) - 1);
  }

  /// Requires: slab and reader outlive the cache; frames >= kFramesMin.
  BlockCache(Slab& slab, BlockReader& reader, std::vector<BlockSource> sources, std::int64_t frames,
             std::int64_t block_bytes);
  BlockCache(const BlockCache&) = delete;
  BlockCache& operator=(const BlockCache&) = delete;

  /// Waits until at least one pin is free and takes up to `wanted` of them; returns how many.
  [[nodiscard]] std::int64_t reserve(std::int64_t wanted);
  void release(std::int64_t reserved) noexcept;

  /// Makes blocks resident and keeps them so until unpin(). frames[i] holds the block keys[i];
  /// hits[i] tells whether it was there. On an error nothing stays pinned.
  ///
  /// `ahead`: nobody has asked for them yet, so they are spared once before they make way.
  ///
  /// Requires: keys ascending and distinct, no more of them than the caller has reserved; `stored`
  ///           of the same length, or none for pages that check themselves.
  /// Errors:   kCorrupt naming the file and the block; kIo.
  Result<void> pin(std::span<const std::int64_t> keys, std::span<const StoredBlock> stored,
                   std::span<std::uint32_t> frames, std::span<bool> hits, bool ahead = false);
  void unpin(std::span<const std::uint32_t> frames) noexcept;

  [[nodiscard]] const std::byte* bytes(std::uint32_t frame) const noexcept {
    return blocks_ + static_cast<std::int64_t>(frame) * block_bytes_;
  }
  [[nodiscard]] std::int64_t block_bytes() const noexcept { return block_bytes_; }

  /// Drops unpinned blocks and gives their pages back until `wanted_bytes` are returned or only
  /// kFramesMin frames, or as many as are reserved, are left.
  std::int64_t shrink(std::int64_t wanted_bytes) noexcept;

  /// Takes again up to `wanted_bytes` of what shrink() gave back; stays small where refused.
  std::int64_t grow_back(std::int64_t wanted_bytes) noexcept;

  [[nodiscard]] BlockCacheStats stats() const;

 private:
  static constexpr int kSourceShift = 48;
  struct Batch;  // One call of pin().

  void claim(Batch& batch, std::size_t i) PLIMSOLL_REQUIRES(mutex_);
  void take_pin(Frame& frame) PLIMSOLL_REQUIRES(mutex_);
  void pass(Frame& frame) PLIMSOLL_REQUIRES(mutex_);
  void keep(Frame& frame) PLIMSOLL_REQUIRES(mutex_);
  [[nodiscard]] std::uint32_t take_victim() PLIMSOLL_REQUIRES(mutex_);
  [[nodiscard]] std::uint32_t take_leaver(std::int64_t& at) PLIMSOLL_REQUIRES(mutex_);
  Result<void> load(Batch& batch);
  [[nodiscard]] BlockReader::Wanted wanted(const Batch& batch, std::size_t i) const;
  void settle(Batch& batch, bool loaded);
  Result<void> wait_for_joined(Batch& batch);
  void drop_pin(std::uint32_t frame) PLIMSOLL_REQUIRES(mutex_);

  [[nodiscard]] std::uint32_t find(std::int64_t key) const PLIMSOLL_REQUIRES(mutex_);
  void map(std::int64_t key, std::uint32_t frame) PLIMSOLL_REQUIRES(mutex_);
  void unmap(std::int64_t key) PLIMSOLL_REQUIRES(mutex_);
  [[nodiscard]] std::size_t home(std::int64_t key) const noexcept PLIMSOLL_REQUIRES(mutex_);

  Slab& slab_;
  BlockReader& reader_;
  std::vector<BlockSource> sources_;
  std::int64_t block_bytes_{0};
  std::byte* blocks_{nullptr};  // Frame f: block_bytes_ at f × block_bytes_.

  Mutex lease_mutex_;  // Release and reacquisition of the slab's pages; taken with no other held.
  mutable Mutex mutex_;
  CondVar pins_freed_;
  CondVar loads_ended_;
  std::span<Frame> frames_ PLIMSOLL_GUARDED_BY(mutex_);
  std::span<std::uint32_t> table_ PLIMSOLL_GUARDED_BY(mutex_);  // Frame + 1 by key; 0 is empty.
  std::int64_t pins_free_ PLIMSOLL_GUARDED_BY(mutex_){0};       // Of frames that are not absent.
  std::int64_t absent_ PLIMSOLL_GUARDED_BY(mutex_){0};        // Frames whose pages were given back.
  std::int64_t hand_ PLIMSOLL_GUARDED_BY(mutex_){0};          // Of the clock of what is kept,
  std::int64_t passing_hand_ PLIMSOLL_GUARDED_BY(mutex_){0};  // and of what passes.
  std::int64_t passing_ PLIMSOLL_GUARDED_BY(mutex_){0};       // Of blocks read once, without pins.
  std::int64_t passed_ PLIMSOLL_GUARDED_BY(mutex_){0};        // Such blocks since the beginning.
  BlockCacheStats stats_ PLIMSOLL_GUARDED_BY(mutex_){};
};

}  // namespace plimsoll
