// SPDX-License-Identifier: Apache-2.0
#include "data/row_file.h"

#include <algorithm>
#include <cstring>
#include <system_error>
#include <utility>

#include <fmt/core.h>

#include "base/check.h"
#include "base/crc32c.h"

namespace plimsoll {
namespace {

constexpr std::uint32_t kRowFileVersion = 1;

// As it lies in the file, little-endian; the rest of the header is zeros.
struct StoredRowHeader {
  std::array<char, 8> magic{};
  std::uint32_t version{0};
  std::uint32_t unit{0};
  std::array<std::int64_t, kRowCounts> counts{};
  std::int64_t index_at{0};
  std::int64_t about_at{0};
  std::int64_t about_bytes{0};
  std::uint32_t about_crc{0};
  std::uint32_t crc{0};  // Of the whole header, itself as 0.
  std::array<char, kRowFileFingerprintBytes> fingerprint{};
};
static_assert(sizeof(StoredRowHeader) == 152);

bool sensible_places(const StoredRowHeader& s, std::int64_t file_bytes) noexcept {
  constexpr std::int64_t kMost = std::int64_t{1} << 56;
  const auto number = [](std::int64_t value) { return value >= 0 && value <= kMost; };
  return std::all_of(s.counts.begin(), s.counts.end(), number) && number(s.index_at) &&
         number(s.about_at) && number(s.about_bytes) && s.index_at >= kRowFileHeaderBytes &&
         s.index_at % 16 == 0 && s.about_at == s.index_at + s.counts[1] * 16 &&
         s.about_bytes <= kRowFileAboutMost && s.about_at + s.about_bytes == file_bytes;
}

// Checks the header and that the parts fill the file.
Result<RowFileHeader> parse_row_header(const RowFileHeaderBytes& bytes, std::int64_t file_bytes,
                                       const std::string& name, const RowFileKind& kind) {
  constexpr const char* kAdvice = "import the files again";
  StoredRowHeader stored;
  std::memcpy(&stored, bytes.data(), sizeof(stored));
  if (stored.magic != kind.magic) {
    return fail(ErrorCode::kCorrupt, fmt::format("{}: no {}", name, kind.name), kAdvice);
  }
  if (stored.version != kRowFileVersion) {
    return fail(ErrorCode::kCorrupt,
                fmt::format("{}: a {} of version {}; this Plimsoll reads version {}", name,
                            kind.name, stored.version, kRowFileVersion),
                kAdvice);
  }
  RowFileHeaderBytes whole = bytes;
  const std::uint32_t crc = std::exchange(stored.crc, 0);
  std::memcpy(whole.data(), &stored, sizeof(stored));
  if (crc32c(whole) != crc || !sensible_places(stored, file_bytes)) {
    return fail(ErrorCode::kCorrupt, name + ": the header's checksum or sizes do not match",
                kAdvice);
  }
  const auto end = std::find(stored.fingerprint.begin(), stored.fingerprint.end(), '\0');
  return RowFileHeader{.unit = stored.unit,
                       .counts = stored.counts,
                       .index_at = stored.index_at,
                       .about_at = stored.about_at,
                       .about_bytes = stored.about_bytes,
                       .about_crc = stored.about_crc,
                       .fingerprint = std::string(stored.fingerprint.begin(), end)};
}

}  // namespace

std::uint32_t row_crc(std::int64_t row, const RowEntry& entry,
                      std::uint32_t crc_of_bytes) noexcept {
  const std::array<std::int64_t, 3> numbers{row, entry.offset,
                                            static_cast<std::int64_t>(entry.length)};
  return crc32c(std::as_bytes(std::span(numbers)), crc_of_bytes);
}

bool is_row_file(const std::filesystem::path& path, const RowFileKind& kind) {
  std::error_code status;
  if (!std::filesystem::is_regular_file(path, status)) {
    return false;
  }
  std::array<char, 8> magic{};
  const auto file = File::open(path, FileMode::kRead);
  return file && file->read_at(0, std::as_writable_bytes(std::span(magic))) && magic == kind.magic;
}

RowFileHeaderBytes row_file_header(const RowFileKind& kind, const RowFileHeader& header) noexcept {
  StoredRowHeader stored{.magic = kind.magic,
                         .version = kRowFileVersion,
                         .unit = header.unit,
                         .counts = header.counts,
                         .index_at = header.index_at,
                         .about_at = header.about_at,
                         .about_bytes = header.about_bytes,
                         .about_crc = header.about_crc};
  std::copy_n(header.fingerprint.begin(),
              std::min(header.fingerprint.size(), stored.fingerprint.size()),
              stored.fingerprint.begin());
  RowFileHeaderBytes bytes{};
  std::memcpy(bytes.data(), &stored, sizeof(stored));
  stored.crc = crc32c(bytes);
  std::memcpy(bytes.data(), &stored, sizeof(stored));
  return bytes;
}

Result<RowFile> RowFile::open(const std::filesystem::path& path, const RowFileKind& kind) {
  RowFile file;
  PLIMSOLL_TRY(file.file_, File::open(path, FileMode::kRead));
  PLIMSOLL_TRY(file.disk_bytes_, file.file_.size());
  if (file.disk_bytes_ < kRowFileHeaderBytes) {
    return fail(ErrorCode::kCorrupt, fmt::format("{}: no {}", path.string(), kind.name),
                "import the files again");
  }
  RowFileHeaderBytes bytes{};
  PLIMSOLL_TRY_VOID(file.file_.read_at(0, bytes));
  PLIMSOLL_TRY(file.header_, parse_row_header(bytes, file.disk_bytes_, path.string(), kind));
  file.about_.resize(static_cast<std::size_t>(file.header_.about_bytes));
  PLIMSOLL_TRY_VOID(
      file.file_.read_at(file.header_.about_at, std::as_writable_bytes(std::span(file.about_))));
  if (crc32c(std::as_bytes(std::span(file.about_))) != file.header_.about_crc) {
    return file.corrupt("the checksum of what it says of itself does not match");
  }
  return file;
}

Result<RowEntry> RowFile::entry(std::int64_t row) const {
  if (row < 0 || row >= rows()) {
    return fail(ErrorCode::kInvalidArgument,
                fmt::format("{}: there is no row {} of {}", name(), row, rows()));
  }
  RowEntry entry;
  PLIMSOLL_TRY_VOID(
      file_.read_at(header_.index_at + row * 16, std::as_writable_bytes(std::span(&entry, 1))));
  if (!holds(entry.offset, 0)) {
    return corrupt(fmt::format("the index entry of row {} is damaged", row));
  }
  return entry;
}

tl::unexpected<Error> RowFile::corrupt(const std::string& what) const {
  return fail(ErrorCode::kCorrupt, fmt::format("{}: {}", name(), what),
              "import the files again, or restore the file");
}

}  // namespace plimsoll
