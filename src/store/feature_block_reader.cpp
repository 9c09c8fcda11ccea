// SPDX-License-Identifier: Apache-2.0
//
// BlockReader: see feature_block_reader.h.
//
// Threads, Memory: as the header says; runs and requests live on the caller's stack (about 28 KiB).
#include "store/feature_block_reader.h"

#include <algorithm>
#include <cstring>
#include <functional>

#include <fmt/core.h>

#include "base/check.h"
#include "base/crc32c.h"
#include "base/round.h"
#include "store/feature_format.h"

namespace plimsoll {

// Pages [begin, end) of a file, which hold `count` of the wanted blocks from `first` on.
struct BlockReader::Run {
  std::int64_t begin;
  std::int64_t end;
  std::uint16_t first;
  std::uint16_t count;
  bool staged;      // Through a lane; otherwise plain neighbours, straight into their frames.
  std::int64_t at;  // In the lanes' bytes. Meaningful while staged and under way.
};

// Some runs read at once.
struct BlockReader::Wave {
  std::span<const Wanted> blocks;
  bool checked;
};

// The first block of a wave that is damaged.
struct BlockReader::Flaw {
  std::size_t block{SIZE_MAX};
  const char* what{""};
};

BlockReader::BlockReader(Slab& slab, IoPool& pool, const BlockLanes& lanes)
    : pool_(pool), plan_(lanes) {
  PLIMSOLL_CHECK(lanes.count >= 0 && lanes.count <= kLanesMax, "number of lanes out of range");
  bytes_ = slab.take<std::byte>(lanes.memory_bytes(), kFeaturePage);
  for (std::int64_t lane = 0; lane < lanes.count; ++lane) {
    free_[free_count_++] = static_cast<std::uint8_t>(lane);
  }
}

Result<BlockReader::Counts> BlockReader::read(std::span<const Wanted> blocks, bool checked) {
  PLIMSOLL_CHECK(blocks.size() <= kBlocksMax, "more blocks than one call reads");
  std::array<Run, kBlocksMax> runs;
  const std::size_t count = form_runs(blocks, runs);
  std::array<std::uint8_t, kLanesMax> lanes;
  const std::size_t wanted = lanes_for(std::span(runs).first(count));
  const std::size_t held = wanted == 0 ? 0 : take_lanes(wanted, lanes);
  const Wave wave{blocks, checked};
  Counts counts;
  Result<void> result;
  for (std::size_t begin = 0; begin < count && result;) {
    const std::size_t size =
        place_runs(std::span(runs).subspan(begin, count - begin), std::span(lanes).first(held));
    const auto placed = std::span(runs).subspan(begin, size);
    for (const Run& run : placed) {
      counts.bytes += run.end - run.begin;
    }
    result = read_wave(wave, placed);
    begin += size;
  }
  give_lanes(std::span(lanes).first(held));
  PLIMSOLL_TRY_VOID(std::move(result));
  counts.reads = static_cast<std::int64_t>(count);
  return counts;
}

// Whether a block that is a run by itself may be one with the run before it: a plain neighbour of
// plain ones, or what begins near enough and fits a lane with them.
bool BlockReader::joins(const Run& last, const Run& next, bool packed) const {
  if (!last.staged && !packed && next.begin == last.end) {
    return next.end - last.begin <= kLaneBytes;
  }
  return next.begin >= last.begin && next.begin <= last.end + plan_.gap_bytes &&
         std::max(last.end, next.end) - last.begin <= plan_.bytes;
}

// Places come from a file: whatever they are, a staged run stays within its lane.
std::size_t BlockReader::form_runs(std::span<const Wanted> blocks, std::span<Run> runs) const {
  std::size_t count = 0;
  for (std::size_t i = 0; i < blocks.size(); ++i) {
    const StoredBlock& stored = blocks[i].stored;
    const bool packed = stored.coding == BlockCoding::kLz4;
    const Run next{.begin = stored.offset / kFeaturePage * kFeaturePage,
                   .end = round_up(stored.offset + stored.bytes, kFeaturePage),
                   .first = static_cast<std::uint16_t>(i),
                   .count = 1,
                   .staged = packed,
                   .at = 0};
    Run* const last = count == 0 ? nullptr : &runs[count - 1];
    if (last != nullptr && blocks[i].file == blocks[last->first].file &&
        joins(*last, next, packed)) {
      last->staged = last->staged || packed || next.begin != last->end;
      last->end = std::max(last->end, next.end);
      ++last->count;
      continue;
    }
    PLIMSOLL_CHECK(!packed || next.end - next.begin <= plan_.bytes, "a block larger than its lane");
    runs[count++] = next;
  }
  return count;
}

// Lanes that hold all of these runs at once, one behind another.
std::size_t BlockReader::lanes_for(std::span<const Run> runs) const {
  std::size_t lanes = 0;
  std::int64_t left = 0;  // Of the newest.
  for (const Run& run : runs) {
    if (run.staged && run.end - run.begin > left) {
      ++lanes;
      left = plan_.bytes;
    }
    left -= run.staged ? run.end - run.begin : 0;
  }
  return lanes;
}

// Gives runs their places in these lanes, and says how many of them have one: the first at least.
std::size_t BlockReader::place_runs(std::span<Run> runs,
                                    std::span<const std::uint8_t> lanes) const {
  std::size_t used = 0;
  std::int64_t left = 0;
  for (std::size_t r = 0; r < runs.size(); ++r) {
    Run& run = runs[r];
    if (!run.staged) {
      continue;
    }
    const std::int64_t bytes = run.end - run.begin;
    if (bytes > left) {
      if (used == lanes.size()) {
        return r;
      }
      ++used;
      left = plan_.bytes;
    }
    run.at = (lanes[used - 1] + 1) * plan_.bytes - left;
    left -= bytes;
  }
  return runs.size();
}

Result<void> BlockReader::read_wave(const Wave& wave, std::span<Run> runs) {
  std::array<IoRequest, kBlocksMax> requests;
  std::array<iovec, kBlocksMax> parts;  // By block.
  for (std::size_t r = 0; r < runs.size(); ++r) {
    const Run& run = runs[r];
    File* const file = wave.blocks[run.first].file;
    if (run.staged) {
      const auto size = static_cast<std::size_t>(run.end - run.begin);
      const auto lane = bytes_.subspan(static_cast<std::size_t>(run.at), size);
      requests[r] = {.file = file, .offset = run.begin, .bytes = lane, .kind = IoKind::kRead};
      continue;
    }
    for (std::size_t i = run.first; i < std::size_t{run.first} + run.count; ++i) {
      const Wanted& block = wave.blocks[i];
      parts[i] = {.iov_base = block.out.data(),
                  .iov_len = static_cast<std::size_t>(round_up(block.stored.bytes, kFeaturePage))};
    }
    requests[r] =
        IoRequest::read_parts(*file, run.begin, std::span(parts).subspan(run.first, run.count));
  }
  // Blocks are checked and decoded while others are still under way.
  Flaw flaw;
  const auto ended = [&](std::size_t r) { finish_run(wave, runs[r], flaw); };
  PLIMSOLL_TRY_VOID(pool_.run(std::span(requests).first(runs.size()), std::cref(ended)));
  if (flaw.block < wave.blocks.size()) {
    const Wanted& block = wave.blocks[flaw.block];
    return damaged_block(block.file->path(), block.number, flaw.what);
  }
  return {};
}

void BlockReader::finish_run(const Wave& wave, const Run& run, Flaw& flaw) const noexcept {
  const std::byte* read = bytes_.data() + run.at;
  for (std::size_t i = run.first; i < std::size_t{run.first} + run.count; ++i) {
    const Wanted& block = wave.blocks[i];
    const auto size = static_cast<std::size_t>(block.stored.bytes);
    const std::span<const std::byte> stored =
        run.staged ? std::span(read + (block.stored.offset - run.begin), size)
                   : std::span<const std::byte>(block.out.first(size));
    const char* what = nullptr;
    if (wave.checked && crc32c(stored) != block.stored.crc) {
      what = "does not match its checksum";
    } else if (block.stored.coding == BlockCoding::kLz4) {
      what = decode_block(stored, block.out) ? nullptr : "cannot be decompressed";
    } else if (run.staged) {
      std::memcpy(block.out.data(), stored.data(), size);
    }
    if (what != nullptr && i < flaw.block) {
      flaw = {i, what};
    }
  }
}

std::size_t BlockReader::take_lanes(std::size_t wanted, std::span<std::uint8_t> lanes) {
  MutexLock lock(mutex_);
  while (free_count_ == 0) {
    lane_freed_.wait(mutex_);
  }
  const std::size_t got = std::min({wanted, free_count_, lanes.size()});
  for (std::size_t i = 0; i < got; ++i) {
    lanes[i] = free_[--free_count_];
  }
  return got;
}

void BlockReader::give_lanes(std::span<const std::uint8_t> lanes) noexcept {
  if (lanes.empty()) {
    return;
  }
  {
    MutexLock lock(mutex_);
    for (const std::uint8_t lane : lanes) {
      free_[free_count_++] = lane;
    }
  }
  lane_freed_.notify_all();
}

}  // namespace plimsoll
