// SPDX-License-Identifier: Apache-2.0
//
// PNG by libpng: samples as they are stored, without gamma or profile.
//
// Errors leave the library by longjmp: the function that calls setjmp has no objects to destroy.
// Reading order: image_format.h, this file.
//
// Threads: pure functions.   Memory: three rows, zlib's window; of an interlaced one the image.
#include "data/image_format.h"

#ifdef PLIMSOLL_HAVE_PNG

#include <csetjmp>
#include <cstdio>
#include <cstring>

#include <png.h>
#include <zlib.h>

#include "base/check.h"

namespace plimsoll {
namespace {

constexpr std::size_t kPngMagic = 8;
constexpr std::size_t kPngChunkRest = 12;  // Length, name and CRC.

struct PngWork {
  EncodedImage rest{};  // Not read yet.
  std::array<char, 128> message{};
};

[[noreturn]] void on_png_error(png_structp png, png_const_charp text) {
  auto* const work = static_cast<PngWork*>(png_get_error_ptr(png));
  std::snprintf(work->message.data(), work->message.size(), "PNG: %s", text);
  png_longjmp(png, 1);
}

void read_png(png_structp png, png_bytep out, std::size_t size) {
  auto* const work = static_cast<PngWork*>(png_get_io_ptr(png));
  if (size > work->rest.size()) {
    png_error(png, "the file is truncated");
  }
  std::memcpy(out, work->rest.data(), size);
  work->rest = work->rest.subspan(size);
}

// Grey of 16 bits is cut off at 255, as Pillow has it; all else is 8 bits a sample by now.
void put_png_row(const PixelRows& rows, std::int64_t y, std::uint8_t* row, bool grey16) noexcept {
  if (!grey16) {
    rows.put(y, row);
    return;
  }
  for (std::int64_t x = 0; x < rows.width(); ++x) {
    row[x] = row[2 * x] != 0 ? std::uint8_t{255} : row[2 * x + 1];
  }
  rows.put_grey(y, row);
}

// `image`: room for a row, or for all of them where they are interlaced. False where it failed.
bool decode_png_rows(png_structp png, png_infop info, const PixelRows& rows, std::uint8_t* image) {
  if (setjmp(png_jmpbuf(png)) != 0) {
    return false;
  }
  png_set_keep_unknown_chunks(png, PNG_HANDLE_CHUNK_NEVER, nullptr, -1);
  png_read_info(png, info);
  if (png_get_image_width(png, info) != rows.width() ||
      png_get_image_height(png, info) != rows.height()) {
    png_error(png, "several headers");
  }
  const int color = png_get_color_type(png, info);
  const int depth = png_get_bit_depth(png, info);
  const bool grey16 = color == PNG_COLOR_TYPE_GRAY && depth == 16;
  if (!grey16) {
    png_set_strip_16(png);
    png_set_strip_alpha(png);
    if (color == PNG_COLOR_TYPE_PALETTE) {
      png_set_palette_to_rgb(png);
    } else if ((color & PNG_COLOR_MASK_COLOR) == 0) {
      png_set_expand_gray_1_2_4_to_8(png);
      png_set_gray_to_rgb(png);
    }
  }
  const int passes = png_set_interlace_handling(png);
  png_read_update_info(png, info);
  const auto row_bytes = static_cast<std::int64_t>(png_get_rowbytes(png, info));
  if (row_bytes != rows.width() * (grey16 ? 2 : 3)) {
    png_error(png, "rows of another size");
  }
  for (int pass = 0; pass < passes; ++pass) {
    for (std::int64_t y = 0; y < rows.height(); ++y) {
      std::uint8_t* const row = image + (passes == 1 ? 0 : y * row_bytes);
      png_read_row(png, row, nullptr);
      if (passes == 1) {
        put_png_row(rows, y, row, grey16);
      }
    }
  }
  if (passes > 1) {
    for (std::int64_t y = 0; y < rows.height(); ++y) {
      put_png_row(rows, y, image + y * row_bytes, grey16);
    }
  }
  png_read_end(png, nullptr);
  return true;
}

// A text that zlib packed; "" for a damaged one, and one of more than a MiB.
std::string unpack_text(EncodedImage packed) {
  std::string text(1 << 20, '\0');
  uLongf size = text.size();
  const int status = uncompress(reinterpret_cast<Bytef*>(text.data()), &size,
                                reinterpret_cast<const Bytef*>(packed.data()), packed.size());
  text.resize(status == Z_OK ? size : 0);
  return text;
}

// ImageMagick's: two lines and a number before hexadecimal digits in lines.
std::string exif_of_profile(std::string_view text) {
  for (int line = 0; line < 3; ++line) {
    text.remove_prefix(std::min(text.size(), text.find('\n') + 1));
  }
  std::string exif;
  int high = -1;
  for (const char c : text) {
    const int digit = c >= '0' && c <= '9'   ? c - '0'
                      : c >= 'a' && c <= 'f' ? c - 'a' + 10
                      : c >= 'A' && c <= 'F' ? c - 'A' + 10
                                             : -1;
    if (digit < 0) {
      continue;
    }
    if (high < 0) {
      high = digit;
    } else {
      exif += static_cast<char>(high * 16 + digit);
      high = -1;
    }
  }
  return exif;
}

// What a chunk with text says of the orientation.
void read_png_text(std::string_view name, EncodedImage body, StoredImage& stored,
                   std::string& profile) {
  const std::string_view text = text_of(body);
  const std::size_t key_end = text.find('\0');
  if (key_end == std::string_view::npos) {
    return;
  }
  const std::string_view key = text.substr(0, key_end);
  std::size_t at = key_end + 1;
  bool packed = name == "zTXt";
  if (name == "iTXt") {
    if (text.size() < at + 2) {
      return;
    }
    packed = text[at] != 0;
    const std::size_t language_end = text.find('\0', at + 2);
    const std::size_t words_end =
        language_end == std::string_view::npos ? language_end : text.find('\0', language_end + 1);
    if (words_end == std::string_view::npos) {
      return;
    }
    at = words_end + 1;
  } else if (packed) {
    at += 1;
  }
  at = std::min(at, body.size());
  const auto unpacked = [&] {
    return packed ? unpack_text(body.subspan(at)) : std::string(text.substr(at));
  };
  if (key == "XML:com.adobe.xmp") {
    stored.xmp_unpacked = unpacked();
  } else if (key == "Raw profile type exif" && name != "iTXt") {
    profile = exif_of_profile(unpacked());
  }
}

}  // namespace

// Goes from chunk to chunk: what follows the pixels may say which way up they are.
Result<StoredImage> read_png_header(EncodedImage encoded) {
  StoredImage stored;
  std::string profile;
  for (std::size_t at = kPngMagic;;) {
    if (encoded.size() - at < kPngChunkRest) {
      return truncated_image();
    }
    const std::size_t size = image_number(encoded, at, 4, true);
    const std::string_view name = text_of(encoded.subspan(at + 4, 4));
    if (size > encoded.size() - at - kPngChunkRest) {
      return truncated_image();
    }
    const EncodedImage body = encoded.subspan(at + 8, size);
    if ((name == "IHDR") != (at == kPngMagic) || (name == "IHDR" && size != 13)) {
      return damaged_image("a PNG whose header is not where it belongs");
    }
    if (name == "IHDR") {
      stored.width = image_number(body, 0, 4, true);
      stored.height = image_number(body, 4, 4, true);
      if (stored.width > PNG_UINT_31_MAX || stored.height > PNG_UINT_31_MAX) {
        return damaged_image("a PNG of more than 2^31 pixels a side");
      }
      constexpr std::int64_t kWindow = 512 << 10;
      constexpr std::int64_t kRowsHeld = 4 * 8;  // Of four samples of 16 bits.
      stored.scratch_bytes = kWindow + kRowsHeld * stored.width;
      stored.whole = body[12] != std::byte{0};  // Interlaced.
    } else if (name == "eXIf") {
      stored.exif = text_of(body);
    } else if (name == "tEXt" || name == "zTXt" || name == "iTXt") {
      read_png_text(name, body, stored, profile);
    } else if (name == "IEND") {
      stored.exif = stored.exif.empty() ? profile : stored.exif;
      return stored;
    }
    at += size + kPngChunkRest;
  }
}

Result<void> decode_png(EncodedImage encoded, const PixelRows& rows) {
  constexpr std::size_t kInterlaceAt = 28;
  const bool interlaced = encoded[kInterlaceAt] != std::byte{0};
  std::vector<std::uint8_t> image(
      static_cast<std::size_t>(rows.width() * (interlaced ? rows.height() : 1) * 3));
  PngWork work{.rest = encoded};
  png_structp png =
      png_create_read_struct(PNG_LIBPNG_VER_STRING, &work, on_png_error, [](auto, auto) {});
  png_infop info = png == nullptr ? nullptr : png_create_info_struct(png);
  bool decoded = false;
  if (info != nullptr) {
    png_set_read_fn(png, &work, read_png);
    png_set_user_limits(png, PNG_UINT_31_MAX, PNG_UINT_31_MAX);
    decoded = decode_png_rows(png, info, rows, image.data());
  }
  png_destroy_read_struct(&png, &info, nullptr);
  return decoded ? Result<void>() : damaged_image(work.message.data());
}

}  // namespace plimsoll

#else

namespace plimsoll {

Result<StoredImage> read_png_header(EncodedImage) {
  return fail(ErrorCode::kInvalidArgument, "a PNG, which this build does not decode",
              "build with libpng (libpng-dev)");
}
Result<void> decode_png(EncodedImage, const PixelRows&) {
  return tl::unexpected(read_png_header({}).error());
}

}  // namespace plimsoll

#endif
