// SPDX-License-Identifier: Apache-2.0
//
// Tables: arrays of 4- or 8-byte integers in self-checking pages (block checksums, ids, groups).
//
//   page = 4088 bytes of entries | u32 page number | u32 crc32c of the 4092 bytes before
//
// A table is either copied into the slab whole, pages and all, or read page by page through the
// store's block cache; the bytes are the same, so is the arithmetic below.
//
// Threads: pure functions; FeatureTableWriter is single-owner.
// Memory:  the writer uses the buffer it is given.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <filesystem>
#include <span>

#include "os/file.h"
#include "plimsoll/result.h"
#include "store/feature_format.h"

namespace plimsoll {

inline constexpr std::int64_t kTablePayload = 4088;

[[nodiscard]] constexpr std::int64_t feature_table_per_page(std::int64_t width) noexcept {
  return kTablePayload / width;
}

/// File size of a table of `entries` integers of `width` bytes (4 or 8).
[[nodiscard]] constexpr std::int64_t feature_table_bytes(std::int64_t entries,
                                                         std::int64_t width) noexcept {
  const std::int64_t per_page = feature_table_per_page(width);
  return (entries + per_page - 1) / per_page * kFeaturePage;
}

/// Byte offset in the file of entry `index`.
[[nodiscard]] constexpr std::int64_t feature_table_offset(std::int64_t index,
                                                          std::int64_t width) noexcept {
  const std::int64_t per_page = feature_table_per_page(width);
  return index / per_page * kFeaturePage + index % per_page * width;
}

[[nodiscard]] inline std::uint64_t load_table_entry(const std::byte* at,
                                                    std::int64_t width) noexcept {
  if (width == 4) {
    std::uint32_t narrow = 0;
    std::memcpy(&narrow, at, sizeof narrow);
    return narrow;
  }
  std::uint64_t wide = 0;
  std::memcpy(&wide, at, sizeof wide);
  return wide;
}

/// Compares number and checksum of consecutive pages. Errors: kCorrupt naming file and page.
Result<void> check_table_pages(std::span<const std::byte> pages, std::int64_t first_page,
                               const std::filesystem::path& path);

/// CRC-32C over the pages' own checksums, continuing from `seed`: the SideFile::crc of a table.
/// (Over whole pages it would say nothing: the CRC of data followed by its own CRC is constant.)
[[nodiscard]] std::uint32_t fold_table_crc(std::span<const std::byte> pages,
                                           std::uint32_t seed) noexcept;

inline constexpr std::int64_t kTableBuffer = 32 << 10;  // Of a table being written, in bytes.

/// Writes a table from a stream of integers.
class FeatureTableWriter {
 public:
  /// `buffer` is the caller's, at least one page, aligned to 64; it must stay until finish().
  static Result<FeatureTableWriter> create(const std::filesystem::path& path, std::int64_t width,
                                           std::span<std::byte> buffer);
  /// Writes no file: for the SideFile that a table would have.
  static FeatureTableWriter counting(std::int64_t width, std::span<std::byte> buffer);

  Result<void> append(std::uint64_t value);
  /// Writes the last page and syncs.
  Result<SideFile> finish();
  [[nodiscard]] std::int64_t entries() const noexcept { return entries_; }

 private:
  void seal_page();
  Result<void> flush();

  File file_;  // Not open when only counting.
  std::span<std::byte> buffer_;
  std::int64_t width_{0};
  std::int64_t entries_{0};
  std::int64_t in_page_{0};   // Entries in the page being filled.
  std::int64_t pages_{0};     // Sealed pages, on disk or in the buffer.
  std::int64_t buffered_{0};  // Sealed pages in the buffer.
  std::uint32_t crc_{0};
};

}  // namespace plimsoll
