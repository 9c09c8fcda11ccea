// SPDX-License-Identifier: Apache-2.0
//
// FeatureStore::inspect and verify: what a directory holds, and whether every byte is as written.
//
// Threads: any; they open the files for themselves.
// Memory:  verify() reads through one buffer of about 1 MiB; inspect() reads the header alone.
#include <algorithm>
#include <functional>
#include <optional>
#include <vector>

#include <fmt/core.h>

#include "base/check.h"
#include "base/crc32c.h"
#include "base/round.h"
#include "os/file.h"
#include "plimsoll/feature_store.h"
#include "store/feature_block.h"
#include "store/feature_format.h"
#include "store/feature_parts.h"
#include "store/feature_table.h"
#include "store/id_index.h"

namespace plimsoll {
namespace {

namespace fs = std::filesystem;
using Progress = std::function<bool(std::int64_t, std::int64_t)>;

constexpr std::int64_t kBufferBytes = 1 << 20;

Result<void> verify_side_file(const fs::path& path, const SideFile& side,
                              std::span<std::byte> buffer) {
  if (side.bytes == 0) {
    return {};
  }
  PLIMSOLL_TRY(const File file, File::open(path, FileMode::kRead));
  std::uint32_t crc = 0;
  const auto whole = static_cast<std::int64_t>(buffer.size()) / kFeaturePage * kFeaturePage;
  for (std::int64_t at = 0; at < side.bytes; at += whole) {
    const auto part = buffer.first(static_cast<std::size_t>(std::min(whole, side.bytes - at)));
    PLIMSOLL_TRY_VOID(file.read_at(at, part));
    PLIMSOLL_TRY_VOID(check_table_pages(part, at / kFeaturePage, path));
    crc = fold_table_crc(part, crc);
  }
  if (crc != side.crc) {
    return fail(ErrorCode::kCorrupt,
                fmt::format("{}: not the file that {} names (its checksum differs)", path.string(),
                            kFeatureHeaderFile));
  }
  return {};
}

// Entries of a table that are asked for in rising order.
class TableCursor {
 public:
  static Result<TableCursor> open(const fs::path& path, std::int64_t width) {
    TableCursor cursor;
    PLIMSOLL_TRY(cursor.file_, File::open(path, FileMode::kRead));
    cursor.width_ = width;
    cursor.page_.resize(static_cast<std::size_t>(kFeaturePage));
    return cursor;
  }
  Result<std::uint64_t> at(std::int64_t index) {
    const std::int64_t offset = feature_table_offset(index, width_);
    if (offset / kFeaturePage != number_) {
      number_ = offset / kFeaturePage;
      PLIMSOLL_TRY_VOID(file_.read_at(number_ * kFeaturePage, page_));
    }
    return load_table_entry(page_.data() + offset % kFeaturePage, width_);
  }
  [[nodiscard]] const fs::path& path() const noexcept { return file_.path(); }

 private:
  File file_;
  std::int64_t width_{0};
  std::vector<std::byte> page_{};
  std::int64_t number_{-1};  // Of the page in page_.
};

// Tells blocks one after another where they stand.
class BlockPlaces {
 public:
  static Result<BlockPlaces> open(const fs::path& directory, const FeatureHeader& header) {
    BlockPlaces places(header);
    if (header.compressed()) {
      PLIMSOLL_TRY(places.table_, TableCursor::open(directory / kFeatureBlocksFile, 8));
    }
    return places;
  }
  Result<StoredBlock> at(std::int64_t block) {
    const std::int64_t bytes = header_->layout.block_bytes;
    if (!table_) {
      return StoredBlock{.offset = block * bytes, .bytes = bytes};
    }
    PLIMSOLL_TRY(const std::uint64_t entry, table_->at(block));
    PLIMSOLL_TRY(const std::uint64_t next, table_->at(block + 1));
    return parse_block_entries(entry, next, bytes, header_->stored.records_bytes, block,
                               table_->path());
  }

