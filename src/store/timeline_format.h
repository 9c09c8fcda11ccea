// SPDX-License-Identifier: Apache-2.0
//
// The bytes of a table in the sample-order layout: extents of rows, and the map of one commit.
//
// A row has a checksum of its own; an extent's header has one over its fields and the checksums of
// its rows; the map keeps a sum over the extents of each stream; the superblock keeps the checksum
// of the map. docs/formats/embedding_timeline.md is the specification.
//
// Reading order: docs/formats/embedding_timeline.md, this file, timeline_space.h.
//
// Threads: pure functions.   Memory: none.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

#include "store/embedding_format.h"
#include "store/epoch_order.h"

namespace plimsoll {

/// What follows from rows, their records and the buckets chosen when the table was made.
struct TimelineShape {
  std::int64_t rows{0};  // rows_max of a table that grows.
  std::int64_t dim{0};
  std::int64_t record_bytes{0};
  std::int64_t bucket_rows{0};    // Positions per bucket.
  std::int64_t buckets{0};        // Per epoch.
  std::int64_t segment_bytes{0};  // A multiple of kBlockUnit.
  bool grows{false};

  [[nodiscard]] std::int64_t bucket_of(std::int64_t position) const noexcept {
    return position / bucket_rows;
  }
  [[nodiscard]] std::int64_t rows_in_bucket(std::int64_t bucket) const noexcept {
    const std::int64_t left = rows - bucket * bucket_rows;
    return left < bucket_rows ? left : bucket_rows;
  }
};

struct ExtentHeader {
  std::uint32_t magic;
  std::uint32_t crc;    // Of the rest of this header and of every row's crc.
  std::uint64_t owner;  // extent_owner(): the table, the epoch and the bucket.
  std::uint32_t index;  // Which extent of its stream.
  std::uint32_t rows;
  std::uint64_t reserved;
};
static_assert(sizeof(ExtentHeader) == 32);
inline constexpr std::int64_t kExtentHeaderBytes = 32;

/// Bytes on disk of an extent of `rows` rows.
[[nodiscard]] inline std::int64_t extent_bytes(std::int64_t record_bytes,
                                               std::int64_t rows) noexcept {
  return round_to_block(kExtentHeaderBytes + rows * record_bytes);
}
/// Rows that fit into an extent of at most `bytes`.
[[nodiscard]] inline std::int64_t extent_rows(std::int64_t record_bytes,
                                              std::int64_t bytes) noexcept {
  return (bytes - kExtentHeaderBytes) / record_bytes;
}
/// The largest extent a table may hold: 256 KiB, or one row.
[[nodiscard]] std::int64_t extent_bytes_most(std::int64_t record_bytes) noexcept;
/// The smallest write buffer: 32 KiB, or one row.
[[nodiscard]] std::int64_t chunk_bytes_least(std::int64_t record_bytes) noexcept;

/// Tells the streams of all tables, epochs and buckets apart.
[[nodiscard]] std::uint64_t extent_owner(const TimelineShape& shape, std::uint64_t fingerprint,
                                         const EpochKey& key, std::int64_t bucket) noexcept;
/// What one extent adds to the sum its stream keeps: no extent can be missing, old or swapped.
[[nodiscard]] std::uint64_t extent_mark(std::uint32_t index, std::uint32_t crc) noexcept;

/// Fills in the checksums of the rows, the header and the zeros behind; returns the header's crc.
/// Requires: bytes.size() == extent_bytes(record_bytes, rows).
std::uint32_t seal_extent(std::int64_t record_bytes, std::uint64_t owner, std::uint32_t index,
                          std::uint32_t rows, std::span<std::byte> bytes) noexcept;
/// Whether these bytes are that extent, rows included. Then `mark` is extent_mark() of it.
[[nodiscard]] bool extent_is_sound(std::int64_t record_bytes, std::uint64_t owner,
                                   std::uint32_t index, std::uint32_t rows,
                                   std::span<const std::byte> bytes, std::uint64_t& mark) noexcept;
/// Whether one row, of any extent, is as it was sealed.
[[nodiscard]] bool row_is_sound(std::span<const std::byte> record) noexcept;

/// What a commit remembers beside its streams.
struct TimelineState {
  EpochKey source{};  ///< The epoch being read: rows at positions >= cursor are in its buckets.
  EpochKey parent{};  ///< The epoch in whose order they were written.
  EpochKey target{};  ///< The epoch being written: rows at positions < cursor are in its buckets.
  std::int64_t cursor{0};
  std::int64_t rows{0};      ///< That there are.
  std::uint32_t new_ids{0};  ///< crc32c of the first (rows − rows at creation) ids in rows.new.
  friend bool operator==(const TimelineState&, const TimelineState&) = default;
};

/// The head of map.N. After it, in a table that grows, MapGrowth; then 2 × buckets StreamRecords,
/// first those of the epoch being read, then those of the next; then the u32 rows of each extent,
/// stream by stream; then the u32 segments of each stream.
struct EpochRecord {
  std::uint64_t seed;
  std::int64_t epoch;
};
struct MapHeader {
  std::uint64_t magic;
  EpochRecord source;
  EpochRecord parent;
  EpochRecord target;
  std::int64_t cursor;
  std::int64_t bytes;  // Of the map.
  std::uint64_t extents;
  std::uint64_t segments;
};
static_assert(sizeof(MapHeader) == 88);
struct MapGrowth {
  std::int64_t rows;
  std::int64_t source_rows;  // In the order of each epoch; the others stand behind them.
  std::int64_t parent_rows;
  std::int64_t target_rows;
  std::uint32_t new_ids;
  std::uint32_t reserved;
};
static_assert(sizeof(MapGrowth) == 40);
/// Bytes before the StreamRecords.
[[nodiscard]] inline std::size_t map_head_bytes(const TimelineShape& shape) noexcept {
  return sizeof(MapHeader) + (shape.grows ? sizeof(MapGrowth) : 0);
}

struct StreamRecord {
  std::uint32_t extents;
  std::uint32_t segments;
  std::uint32_t rows;    // Of all extents, older versions included.
  std::uint32_t live;    // Different rows.
  std::uint32_t sorted;  // 1: the rows stand in the order of the epoch that wrote them.
  std::uint32_t reserved;
  std::uint64_t marks;  // Sum of extent_mark().
};
static_assert(sizeof(StreamRecord) == 32);
inline constexpr std::uint64_t kTimelineMapMagic = 0x50414D4C54534C50ULL;  // "PLSTLMAP"

}  // namespace plimsoll
