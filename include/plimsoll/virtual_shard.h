// SPDX-License-Identifier: Apache-2.0
//
// Virtual shards: how ranks that share a table deal its rows.
//
// A shard is never divided, so another number of ranks moves whole ones.
//
// Threads: a pure function.   Memory: none.
#pragma once

#include <cstdint>

namespace plimsoll {

inline constexpr std::int64_t kVirtualShards = 4096;

/// The shard of an id, the same in every table and version: 0 <= shard < kVirtualShards. Those of
/// consecutive ids, too, are about as large as one another.
/// Source: docs/formats/embedding_store.md, its section on virtual shards.
[[nodiscard]] std::int64_t virtual_shard(std::int64_t id) noexcept;

}  // namespace plimsoll
