// SPDX-License-Identifier: Apache-2.0
//
// plan_feature_slab: see feature_plan.h.
//
// Threads, Memory: as the header says.
#include "store/feature_plan.h"

#include <algorithm>
#include <span>

#include <fmt/core.h>

#include "base/round.h"
#include "memory/admission.h"

namespace plimsoll {
namespace {

constexpr std::int64_t kDefaultCacheBytes = 32LL << 20;
constexpr std::int64_t kIdPagesMin = 4;
constexpr std::int64_t kSlabSlack = 5 * kFeaturePage;  // Alignment of what is taken from it.
constexpr std::int64_t kLaneShare = 16;                // One part in so many of the slab.

// Of the indexes of all parts, each with so many pages.
std::int64_t index_bytes(const FeatureParts& parts, std::span<const std::int64_t> pages) {
  std::int64_t sum = 0;
  for (std::size_t p = 0; p < parts.parts.size(); ++p) {
    sum += IdIndex::memory_bytes(parts.parts[p].header.ids, pages[p]);
  }
  return sum;
}

// Pages of each index when `room` bytes above their least are shared by rows.
std::vector<std::int64_t> choose_id_pages(const FeatureParts& parts, std::int64_t room) {
  std::vector<std::int64_t> pages;
  const auto rows = static_cast<double>(std::max<std::int64_t>(1, parts.rows));
  for (const FeaturePart& part : parts.parts) {
    const IdIndexInfo& ids = part.header.ids;
    const double share = static_cast<double>(ids.rows) / rows;
    const auto bytes = static_cast<std::int64_t>(static_cast<double>(room) * share);
    pages.push_back(
        IdIndex::pages_within(ids, IdIndex::memory_bytes(ids, kIdPagesMin) + bytes, kIdPagesMin));
  }
  return pages;
}

std::vector<std::int64_t> least_id_pages(const FeatureParts& parts) {
  return std::vector<std::int64_t>(parts.parts.size(), kIdPagesMin);
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

BlockLanes choose_lanes(const FeatureParts& parts, std::int64_t given, std::int64_t room) {
  const FeatureHeader& header = parts.first();
  const BlockLanes floor = lanes_at_floor(header);
  const std::int64_t bytes = lane_bytes(header);
  const std::int64_t share = std::min(given / kLaneShare, room + floor.memory_bytes());
  // A lane that holds a single block joins nothing.
  const std::int64_t useful = header.compressed() || bytes > header.layout.block_bytes ? bytes : 0;
  const std::int64_t count = useful == 0 ? 0
                                         : std::min({BlockReader::kLanesMax, share / useful,
                                                     divide_up(parts.records_file_bytes, useful)});
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

std::int64_t feature_floor_bytes(const FeatureParts& parts) {
  return kSlabSlack + index_bytes(parts, least_id_pages(parts)) +
         lanes_at_floor(parts.first()).memory_bytes() +
         BlockCache::memory_bytes(BlockCache::kFramesMin, parts.first().layout.block_bytes);
}

const SideFile& side_file(const FeatureHeader& header, FeatureSource source) noexcept {
  return source == kChecksums ? header.checksums
         : source == kBlocks  ? header.stored.blocks
         : source == kPlaces  ? header.ragged.places
         : source == kLengths ? header.ragged.lengths
         : source == kIds     ? header.id_table
                              : header.group_table;
}

Result<FeatureShares> plan_feature_slab(const FeatureParts& parts,
                                        const FeatureStoreOptions& options) {
  const std::int64_t floor = feature_floor_bytes(parts);
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
  for (const FeatureSource source : {kChecksums, kBlocks, kPlaces, kLengths, kIds, kGroups}) {
    std::int64_t bytes = 0;
    for (const FeaturePart& part : parts.parts) {
      bytes += side_file(part.header, source).bytes;
    }
    const bool whole = bytes > 0 && bytes <= given / 8 && bytes <= room;
    shares.resident[source] = whole;
    plan.table_bytes += whole ? bytes : 0;
    paged_bytes += whole ? 0 : bytes;
    room -= whole ? bytes : 0;
  }
  const std::int64_t least_index = index_bytes(parts, least_id_pages(parts));
  shares.id_pages = choose_id_pages(parts, room / 8);
  plan.index_bytes = index_bytes(parts, shares.id_pages);
  room -= plan.index_bytes - least_index;
  shares.lanes = choose_lanes(parts, given, room);
  shares.lanes.gap_bytes = options.join_gap_bytes;
  plan.buffer_bytes = shares.lanes.memory_bytes();
  room -= plan.buffer_bytes - lanes_at_floor(parts.first()).memory_bytes();
  // Frames beyond the store's own blocks would never be used. A table's last block may be short.
  const std::int64_t block = parts.first().layout.block_bytes;
  const auto tables = static_cast<std::int64_t>(kFeatureSources * parts.parts.size());
  const std::int64_t useful = parts.blocks + paged_bytes / block + tables;
  room += BlockCache::memory_bytes(BlockCache::kFramesMin, block);
  shares.frames = choose_frames(block, useful, room);
  plan.frame_bytes = BlockCache::memory_bytes(shares.frames, block);
  plan.slack_bytes = kSlabSlack;
  plan.total_bytes =
      plan.slack_bytes + plan.frame_bytes + plan.buffer_bytes + plan.table_bytes + plan.index_bytes;
  return shares;
}

}  // namespace plimsoll
