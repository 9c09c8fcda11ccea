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
#include <filesystem>

#include "plimsoll/feature_store.h"
#include "plimsoll/result.h"
#include "store/feature_block_reader.h"
#include "store/feature_cache.h"
#include "store/feature_format.h"

namespace plimsoll {

/// The files that blocks are read from; an index into BlockCache's sources.
enum FeatureSource : int { kRecords, kChecksums, kIds, kGroups, kBlocks };

struct FeatureShares {
  FeaturePlan plan{};
  std::int64_t frames{0};
  std::int64_t id_pages{0};
  BlockLanes lanes{};
  std::array<bool, BlockCache::kSources> resident{};  // Tables kept whole.
};

/// The fewest bytes a store can be opened with.
[[nodiscard]] std::int64_t feature_floor_bytes(const FeatureHeader& header);

/// Divides options.cache_bytes: tables whole while each takes at most an eighth, the id index an
/// eighth of what is left, lanes a sixteenth, the rest frames, as many as the store can use.
/// Errors: kOverBudget when cache_bytes is below the floor, naming it.
Result<FeatureShares> plan_feature_slab(const FeatureHeader& header,
                                        const FeatureStoreOptions& options);

}  // namespace plimsoll
