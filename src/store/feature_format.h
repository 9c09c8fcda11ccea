// SPDX-License-Identifier: Apache-2.0
//
// The disk format of a FeatureStore: how records fill blocks, and what features.json says.
//
// Reading order: docs/formats/feature_store.md, this file, feature_table.h, feature_writer.cpp.
//
// Threads: values and pure functions.   Memory: a few short strings.
#pragma once

#include <cstdint>
#include <filesystem>
#include <string>
#include <vector>

#include "plimsoll/feature_store.h"
#include "plimsoll/result.h"
#include "store/id_index.h"

namespace plimsoll {

inline constexpr std::int64_t kFeaturePage = 4096;  // Unit of direct I/O.
inline constexpr std::int64_t kFeatureRecordBytesMax = 16LL << 20;
inline constexpr std::size_t kFeatureColumnsMax = 64;
inline constexpr const char* kFeatureHeaderFile = "features.json";
inline constexpr const char* kFeatureRecordsFile = "records.dat";
inline constexpr const char* kFeatureChecksumsFile = "checksums.dat";
inline constexpr const char* kFeatureBlocksFile = "blocks.dat";
inline constexpr const char* kFeatureIdsFile = "ids.dat";
inline constexpr const char* kFeatureGroupsFile = "groups.dat";
inline constexpr const char* kFeaturePlacesFile = "places.dat";
inline constexpr const char* kFeatureLengthsFile = "lengths.dat";
inline constexpr const char* kFeatureIndexName = "index";  // index.ids, index.order.

/// Where the columns stand in a record, and the records in a block. Ragged records have their fixed
/// columns first, then the ragged ones in the order given; they stand in blocks of a page as in one
/// stream of bytes.
struct FeatureLayout {
  std::vector<ColumnSpec> columns{};    // As the caller gave them.
  std::vector<std::int64_t> offsets{};  // Of each fixed column in the record, same order.
  std::vector<std::size_t> order{};     // Fixed columns as they stand in a record.
  std::vector<std::size_t> ragged{};    // Ragged columns.
  std::int64_t record_bytes{0};         // Sum of the fixed columns.
  std::int64_t stride{0};               // From one record to the next in a block; 0 when ragged.
  std::int64_t block_bytes{0};          // A multiple of kFeaturePage.
  std::int64_t records_per_block{0};    // 0 when ragged.

  [[nodiscard]] bool is_ragged() const noexcept { return !ragged.empty(); }
  [[nodiscard]] std::int64_t record_bytes_max() const noexcept;
};

/// Where ragged records stand in their stream: one right behind the other, or on the next page
/// where that spares reading one and all gaps together are at most an eighth of the stream.
class RaggedPlaces {
 public:
  /// Of the next record. Requires: bytes ≥ 0.
  constexpr std::int64_t next(std::int64_t bytes) noexcept {
    const std::int64_t in_page = end_ % kFeaturePage;
    const std::int64_t gap = (kFeaturePage - in_page) % kFeaturePage;
    const bool spares = (in_page + bytes + kFeaturePage - 1) / kFeaturePage >
                        (bytes + kFeaturePage - 1) / kFeaturePage;
    const std::int64_t left = spares && gaps_ + gap <= (end_ + bytes) / 8 ? gap : 0;
    gaps_ += left;
    end_ += left + bytes;
    return end_ - bytes;
  }
  [[nodiscard]] constexpr std::int64_t end() const noexcept { return end_; }

 private:
  std::int64_t end_{0};
  std::int64_t gaps_{0};  // All so far.
};

/// Checks the columns and chooses the block: the smallest of 1 to 16 pages with at most one part
/// in eight unused, else the one that wastes least; a record above 16 pages has its own block, and
/// ragged records blocks of one page.
/// Errors: kInvalidArgument naming the column.
Result<FeatureLayout> plan_feature_layout(const std::vector<ColumnSpec>& columns);

/// Size and checksum of a side file. Absent files have 0 bytes.
struct SideFile {
  std::int64_t bytes{0};
  std::uint32_t crc{0};
};

/// How records.dat differs from one block after another, when it does.
struct StoredForm {
  BlockCompression compression{BlockCompression::kNone};
  std::int64_t records_bytes{0};  // Of records.dat.
  std::int64_t plain_blocks{0};   // Blocks that did not shrink.
  std::uint32_t content_crc{0};   // What checksums.crc would be without compression.
  SideFile blocks{};              // The table of where each block begins.
};

/// Where ragged records are, and how long.
struct RaggedForm {
  std::int64_t stream_bytes{0};  // Up to the end of the last record.
  SideFile places{};             // Where each record begins.
  SideFile lengths{};            // Of each record one for each ragged column.
};

/// What features.json holds.
struct FeatureHeader {
  FeatureLayout layout{};
  std::int64_t rows{0};
  IdIndexInfo ids{};
  std::int64_t groups{0};
  std::int64_t uniform_group{0};
  SideFile checksums{};
  SideFile id_table{};
  SideFile group_table{};
  StoredForm stored{};  // Meaningful with compression.
  RaggedForm ragged{};  // Meaningful with ragged columns.
  std::string after{};  // Of a part: the fingerprint of what it follows (feature_parts.h).

  [[nodiscard]] bool compressed() const noexcept {
    return stored.compression != BlockCompression::kNone;
  }
  [[nodiscard]] std::int64_t blocks() const noexcept;
  [[nodiscard]] std::int64_t records_file_bytes() const noexcept {
    return compressed() ? stored.records_bytes : blocks() * layout.block_bytes;
  }
  /// Sixteen hexadecimal digits over columns, rows, ids, groups and the blocks before compression.
  [[nodiscard]] std::string fingerprint() const;
  [[nodiscard]] std::string to_json() const;
};

/// Parses and checks the text of features.json; `name` is what errors call the file.
/// Errors: kCorrupt.
Result<FeatureHeader> parse_feature_header(const std::string& text, const std::string& name);

/// Reads the features.json of a store, or of one part, and compares the sizes of the files it
/// names. Errors: kNotFound when there is no store, kCorrupt naming the truncated file, kIo.
Result<FeatureHeader> read_feature_header(const std::filesystem::path& directory);

}  // namespace plimsoll
