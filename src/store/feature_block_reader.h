// SPDX-License-Identifier: Apache-2.0
//
// BlockReader: reads blocks of files into frames, neighbours in one request, and decodes them.
//
// Blocks are wanted file by file, in the order of each. A run of plain neighbours is read straight
// into their frames; one with gaps, and every compressed block, into a lane, one behind another
// where they are short, and taken from there. Without lanes (a small slab, no compression) runs
// have no gaps.
//
// Reading order: feature_block.h, this file, feature_block_reader.cpp, feature_cache.h.
//
// Threads: thread-safe. A caller waits until one lane is free, never while it holds one, so callers
//          cannot wait for one another in a circle. The mutex is held across no I/O and no copy.
// Memory:  lanes × lane bytes, taken from the slab at creation. Nothing is allocated afterwards.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <span>

#include "base/mutex.h"
#include "memory/slab.h"
#include "os/file.h"
#include "os/io_pool.h"
#include "plimsoll/result.h"
#include "store/feature_block.h"

namespace plimsoll {

/// Where blocks are read to when not straight into frames.
struct BlockLanes {
  std::int64_t count{0};  // At most BlockReader::kLanesMax.
  std::int64_t bytes{0};  // Of each; a multiple of the page, no less than stored_bytes_max().
  std::int64_t gap_bytes{0};

  [[nodiscard]] std::int64_t memory_bytes() const noexcept { return count * bytes; }
};

class BlockReader {
 public:
  static constexpr std::int64_t kLanesMax = 16;
  static constexpr std::int64_t kLaneBytes = 64 << 10;  // Of a run too, unless a block is larger.
  static constexpr std::size_t kBlocksMax = 256;        // Of one call; sizes arrays on the stack.

  struct Wanted {
    File* file{nullptr};
    StoredBlock stored{};
    std::int64_t number{0};      // In its file: what errors call it.
    std::span<std::byte> out{};  // Its frame: as large as the block when decoded.
  };
  struct Counts {
    std::int64_t reads{0};
    std::int64_t bytes{0};
  };

  /// Requires: slab and pool outlive the reader.
  BlockReader(Slab& slab, IoPool& pool, const BlockLanes& lanes);
  BlockReader(const BlockReader&) = delete;
  BlockReader& operator=(const BlockReader&) = delete;

  /// Fills every frame. `checked` blocks are compared with their checksums, before they are
  /// decoded. Requires: at most kBlocksMax blocks, ascending in each file; plain ones alone when
  /// there are no lanes. Errors: kCorrupt naming the file and the block; kIo.
  Result<Counts> read(std::span<const Wanted> blocks, bool checked);

 private:
  struct Run;
  struct Wave;
  struct Flaw;

  [[nodiscard]] bool joins(const Run& last, const Run& next, bool packed) const;
  std::size_t form_runs(std::span<const Wanted> blocks, std::span<Run> runs) const;
  [[nodiscard]] std::size_t lanes_for(std::span<const Run> runs) const;
  std::size_t place_runs(std::span<Run> runs, std::span<const std::uint8_t> lanes) const;
  Result<void> read_wave(const Wave& wave, std::span<Run> runs);
  void finish_run(const Wave& wave, const Run& run, Flaw& flaw) const noexcept;
  std::size_t take_lanes(std::size_t wanted, std::span<std::uint8_t> lanes);
  void give_lanes(std::span<const std::uint8_t> lanes) noexcept;

  IoPool& pool_;
  BlockLanes plan_{};
  std::span<std::byte> bytes_{};  // Lane l: plan_.bytes at l × plan_.bytes.
  Mutex mutex_;
  CondVar lane_freed_;
  std::array<std::uint8_t, kLanesMax> free_ PLIMSOLL_GUARDED_BY(mutex_){};
  std::size_t free_count_ PLIMSOLL_GUARDED_BY(mutex_){0};
};

}  // namespace plimsoll
