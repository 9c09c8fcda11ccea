// SPDX-License-Identifier: Apache-2.0
//
// FeatureStore::inspect and verify: what a directory holds, and whether every byte is as written.
//
// Threads: any; they open the files for themselves.
// Memory:  verify() reads through one buffer of about 1 MiB; inspect() reads the header alone.
#include <algorithm>
#include <functional>
#include <vector>

#include <fmt/core.h>

#include "base/check.h"
#include "base/crc32c.h"
#include "os/file.h"
#include "plimsoll/feature_store.h"
#include "store/feature_format.h"
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

// Reads records.dat from end to end, comparing each block with the table of checksums.
Result<void> verify_records(const fs::path& directory, const FeatureHeader& header,
                            const Progress& progress, std::span<std::byte> buffer) {
  PLIMSOLL_TRY(File records, File::open(directory / kFeatureRecordsFile, FileMode::kRead));
  PLIMSOLL_TRY(const File table, File::open(directory / kFeatureChecksumsFile, FileMode::kRead));
  const std::int64_t block_bytes = header.layout.block_bytes;
  const std::int64_t batch = static_cast<std::int64_t>(buffer.size()) / block_bytes;
  std::vector<std::byte> page(static_cast<std::size_t>(kFeaturePage));
  std::int64_t page_number = -1;
  for (std::int64_t first = 0; first < header.blocks(); first += batch) {
    const std::int64_t count = std::min(batch, header.blocks() - first);
    const auto part = buffer.first(static_cast<std::size_t>(count * block_bytes));
    PLIMSOLL_TRY_VOID(records.read_at(first * block_bytes, part));
    for (std::int64_t i = 0; i < count; ++i) {
      const std::int64_t offset = feature_table_offset(first + i, 4);
      if (offset / kFeaturePage != page_number) {
        page_number = offset / kFeaturePage;
        PLIMSOLL_TRY_VOID(table.read_at(page_number * kFeaturePage, page));
      }
      const auto block = part.subspan(static_cast<std::size_t>(i * block_bytes),
                                      static_cast<std::size_t>(block_bytes));
      if (crc32c(block) != load_table_entry(page.data() + offset % kFeaturePage, 4)) {
        return fail(ErrorCode::kCorrupt, fmt::format("{}: block {} does not match its checksum",
                                                     records.path().string(), first + i));
      }
    }
    if (first / batch % 64 == 63) {
      records.drop_cache();
    }
    if (progress && !progress((first + count) * block_bytes, header.records_file_bytes())) {
      return fail(ErrorCode::kInvalidArgument, directory.string() + ": cancelled");
    }
  }
  records.drop_cache();
  return {};
}

}  // namespace

Result<FeatureInfo> FeatureStore::inspect(const fs::path& directory) {
  PLIMSOLL_TRY(const FeatureHeader header, read_feature_header(directory));
  return header.info(directory);
}

Result<void> FeatureStore::verify(const fs::path& directory, const Progress& progress) {
  PLIMSOLL_TRY(const FeatureHeader header, read_feature_header(directory));
  std::vector<std::byte> buffer(
      static_cast<std::size_t>(std::max(kBufferBytes, header.layout.block_bytes)));
  PLIMSOLL_TRY_VOID(verify_side_file(directory / kFeatureChecksumsFile, header.checksums, buffer));
  PLIMSOLL_TRY_VOID(verify_side_file(directory / kFeatureIdsFile, header.id_table, buffer));
  PLIMSOLL_TRY_VOID(verify_side_file(directory / kFeatureGroupsFile, header.group_table, buffer));
  PLIMSOLL_TRY_VOID(IdIndex::verify(directory, kFeatureIndexName, header.ids));
  return verify_records(directory, header, progress, buffer);
}

}  // namespace plimsoll
