// SPDX-License-Identifier: Apache-2.0
//
// The header of an image of any format: its size, its orientation, and what decoding it takes.
//
// Reading order: include/plimsoll/image.h, image_format.h, this file.
//
// Threads: pure functions.   Memory: a copy of EXIF's bytes.
#include "plimsoll/image.h"

#include <cstring>
#include <utility>

#include <fmt/core.h>

#include "base/check.h"
#include "data/image_format.h"

namespace plimsoll {
namespace {

constexpr int kUpright = 1;

// The tag "Orientation" of a TIFF's first folder; the last one where there are several.
std::optional<std::int64_t> exif_orientation(EncodedImage tiff) {
  constexpr std::string_view kMark("Exif\0\0", 6);
  for (int times = 0; times < 2 && text_of(tiff).starts_with(kMark); ++times) {
    tiff = tiff.subspan(kMark.size());
  }
  const bool big_endian = text_of(tiff).starts_with(std::string_view("MM\0*", 4));
  if (tiff.size() < 8 || !(big_endian || text_of(tiff).starts_with(std::string_view("II*\0", 4)))) {
    return std::nullopt;
  }
  const auto number = [&](std::size_t at, std::size_t size) {
    return image_number(tiff, at, size, big_endian);
  };
  std::size_t at = number(4, 4);
  if (at > tiff.size() || tiff.size() - at < 2) {
    return std::nullopt;
  }
  constexpr std::uint32_t kOrientation = 0x0112;
  constexpr std::uint32_t kShort = 3;
  constexpr std::uint32_t kLong = 4;
  std::optional<std::int64_t> found;
  std::uint32_t entries = number(at, 2);
  for (at += 2; entries > 0 && tiff.size() - at >= 12; --entries, at += 12) {
    const std::uint32_t type = number(at + 2, 2);
    const std::uint32_t count = number(at + 4, 4);
    if (number(at, 2) != kOrientation || count == 0 || (type != kShort && type != kLong)) {
      continue;
    }
    const std::size_t size = type == kShort ? 2 : 4;
    const std::size_t value = count * size <= 4 ? at + 8 : number(at + 8, 4);
    if (value <= tiff.size() && size <= tiff.size() - value) {
      found = number(value, size);
    }
  }
  return found;
}

// As tiff:Orientation="6" or <tiff:Orientation>6<.
std::optional<std::int64_t> xmp_orientation(std::string_view xmp) {
  constexpr std::string_view kName = "tiff:Orientation";
  for (std::size_t at = xmp.find(kName); at != std::string_view::npos;
       at = xmp.find(kName, at + 1)) {
    std::string_view rest = xmp.substr(at + kName.size());
    rest.remove_prefix(rest.starts_with("=\"") ? 2 : rest.starts_with(">") ? 1 : rest.size());
    if (!rest.empty() && rest[0] >= '0' && rest[0] <= '9') {
      return rest[0] - '0';
    }
  }
  return std::nullopt;
}

int orientation_of(const StoredImage& stored) {
  auto found = exif_orientation(std::as_bytes(std::span(stored.exif)));
  if (!found) {
    found = xmp_orientation(stored.xmp.empty() ? stored.xmp_unpacked : stored.xmp);
  }
  return found && *found >= 1 && *found <= 8 ? static_cast<int>(*found) : kUpright;
}

std::optional<ImageFormat> format_of(EncodedImage encoded) {
  const std::string_view text = text_of(encoded);
  if (text.starts_with("\xFF\xD8\xFF")) {
    return ImageFormat::kJpeg;
  }
  if (text.starts_with("\x89PNG\r\n\x1A\n")) {
    return ImageFormat::kPng;
  }
  if (text.starts_with("RIFF") && text.size() >= 12 && text.substr(8, 4) == "WEBP") {
    return ImageFormat::kWebp;
  }
  return std::nullopt;
}

}  // namespace

const char* image_format_name(ImageFormat format) noexcept {
  return format == ImageFormat::kJpeg ? "JPEG" : format == ImageFormat::kPng ? "PNG" : "WebP";
}

PixelRows::PixelRows(std::span<std::uint8_t> pixels, std::int64_t width, std::int64_t height,
                     int orientation)
    : pixels_(pixels), width_(width), height_(height), step_y_(width) {
  PLIMSOLL_CHECK(static_cast<std::int64_t>(pixels.size()) == width * height * 3, "other pixels");
  if (orientation >= 5) {  // The sides are exchanged.
    step_x_ = height;
    step_y_ = 1;
  }
  const bool from_right = orientation == 2 || orientation == 3 || orientation >= 7;
  const bool from_below =
      orientation == 3 || orientation == 4 || orientation == 6 || orientation == 7;
  if (from_right) {
    start_ += (width - 1) * step_x_;
    step_x_ = -step_x_;
  }
  if (from_below) {
    start_ += (height - 1) * step_y_;
    step_y_ = -step_y_;
  }
}

void PixelRows::put(std::int64_t y, const std::uint8_t* rgb) const noexcept {
  std::uint8_t* out = at(y);
  if (step_x_ == 1) {
    std::memcpy(out, rgb, static_cast<std::size_t>(width_) * 3);
    return;
  }
  for (std::int64_t x = 0; x < width_; ++x, rgb += 3, out += 3 * step_x_) {
    std::memcpy(out, rgb, 3);
  }
}

void PixelRows::put_grey(std::int64_t y, const std::uint8_t* grey) const noexcept {
  std::uint8_t* out = at(y);
  for (std::int64_t x = 0; x < width_; ++x, out += 3 * step_x_) {
    std::memset(out, grey[x], 3);
  }
}

Result<ImageInfo> read_image_info(EncodedImage encoded, std::int64_t pixels_max) {
  const auto format = format_of(encoded);
  if (!format) {
    return fail(ErrorCode::kInvalidArgument, "neither JPEG, PNG nor WebP",
                "convert it to one of them, or have undecodable images left out");
  }
  PLIMSOLL_TRY(const StoredImage stored, *format == ImageFormat::kJpeg ? read_jpeg_header(encoded)
                                         : *format == ImageFormat::kPng
                                             ? read_png_header(encoded)
                                             : read_webp_header(encoded));
  if (stored.width < 1 || stored.height < 1) {
    return damaged_image("it has no pixels");
  }
  if (stored.width > pixels_max / stored.height) {
    return fail(ErrorCode::kInvalidArgument,
                fmt::format("{} of {} x {} pixels, more than {} (pixels_max)",
                            image_format_name(*format), stored.width, stored.height, pixels_max),
                "pixels_max (--pixels-max) allows more, should the image be what you expect");
  }
  ImageInfo info{.format = *format,
                 .width = stored.width,
                 .height = stored.height,
                 .orientation = orientation_of(stored),
                 .scratch_bytes = stored.scratch_bytes};
  if (stored.whole || (stored.whole_turned && info.orientation != kUpright)) {
    info.scratch_bytes += info.pixel_bytes();
  }
  if (info.orientation >= 5) {
    std::swap(info.width, info.height);
  }
  return info;
}

Result<void> decode_image(EncodedImage encoded, const ImageInfo& info,
                          std::span<std::uint8_t> pixels) {
  if (static_cast<std::int64_t>(pixels.size()) != info.pixel_bytes()) {
    return fail(ErrorCode::kInvalidArgument,
                fmt::format("an image of {} bytes decoded, and room for {}", info.pixel_bytes(),
                            pixels.size()));
  }
  const bool exchanged = info.orientation >= 5;
  const PixelRows rows(pixels, exchanged ? info.height : info.width,
                       exchanged ? info.width : info.height, info.orientation);
  return info.format == ImageFormat::kJpeg  ? decode_jpeg(encoded, rows)
         : info.format == ImageFormat::kPng ? decode_png(encoded, rows)
                                            : decode_webp(encoded, rows);
}

}  // namespace plimsoll
