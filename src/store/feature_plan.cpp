// SPDX-License-Identifier: Apache-2.0
//
// plan_feature_slab: see feature_plan.h.
//
// Threads, Memory: as the header says.
#include "store/feature_plan.h"

#include <algorithm>
#include <utility>

#include <fmt/core.h>

#include "base/round.h"
#include "memory/admission.h"

namespace plimsoll {
namespace {

constexpr std::int64_t kDefaultCacheBytes = 32LL << 20;
constexpr std::int64_t kIdPagesMin = 4;
constexpr std::int64_t kSlabSlack = 5 * kFeaturePage;  // Alignment of what is taken from it.
constexpr std::int64_t kLaneShare = 16;                // One part in so many of the slab.

std::int64_t index_bytes(const FeatureHeader& header, std::int64_t pages) {
  return IdIndex::memory_bytes(header.ids, pages);
}

std::int64_t lane_bytes(const FeatureHeader& header) {
  return std::max(BlockReader::kLaneBytes, stored_bytes_max(header.layout.block_bytes));
}

// Compressed blocks cannot do without a lane; the smallest holds one block.
BlockLanes lanes_at_floor(const FeatureHeader& header) {
  return header.compressed()
             ? BlockLanes{.count = 1, .bytes = stored_bytes_max(header.layout.block_bytes)}
             : BlockLanes{};
}

BlockLanes choose_lanes(const FeatureHeader& header, std::int64_t given, std::int64_t room) {
  const BlockLanes floor = lanes_at_floor(header);
  const std::int64_t bytes = lane_bytes(header);
  const std::int64_t share = std::min(given / kLaneShare, room + floor.memory_bytes());
  // A lane that holds a single block joins nothing.
  const std::int64_t useful = header.compressed() || bytes > header.layout.block_bytes ? bytes : 0;
  const std::int64_t count = useful == 0
                                 ? 0
                                 : std::min({BlockReader::kLanesMax, share / useful,
                                             divide_up(header.records_file_bytes(), useful)});
  return count > 0 ? BlockLanes{.count = count, .bytes = bytes} : floor;
}

std::int64_t choose_frames(std::int64_t block, std::int64_t useful, std::int64_t room) {
  std::int64_t frames = std::max(BlockCache::kFramesMin, std::min(useful, room / (block + 64)));
  while (frames > BlockCache::kFramesMin && BlockCache::memory_bytes(frames, block) > room) {
    --frames;
  }
  return frames;
}

}  // namespace

std::int64_t feature_floor_bytes(const FeatureHeader& header) {
  return kSlabSlack + index_bytes(header, kIdPagesMin) + lanes_at_floor(header).memory_bytes() +
         BlockCache::memory_bytes(BlockCache::kFramesMin, header.layout.block_bytes);
}

Result<FeatureShares> plan_feature_slab(const FeatureHeader& header,
                                        const FeatureStoreOptions& options) {
  const std::int64_t floor = feature_floor_bytes(header);
  const std::int64_t given =
      options.cache_bytes > 0 ? options.cache_bytes : std::max(kDefaultCacheBytes, floor);
  if (given < floor) {
    return tl::unexpected(below_floor(Tag::kFeature, options.directory, "cache_bytes",
                                      "raise cache_bytes", given, floor));
  }
  FeatureShares shares;
  FeaturePlan& plan = shares.plan;
  std::int64_t room = given - floor;
  std::int64_t paged_bytes = 0;
  for (const auto& [source, bytes] :
       {std::pair{kChecksums, header.checksums.bytes},
        std::pair{kBlocks, header.stored.blocks.bytes}, std::pair{kIds, header.id_table.bytes},
        std::pair{kGroups, header.group_table.bytes}}) {
    const bool whole = bytes > 0 && bytes <= given / 8 && bytes <= room;
    shares.resident[source] = whole;
    plan.table_bytes += whole ? bytes : 0;
    paged_bytes += whole ? 0 : bytes;
    room -= whole ? bytes : 0;
  }
  shares.id_pages =
      IdIndex::pages_within(header.ids, index_bytes(header, kIdPagesMin) + room / 8, kIdPagesMin);
  plan.index_bytes = index_bytes(header, shares.id_pages);
  room -= plan.index_bytes - index_bytes(header, kIdPagesMin);
  shares.lanes = choose_lanes(header, given, room);
  shares.lanes.gap_bytes = options.join_gap_bytes;
  plan.buffer_bytes = shares.lanes.memory_bytes();
  room -= plan.buffer_bytes - lanes_at_floor(header).memory_bytes();
  // Frames beyond the store's own blocks would never be used.
  const std::int64_t block = header.layout.block_bytes;
  const std::int64_t useful = header.blocks() + paged_bytes / block + 4;
  room += BlockCache::memory_bytes(BlockCache::kFramesMin, block);
  shares.frames = choose_frames(block, useful, room);
  plan.frame_bytes = BlockCache::memory_bytes(shares.frames, block);
  plan.slack_bytes = kSlabSlack;
  plan.total_bytes =
      plan.slack_bytes + plan.frame_bytes + plan.buffer_bytes + plan.table_bytes + plan.index_bytes;
  return shares;
}

}  // namespace plimsoll
