// SPDX-License-Identifier: Apache-2.0
//
// TimelineLayout: buckets, write buffers and read buffers of a table in the sample-order layout.
//
// With b bytes per bucket and write buffers of w bytes, a table of S bytes needs about
// S/b × w + 2b of memory; the best b is √(S × w / 2). Buckets are chosen when the table is made,
// w each time it is opened: the largest that fits.
//
// Threads: pure functions.   Memory: none.
#pragma once

#include <cstdint>

#include "plimsoll/embedding_store.h"
#include "store/embedding_description.h"
#include "store/timeline_space.h"

namespace plimsoll {

struct TimelineLayout {
  SlabPlan plan{};
  TimelineShape shape{};
  TimelineSpace::Sizes sizes{};
  std::int64_t chunk_bytes{0};    ///< A write buffer.
  std::int64_t chunks{0};         ///< One for every bucket, and some on their way to the disk.
  std::int64_t frame_bytes{0};    ///< A read buffer; there are two.
  std::int64_t batch_rows{0};     ///< Rows per request that the scratch holds.
  std::int64_t staging_rows{0};   ///< Rows out of order handled at a time.
  std::int64_t scratch_bytes{0};  ///< One extent, and one map: for lookups and commits.
  std::int64_t map_bytes{0};
  std::int64_t id_pages{0};
};

/// Rows of a block that is moved at once; see Timeline::move_rows.
inline constexpr std::int64_t kTimelineBlockRows = 256;

[[nodiscard]] TimelineShape timeline_shape(const TableDescription& table) noexcept;

/// Chooses the buckets of a new table for options.store_bytes (0: 64 MiB or the floor).
void choose_buckets(TableDescription& table, const EmbeddingStoreOptions& options) noexcept;

/// Divides options.store_bytes for a table whose buckets are chosen; the floor of one that does
/// not exist yet is that of the best choice.
/// Errors: kOverBudget when it is below the floor: requested_bytes is the floor.
Result<TimelineLayout> plan_timeline(const TableDescription& table, bool exists,
                                     const EmbeddingStoreOptions& options);

}  // namespace plimsoll