 private:
  explicit BlockPlaces(const FeatureHeader& header) : header_(&header) {}
  const FeatureHeader* header_;
  std::optional<TableCursor> table_{};
};

// Compares a block with its checksum, and decodes it.
Result<void> verify_block(const StoredBlock& place, std::span<const std::byte> stored,
                          std::int64_t number, const fs::path& path, std::span<std::byte> decoded,
                          FeatureTableWriter& content) {
  if (crc32c(stored) != place.crc) {
    return damaged_block(path, number, "does not match its checksum");
  }
  if (place.coding == BlockCoding::kPlain) {
    return content.append(place.crc);
  }
  if (!decode_block(stored, decoded)) {
    return damaged_block(path, number, "cannot be decompressed");
  }
  return content.append(crc32c(decoded));
}

// Ragged records stand one after another: each where the one before ends, or on the next page.
// Which of both is the writer's (RaggedPlaces), and was another's before.
Result<void> verify_places(const fs::path& directory, const FeatureHeader& header) {
  PLIMSOLL_TRY(TableCursor places, TableCursor::open(directory / kFeaturePlacesFile, 8));
  PLIMSOLL_TRY(TableCursor lengths, TableCursor::open(directory / kFeatureLengthsFile, 4));
  std::int64_t end = 0;
  std::int64_t entry = 0;
  for (std::int64_t row = 0; row < header.rows; ++row) {
    std::int64_t bytes = header.layout.record_bytes;
    bool sound = true;
    for (const std::size_t k : header.layout.ragged) {
      const ColumnSpec& column = header.layout.columns[k];
      PLIMSOLL_TRY(const std::uint64_t length, lengths.at(entry++));
      sound = sound && static_cast<std::int64_t>(length) <= column.length_max;
      bytes += static_cast<std::int64_t>(length) * column.bytes();
    }
    PLIMSOLL_TRY(const std::uint64_t place, places.at(row));
    const auto begin = static_cast<std::int64_t>(place);
    if (!sound || (begin != end && begin != round_up(end, kFeaturePage))) {
      return fail(ErrorCode::kCorrupt, fmt::format("{}: record {} is not where its length puts it",
                                                   places.path().string(), row));
    }
    end = begin + bytes;
  }
  if (end != header.ragged.stream_bytes) {
    return fail(ErrorCode::kCorrupt, fmt::format("{}: its records do not end where {} says",
                                                 places.path().string(), kFeatureHeaderFile));
  }
  return {};
}

// Reads records.dat from end to end: blocks stand there without gaps, each matches its checksum,
// and together they are the blocks that were written.
Result<void> verify_records(const fs::path& directory, const FeatureHeader& header,
                            const Progress& progress, std::span<std::byte> buffer) {
  PLIMSOLL_TRY(File records, File::open(directory / kFeatureRecordsFile, FileMode::kRead));
  PLIMSOLL_TRY(TableCursor checksums, TableCursor::open(directory / kFeatureChecksumsFile, 4));
  PLIMSOLL_TRY(BlockPlaces places, BlockPlaces::open(directory, header));
  const auto block_bytes = static_cast<std::size_t>(header.layout.block_bytes);
  std::vector<std::byte> decoded(header.compressed() ? block_bytes : 0);
  std::vector<std::byte> content_page(static_cast<std::size_t>(kFeaturePage));
  FeatureTableWriter content = FeatureTableWriter::counting(4, content_page);
  const std::int64_t total = header.records_file_bytes();
  std::int64_t held_begin = 0;  // The part of the file in `buffer`.
  std::int64_t held_end = 0;
  std::int64_t fills = 0;
  for (std::int64_t block = 0; block < header.blocks(); ++block) {
    PLIMSOLL_TRY(StoredBlock place, places.at(block));
    PLIMSOLL_TRY(const std::uint64_t crc, checksums.at(block));
    place.crc = static_cast<std::uint32_t>(crc);
    if (block == 0 && place.offset != 0) {
      return fail(ErrorCode::kCorrupt,
                  records.path().string() + ": block 0 is not at its beginning");
    }
    if (place.offset < held_begin || place.offset + place.bytes > held_end) {
      if (held_end > 0 && progress && !progress(place.offset, total)) {
        return fail(ErrorCode::kInvalidArgument, directory.string() + ": cancelled");
      }
      if (++fills % 64 == 0) {
        records.drop_cache();
      }
      held_begin = place.offset;
      held_end = std::min(total, held_begin + static_cast<std::int64_t>(buffer.size()));
      PLIMSOLL_TRY_VOID(records.read_at(
          held_begin, buffer.first(static_cast<std::size_t>(held_end - held_begin))));
    }
    const auto stored = buffer.subspan(static_cast<std::size_t>(place.offset - held_begin),
                                       static_cast<std::size_t>(place.bytes));
    PLIMSOLL_TRY_VOID(verify_block(place, stored, block, records.path(), decoded, content));
  }
  records.drop_cache();
  PLIMSOLL_TRY(const SideFile folded, content.finish());
  if (header.compressed() && folded.crc != header.stored.content_crc) {
    return fail(ErrorCode::kCorrupt, fmt::format("{}: its blocks are not those that {} names",
                                                 records.path().string(), kFeatureHeaderFile));
  }
  if (progress && !progress(total, total)) {
    return fail(ErrorCode::kInvalidArgument, directory.string() + ": cancelled");
  }
  return {};
}

}  // namespace

Result<FeatureInfo> FeatureStore::inspect(const fs::path& directory) {
  PLIMSOLL_TRY(const FeatureParts parts, read_feature_parts(directory));
  return parts.info();
}

Result<void> FeatureStore::verify(const fs::path& directory, const Progress& progress) {
  PLIMSOLL_TRY(const FeatureParts parts, read_feature_parts(directory));
  if (parts.first().compressed()) {
    PLIMSOLL_TRY_VOID(require_lz4(directory));
  }
  std::vector<std::byte> buffer(static_cast<std::size_t>(
      std::max(kBufferBytes, stored_bytes_max(parts.first().layout.block_bytes))));
  std::int64_t before = 0;
  const std::int64_t total = parts.records_file_bytes;
  for (const auto& [path, header, first_row, first_group] : parts.parts) {
    PLIMSOLL_TRY_VOID(verify_side_file(path / kFeatureChecksumsFile, header.checksums, buffer));
    PLIMSOLL_TRY_VOID(verify_side_file(path / kFeatureBlocksFile, header.stored.blocks, buffer));
    PLIMSOLL_TRY_VOID(verify_side_file(path / kFeatureIdsFile, header.id_table, buffer));
    PLIMSOLL_TRY_VOID(verify_side_file(path / kFeatureGroupsFile, header.group_table, buffer));
    PLIMSOLL_TRY_VOID(verify_side_file(path / kFeaturePlacesFile, header.ragged.places, buffer));
    PLIMSOLL_TRY_VOID(verify_side_file(path / kFeatureLengthsFile, header.ragged.lengths, buffer));
    if (header.layout.is_ragged() && header.rows > 0) {
      PLIMSOLL_TRY_VOID(verify_places(path, header));
    }
    PLIMSOLL_TRY_VOID(IdIndex::verify(path, kFeatureIndexName, header.ids));
    PLIMSOLL_TRY_VOID(verify_records(
        path, header,
        [&](std::int64_t done, std::int64_t) {
          return !progress || progress(before + done, total);
        },
        buffer));
    before += header.records_file_bytes();
  }
  return {};
}

}  // namespace plimsoll
