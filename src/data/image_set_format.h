// SPDX-License-Identifier: Apache-2.0
//
// What an image set is among files of rows: what its header counts, and how a row begins.
//
// Reading order: docs/formats/image_set.md, row_file.h, this file, image_writer.cpp, image_set.cpp.
//
// Threads: pure functions.   Memory: none of its own.
#pragma once

#include <array>
#include <cstdint>
#include <filesystem>
#include <vector>

#include "data/row_file.h"
#include "plimsoll/image_set.h"

namespace plimsoll {

inline constexpr RowFileKind kImageSetKind{.magic = {'P', 'L', 'I', 'M', 'A', 'G', 'E', 'S'},
                                           .name = "image set",
                                           .doing = "is making this image set"};
inline constexpr std::int64_t kRowHeadMost = 64 << 20;  ///< Places and messages of a row.
inline constexpr std::int64_t kImageBytesMost = 0xFFFFFFFF;

/// An image of a row, as it lies in the file.
struct StoredPlace {
  std::uint32_t bytes{0};
  std::uint32_t crc{0};
  std::uint32_t width{0};
  std::uint32_t height{0};
};
static_assert(sizeof(StoredPlace) == 16);

/// Resizes, never the old elements beside the new ones: nobody wants them any more.
template <class T>
void resize_anew(std::vector<T>& elements, std::int64_t size) {
  if (static_cast<std::size_t>(size) > elements.capacity()) {
    elements = std::vector<T>();
  }
  elements.resize(static_cast<std::size_t>(size));
}

/// Whether the file begins as that of an image set does.
[[nodiscard]] inline bool is_image_set(const std::filesystem::path& path) {
  return is_row_file(path, kImageSetKind);
}

/// What the header counts, in its order.
[[nodiscard]] inline std::array<std::int64_t, kRowCounts> image_counts(
    const ImageSetInfo& info) noexcept {
  return {info.work_bytes_max, info.rows, info.images, info.encoded_bytes, info.decoded_bytes};
}
[[nodiscard]] inline ImageSetInfo image_info(const std::array<std::int64_t, kRowCounts>& counts) {
  return {.rows = counts[1],
          .images = counts[2],
          .encoded_bytes = counts[3],
          .decoded_bytes = counts[4],
          .work_bytes_max = counts[0]};
}

}  // namespace plimsoll
