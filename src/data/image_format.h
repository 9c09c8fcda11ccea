// SPDX-License-Identifier: Apache-2.0
//
// What the decoders of the formats share: StoredImage, a header as it is stored, and PixelRows, the
// place of decoded rows.
//
// Each format has two functions: one reads the header, the other decodes into rows.
// Reading order: include/plimsoll/image.h, this file, image.cpp, image_jpeg.cpp, image_png.cpp,
// image_webp.cpp.
//
// Threads: pure functions.   Memory: StoredImage::scratch_bytes, while decoding.
#pragma once

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "plimsoll/image.h"

namespace plimsoll {

using EncodedImage = std::span<const std::byte>;

/// A header, before the image is turned upright.
struct StoredImage {
  std::int64_t width{0};
  std::int64_t height{0};
  std::int64_t scratch_bytes{0};
  bool whole{false};         ///< A whole image is held beside the pixels, too.
  bool whole_turned{false};  ///< The same where it is not stored upright.
  std::string exif{};        ///< The TIFF that EXIF is, "" for none.
  std::string_view xmp{};
  std::string xmp_unpacked{};  ///< Where it is packed in the file.
};

/// Where stored row y, pixel x goes: start + x * step_x + y * step_y, in pixels.
class PixelRows {
 public:
  /// `width`, `height`: as stored. Requires: room for width * height pixels.
  PixelRows(std::span<std::uint8_t> pixels, std::int64_t width, std::int64_t height,
            int orientation);

  /// The rows lie one behind the other as they are stored.
  [[nodiscard]] bool upright() const noexcept { return step_x_ == 1 && step_y_ == width_; }
  [[nodiscard]] std::int64_t width() const noexcept { return width_; }
  [[nodiscard]] std::int64_t height() const noexcept { return height_; }
  [[nodiscard]] std::uint8_t* data() const noexcept { return pixels_.data(); }

  /// Puts row y. Shape: rgb [width, 3].
  void put(std::int64_t y, const std::uint8_t* rgb) const noexcept;
  /// The same of one value a pixel. Shape: grey [width].
  void put_grey(std::int64_t y, const std::uint8_t* grey) const noexcept;

 private:
  [[nodiscard]] std::uint8_t* at(std::int64_t y) const noexcept {
    return pixels_.data() + 3 * (start_ + y * step_y_);
  }
  std::span<std::uint8_t> pixels_;
  std::int64_t width_;
  std::int64_t height_;
  std::int64_t start_{0};
  std::int64_t step_x_{1};
  std::int64_t step_y_{0};
};

[[nodiscard]] inline tl::unexpected<Error> damaged_image(const std::string& what) {
  return fail(ErrorCode::kCorrupt, "damaged image: " + what,
              "get the file again, or have undecodable images left out");
}
[[nodiscard]] inline tl::unexpected<Error> truncated_image() {
  return damaged_image("the file is truncated");
}

// Numbers in files. Requires: they are within.
[[nodiscard]] inline std::uint32_t image_number(EncodedImage bytes, std::size_t at,
                                                std::size_t size, bool big_endian) noexcept {
  std::uint32_t value = 0;
  for (std::size_t i = 0; i < size; ++i) {
    const std::size_t from = at + (big_endian ? i : size - 1 - i);
    value = value << 8U | std::to_integer<std::uint32_t>(bytes[from]);
  }
  return value;
}
[[nodiscard]] inline std::string_view text_of(EncodedImage bytes) noexcept {
  return {reinterpret_cast<const char*>(bytes.data()), bytes.size()};
}

Result<StoredImage> read_jpeg_header(EncodedImage encoded);
Result<void> decode_jpeg(EncodedImage encoded, const PixelRows& rows);
Result<StoredImage> read_png_header(EncodedImage encoded);
Result<void> decode_png(EncodedImage encoded, const PixelRows& rows);
Result<StoredImage> read_webp_header(EncodedImage encoded);
Result<void> decode_webp(EncodedImage encoded, const PixelRows& rows);

}  // namespace plimsoll
