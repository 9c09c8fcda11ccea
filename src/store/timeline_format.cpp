// SPDX-License-Identifier: Apache-2.0
#include "store/timeline_format.h"

#include <algorithm>
#include <cstring>

#include "base/crc32c.h"
#include "base/philox.h"

namespace plimsoll {
namespace {

constexpr std::uint32_t kExtentMagic = 0x58454C50U;  // "PLEX"
constexpr std::int64_t kExtentBytesMost = 256 << 10;
constexpr std::int64_t kChunkBytesLeast = 32 << 10;

std::uint32_t record_crc(std::span<const std::byte> record) {
  const std::uint32_t head = crc32c(record.first(offsetof(RowHeader, crc)));
  return crc32c(record.subspan(sizeof(RowHeader)), head);
}

std::uint32_t header_crc(const ExtentHeader& header) {
  return crc32c(std::as_bytes(std::span(&header, 1)).subspan(offsetof(ExtentHeader, owner)));
}

}  // namespace

std::int64_t extent_bytes_most(std::int64_t record_bytes) noexcept {
  return std::max(kExtentBytesMost, extent_bytes(record_bytes, 1));
}

std::int64_t chunk_bytes_least(std::int64_t record_bytes) noexcept {
  return std::max(kChunkBytesLeast, extent_bytes(record_bytes, 1));
}

std::uint64_t extent_owner(const TimelineShape& shape, std::uint64_t fingerprint,
                           const EpochKey& key, std::int64_t bucket) noexcept {
  std::uint64_t epoch =
      mix64(mix64(fingerprint ^ key.seed) ^ static_cast<std::uint64_t>(key.epoch));
  if (shape.grows) {
    epoch = mix64(epoch ^ static_cast<std::uint64_t>(key.rows));
  }
  return mix64(epoch ^ static_cast<std::uint64_t>(bucket));
}

std::uint64_t extent_mark(std::uint32_t index, std::uint32_t crc) noexcept {
  return mix64(std::uint64_t{index} << 32 | crc);
}

std::uint32_t seal_extent(std::int64_t record_bytes, std::uint64_t owner, std::uint32_t index,
                          std::uint32_t rows, std::span<std::byte> bytes) noexcept {
  ExtentHeader header{
      .magic = kExtentMagic, .crc = 0, .owner = owner, .index = index, .rows = rows, .reserved = 0};
  const auto size = static_cast<std::size_t>(record_bytes);
  std::uint32_t crc = header_crc(header);
  std::size_t at = kExtentHeaderBytes;
  for (std::uint32_t row = 0; row < rows; ++row, at += size) {
    const std::uint32_t own = record_crc(bytes.subspan(at, size));
    std::memcpy(bytes.data() + at + offsetof(RowHeader, crc), &own, sizeof own);
    crc = crc32c(std::as_bytes(std::span(&own, 1)), crc);
  }
  std::memset(bytes.data() + at, 0, bytes.size() - at);
  header.crc = crc;
  std::memcpy(bytes.data(), &header, sizeof header);
  return crc;
}

bool row_is_sound(std::span<const std::byte> record) noexcept {
  RowHeader header;
  std::memcpy(&header, record.data(), sizeof header);
  return header.crc == record_crc(record);
}

bool extent_is_sound(std::int64_t record_bytes, std::uint64_t owner, std::uint32_t index,
                     std::uint32_t rows, std::span<const std::byte> bytes,
                     std::uint64_t& mark) noexcept {
  ExtentHeader header;
  std::memcpy(&header, bytes.data(), sizeof header);
  if (header.magic != kExtentMagic || header.owner != owner || header.index != index ||
      header.rows != rows) {
    return false;
  }
  const auto size = static_cast<std::size_t>(record_bytes);
  std::uint32_t crc = header_crc(header);
  std::size_t at = kExtentHeaderBytes;
  for (std::uint32_t row = 0; row < rows; ++row, at += size) {
    const auto record = bytes.subspan(at, size);
    if (!row_is_sound(record)) {
      return false;
    }
    crc = crc32c(record.subspan(offsetof(RowHeader, crc), sizeof(RowHeader::crc)), crc);
  }
  mark = extent_mark(index, crc);
  return crc == header.crc;
}

}  // namespace plimsoll
