// SPDX-License-Identifier: Apache-2.0
//
// decode_image: an encoded image (JPEG, PNG, WebP) becomes 8-bit RGB, as Pillow has it;
// resize_image and scale_image make of it what a model takes.
//
// What decoding takes is known from the header, before anything is decoded. The pixels are those of
// ImageOps.exif_transpose(Image.open(file)).convert("RGB") of Pillow, bit for bit: alpha is left
// out, CMYK is converted without a profile, 16 bits become 8, EXIF's orientation is applied, and of
// an animation the first frame is taken. A truncated or damaged file is an error, never a grey
// rest. Reading order: this file, src/data/image_format.h, image.cpp.
//
// Threads: pure functions.   Memory: ImageInfo::scratch_bytes, while decoding.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

#include "plimsoll/result.h"

namespace plimsoll {

/// Pixels of an image at most, by default: those that Pillow warns of.
inline constexpr std::int64_t kImagePixelsMost = 89'478'485;

enum class ImageFormat : std::uint8_t { kJpeg, kPng, kWebp };
[[nodiscard]] const char* image_format_name(ImageFormat format) noexcept;

/// What an image's header says.
struct ImageInfo {
  ImageFormat format{ImageFormat::kJpeg};
  std::int64_t width{0};  ///< Of the pixels that decode_image() gives: upright.
  std::int64_t height{0};
  int orientation{1};             ///< EXIF's: 1 to 8, from 5 on with the sides exchanged.
  std::int64_t scratch_bytes{0};  ///< Most that decoding takes beside the pixels.

  [[nodiscard]] std::int64_t pixel_bytes() const noexcept { return width * height * 3; }
};

/// Reads the header.
/// Errors: kInvalidArgument for what is none of the formats, for a format that this build has not,
///         and for more than `pixels_max` pixels; kCorrupt.
Result<ImageInfo> read_image_info(std::span<const std::byte> encoded,
                                  std::int64_t pixels_max = kImagePixelsMost);

/// Decodes. `info`: what read_image_info() said of the same bytes. Shape: pixels [height, width,
/// 3]. Errors: kCorrupt (damaged or truncated); kInvalidArgument (`pixels` of another size).
Result<void> decode_image(std::span<const std::byte> encoded, const ImageInfo& info,
                          std::span<std::uint8_t> pixels);

/// How pixels are weighed, by Pillow's names.
enum class ImageFilter : std::uint8_t { kBox, kBilinear, kHamming, kBicubic, kLanczos };

/// An image's size in pixels.
struct ImageSize {
  std::int64_t width{0};
  std::int64_t height{0};
  [[nodiscard]] std::int64_t pixel_bytes() const noexcept { return width * height * 3; }
};

/// Bytes that resize_image() takes beside its arguments.
[[nodiscard]] std::int64_t resize_scratch_bytes(ImageSize from, ImageSize to) noexcept;

/// Resizes as Image.resize() of Pillow 13 does with one of its convolutions, bit for bit.
/// Shape: pixels [from.height, from.width, 3], out [to.height, to.width, 3].
/// Errors: kInvalidArgument (sides of 0 or above 2^24, spans of other sizes).
/// Source: the two passes of 22-bit fixed point of Pillow's documentation of resampling filters.
Result<void> resize_image(std::span<const std::uint8_t> pixels, ImageSize from,
                          std::span<std::uint8_t> out, ImageSize to, ImageFilter filter);

/// Looks each value up in its channel's table, and puts the channels apart.
/// Shape: pixels [n, 3], table [3, 256], out [3, n]. Errors: kInvalidArgument (other sizes).
Result<void> scale_image(std::span<const std::uint8_t> pixels, std::span<const float> table,
                         std::span<float> out);

}  // namespace plimsoll
