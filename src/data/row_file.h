// SPDX-License-Identifier: Apache-2.0
//
// RowFile: a file of rows with an index behind them and a header of 4096 bytes, as it is read.
//
// A TokenSet and an ImageSet are such files: what a row's bytes mean, and what the header counts,
// is theirs. RowWriter (row_writer.h) makes one.
// Reading order: docs/formats/token_set.md, this file, row_file.cpp, row_writer.h.
//
// Threads: thread-safe once open.   Memory: a descriptor, and what the file says of itself.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <span>
#include <string>

#include "os/file.h"
#include "plimsoll/result.h"

namespace plimsoll {

inline constexpr std::int64_t kRowFileHeaderBytes = 4096;
inline constexpr std::int64_t kRowFileFingerprintBytes = 64;
inline constexpr std::int64_t kRowFileAboutMost = 64 << 20;  ///< Some 80 bytes an input.
inline constexpr std::size_t kRowCounts = 5;  ///< The second of them is that of the rows.

/// A kind of file.
struct RowFileKind {
  std::array<char, 8> magic;
  const char* name;   ///< "token set".
  const char* doing;  ///< "is making this token set".
};

/// Where a row's bytes are, in the index.
struct RowEntry {
  std::int64_t offset{0};   ///< In the file.
  std::uint32_t length{0};  ///< Whatever the kind counts.
  std::uint32_t crc{0};     ///< row_crc().
};
static_assert(sizeof(RowEntry) == 16);

/// A row's checksum, of that of its bytes: its number and its entry are part of it.
[[nodiscard]] std::uint32_t row_crc(std::int64_t row, const RowEntry& entry,
                                    std::uint32_t crc_of_bytes) noexcept;

/// What the header says.
struct RowFileHeader {
  std::uint32_t unit{0};  ///< The kind's.
  std::array<std::int64_t, kRowCounts> counts{};
  std::int64_t index_at{0};
  std::int64_t about_at{0};
  std::int64_t about_bytes{0};
  std::uint32_t about_crc{0};
  std::string fingerprint{};

  [[nodiscard]] std::int64_t rows() const noexcept { return counts[1]; }
};

using RowFileHeaderBytes = std::array<std::byte, kRowFileHeaderBytes>;
[[nodiscard]] RowFileHeaderBytes row_file_header(const RowFileKind& kind,
                                                 const RowFileHeader& header) noexcept;

/// Whether the file begins as one of this kind does.
[[nodiscard]] bool is_row_file(const std::filesystem::path& path, const RowFileKind& kind);

class RowFile {
 public:
  /// Reads the header, whose counts the kind is to check, and what the file says of itself.
  /// Errors: kNotFound, kCorrupt, kIo.
  static Result<RowFile> open(const std::filesystem::path& path, const RowFileKind& kind);
  RowFile() = default;

  [[nodiscard]] const RowFileHeader& header() const noexcept { return header_; }
  [[nodiscard]] const std::string& about() const noexcept { return about_; }
  [[nodiscard]] std::int64_t disk_bytes() const noexcept { return disk_bytes_; }
  [[nodiscard]] std::int64_t rows() const noexcept { return header_.rows(); }

  /// A row's entry: `offset` is within the rows.
  /// Errors: kInvalidArgument (no such row), kCorrupt naming the row, kIo.
  [[nodiscard]] Result<RowEntry> entry(std::int64_t row) const;
  /// Whether so many bytes behind `offset` are still within the rows.
  [[nodiscard]] bool holds(std::int64_t offset, std::int64_t bytes) const noexcept {
    return offset >= kRowFileHeaderBytes && bytes >= 0 && bytes <= header_.index_at &&
           offset <= header_.index_at - bytes;
  }
  /// Errors: kCorrupt, kIo.
  Result<void> read_at(std::int64_t offset, std::span<std::byte> out) const {
    return file_.read_at(offset, out);
  }
  /// An error that names the file. Errors: kCorrupt.
  [[nodiscard]] tl::unexpected<Error> corrupt(const std::string& what) const;
  [[nodiscard]] std::string name() const { return file_.path().string(); }

 private:
  File file_{};
  RowFileHeader header_{};
  std::string about_{};
  std::int64_t disk_bytes_{0};
};

}  // namespace plimsoll
