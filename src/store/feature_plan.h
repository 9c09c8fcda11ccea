// SPDX-License-Identifier: Apache-2.0
//
// plan_feature_slab: how a FeatureStore's slab is divided, decided before a byte of it is taken.
//
// Reading order: include/plimsoll/feature_store.h (FeaturePlan), this file, feature_store.cpp.
//
// Threads: pure functions.   Memory: none.
#pragma once

#include <array>
#include <cstdint>
#include <vector>

#include "plimsoll/feature_store.h"
#include "plimsoll/result.h"
#include "store/feature_block_reader.h"
#include "store/feature_cache.h"
#include "store/feature_parts.h"

namespace plimsoll {

/// The files of a part that blocks are read from.
enum FeatureSource : std::uint8_t {
  kRecords,
  kChecksums,
  kIds,
  kGroups,
  kBlocks,
  kPlaces,
  kLengths
};
inline constexpr std::size_t kFeatureSources = 7;

struct FeatureShares {
  FeaturePlan plan{};
  std::int64_t frames{0};
  std::vector<std::int64_t> id_pages{};  // Of each part.
  BlockLanes lanes{};
  std::array<bool, kFeatureSources> resident{};  // Tables kept whole, those of all parts.
};

/// What the header says of a table. Requires: not kRecords.
[[nodiscard]] const SideFile& side_file(const FeatureHeader& header, FeatureSource source) noexcept;

/// The fewest bytes a store can be opened with.
[[nodiscard]] std::int64_t feature_floor_bytes(const FeatureParts& parts);

/// Divides options.cache_bytes: tables whole while those of a kind take at most an eighth, the id
/// indexes an eighth of what is left, by their rows, lanes a sixteenth, the rest frames, as many as
/// the store can use.
/// Errors: kOverBudget when cache_bytes is below the floor, naming it.
Result<FeatureShares> plan_feature_slab(const FeatureParts& parts,
                                        const FeatureStoreOptions& options);

}  // namespace plimsoll
