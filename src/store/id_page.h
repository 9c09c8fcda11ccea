// SPDX-License-Identifier: Apache-2.0
//
// One page of an id file: a 16-byte header, then ids (and, in the sorted file, ordinals) or spans.
//
//   0  u32 magic ("PIDS" sorted, "PIDO" by ordinal, "PIDR" spans)
//   4  u32 crc32c of bytes 8 … 4095   8  u32 page number   12  u32 count
//   16 i64 ids[]   sorted only, at 2736: u32 ordinals[340]     spans: (i64 id, i64 ordinal)[255]
//
// Threads: pure functions; open_id_pages() reads a size.   Memory: none.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <filesystem>
#include <span>

#include <fmt/format.h>

#include "base/check.h"
#include "base/crc32c.h"
#include "base/round.h"
#include "os/file.h"
#include "plimsoll/result.h"
#include "store/id_index.h"

namespace plimsoll {

enum class IdPageKind : std::uint32_t {
  kSorted = 0x53444950U,
  kOrder = 0x4F444950U,
  kSpans = 0x52444950U
};

inline constexpr std::int64_t kIdPageHeaderBytes = 16;
inline constexpr std::int64_t kOrdinalsAt = kIdPageHeaderBytes + kIdsPerSortedPage * 8;
static_assert(kOrdinalsAt + kIdsPerSortedPage * 4 == kIdPageBytes);
static_assert(kIdPageHeaderBytes + kIdsPerOrderPage * 8 == kIdPageBytes);
static_assert(kIdPageHeaderBytes + kIdSpansPerPage * 16 == kIdPageBytes);

struct IdPageHeader {
  std::uint32_t magic;
  std::uint32_t crc;
  std::uint32_t number;
  std::uint32_t count;
};
static_assert(sizeof(IdPageHeader) == kIdPageHeaderBytes);

inline std::int64_t ids_per_page(IdPageKind kind) noexcept {
  return kind == IdPageKind::kSorted  ? kIdsPerSortedPage
         : kind == IdPageKind::kOrder ? kIdsPerOrderPage
                                      : kIdSpansPerPage;
}

/// Pages that hold so many ids, or spans.
inline std::int64_t id_pages(IdPageKind kind, std::int64_t count) noexcept {
  return divide_up(count, ids_per_page(kind));
}

inline IdPageHeader id_page_header(std::span<const std::byte> page) noexcept {
  IdPageHeader header;
  std::memcpy(&header, page.data(), sizeof header);
  return header;
}

inline std::int64_t id_page_count(std::span<const std::byte> page) noexcept {
  return id_page_header(page).count;
}

inline std::int64_t id_page_id(std::span<const std::byte> page, std::int64_t i) noexcept {
  std::int64_t id = 0;
  std::memcpy(&id, page.data() + kIdPageHeaderBytes + i * 8, sizeof id);
  return id;
}

/// Of a sorted page.
inline std::uint32_t id_page_ordinal(std::span<const std::byte> page, std::int64_t i) noexcept {
  std::uint32_t ordinal = 0;
  std::memcpy(&ordinal, page.data() + kOrdinalsAt + i * 4, sizeof ordinal);
  return ordinal;
}

/// The ordinal of `id` in a sorted page, or −1.
inline std::int64_t search_id_page(std::span<const std::byte> page, std::int64_t id) noexcept {
  std::int64_t low = 0;
  for (std::int64_t size = id_page_count(page); size > 1;) {
    const std::int64_t half = size / 2;
    low = id_page_id(page, low + half) <= id ? low + half : low;
    size -= half;
  }
  return id_page_id(page, low) == id ? std::int64_t{id_page_ordinal(page, low)} : -1;
}

/// Fills in the header of a page whose body is complete.
inline void seal_id_page(std::span<std::byte> page, IdPageKind kind, std::int64_t number,
                         std::int64_t count) noexcept {
  IdPageHeader header{static_cast<std::uint32_t>(kind), 0, static_cast<std::uint32_t>(number),
                      static_cast<std::uint32_t>(count)};
  std::memcpy(page.data(), &header, sizeof header);
  header.crc = crc32c(page.subspan(8));
  std::memcpy(page.data(), &header, sizeof header);
}

/// Errors: kCorrupt naming the file and the page.
inline Result<void> check_id_page(std::span<const std::byte> page, IdPageKind kind,
                                  std::int64_t number, const std::filesystem::path& path) {
  const IdPageHeader header = id_page_header(page);
  const std::int64_t most = ids_per_page(kind);
  if (header.magic != static_cast<std::uint32_t>(kind) || header.number != number ||
      header.count == 0 || header.count > most || header.crc != crc32c(page.subspan(8))) {
    return fail(ErrorCode::kCorrupt,
                fmt::format("{}: page {} fails its checksum", path.string(), number));
  }
  return {};
}

/// A file of that many pages, to read. Errors: kNotFound, kIo, kCorrupt (another size).
inline Result<File> open_id_pages(const std::filesystem::path& path, std::int64_t pages) {
  PLIMSOLL_TRY(auto file, File::open(path, FileMode::kRead));
  PLIMSOLL_TRY(const std::int64_t size, file.size());
  if (size != pages * kIdPageBytes) {
    return fail(ErrorCode::kCorrupt, fmt::format("{}: {} bytes, expected {}", path.string(), size,
                                                 pages * kIdPageBytes));
  }
  return file;
}

}  // namespace plimsoll
