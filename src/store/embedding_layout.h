// SPDX-License-Identifier: Apache-2.0
//
// EmbeddingLayout: how a slab of a given size is divided for a table, and the smallest that works.
//
// Threads: pure functions.   Memory: none.
#pragma once

#include <cstdint>
#include <functional>

#include "plimsoll/embedding_store.h"
#include "store/embedding_description.h"
#include "store/embedding_page_cache.h"

namespace plimsoll {

struct EmbeddingLayout {
  SlabPlan plan{};
  PageCache::Sizes sizes{};
  std::int64_t id_pages{0};     ///< Cached pages of the sorted id file.
  std::int64_t queue_ids{0};    ///< Places in the look-ahead queue.
  std::int64_t batch_rows{0};   ///< Rows per request that the scratch holds.
  std::int64_t hash_places{0};  ///< Of the table that finds duplicates.
};

/// Blocks that may be under way to the disk at once, whatever the slab: a table is opened again
/// with a smaller one, and its last commits stand in blocks that a larger one wrote.
[[nodiscard]] std::int64_t spare_blocks(const TableShape& shape) noexcept;

/// Cached pages of the sorted id file in the smallest slab: two, or all where those take no more.
[[nodiscard]] std::int64_t id_pages_least(const TableDescription& table) noexcept;

/// Raises `id_pages`, and what the plan says of the index, by as many cached pages as `room` bytes
/// can hold. Requires: the plan counts `id_pages`.
void give_index_its_share(const TableDescription& table, std::int64_t room, std::int64_t& id_pages,
                          SlabPlan& plan) noexcept;

/// Errors: kInvalidArgument, naming the most rows that are possible, when `blocks_of` a table, in
/// which more rows never need fewer, are more than 32 bits number.
Result<void> check_blocks(const TableDescription& table, const EmbeddingStoreOptions& options,
                          const std::function<std::int64_t(const TableDescription&)>& blocks_of);

/// Divides options.store_bytes (0: 64 MiB or the floor). Takes less when the table needs less.
/// Errors: kOverBudget when it is below the floor: requested_bytes is the floor; kInvalidArgument
/// as check_blocks().
Result<EmbeddingLayout> plan_layout(const TableDescription& table,
                                    const EmbeddingStoreOptions& options);

}  // namespace plimsoll
