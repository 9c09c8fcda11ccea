// SPDX-License-Identifier: Apache-2.0
//
// JPEG by libjpeg-turbo, with the settings of Pillow: accurate DCT, smooth upsampling.
//
// Errors leave the library by longjmp: the function that calls setjmp has no objects to destroy.
// Reading order: image_format.h, this file.
//
// Threads: pure functions.   Memory: that of the library, which the header's scratch_bytes cover.
#include "data/image_format.h"

#ifdef PLIMSOLL_HAVE_JPEG

#include <csetjmp>
#include <cstdio>

#include <jpeglib.h>

#include <fmt/core.h>

#include "base/check.h"

namespace plimsoll {
namespace {

constexpr int kJpegBlock = 8;
constexpr std::int64_t kJpegRows = 16;  // Asked for at a time; libjpeg gives as many as it has.
constexpr int kJpegScansMost = 1000;    // A small file of many scans would take hours.

std::int64_t round_up_div(std::int64_t value, std::int64_t by) noexcept {
  return (value + by - 1) / by;
}

struct JpegTrap {
  jpeg_error_mgr base{};
  std::jmp_buf jump{};
  std::array<char, JMSG_LENGTH_MAX> message{};
};

struct JpegWork {
  jpeg_decompress_struct info{};
  jpeg_source_mgr source{};
  jpeg_progress_mgr progress{};
  JpegTrap trap{};
};

[[noreturn]] void give_up_jpeg(JpegTrap& trap, const char* why) {
  std::snprintf(trap.message.data(), trap.message.size(), "%s", why);
  std::longjmp(trap.jump, 1);
}

[[noreturn]] void on_jpeg_error(j_common_ptr info) {
  auto* const trap = reinterpret_cast<JpegTrap*>(info->err);
  info->err->format_message(info, trap->message.data());
  std::longjmp(trap->jump, 1);
}

void on_jpeg_progress(j_common_ptr info) {
  if (reinterpret_cast<j_decompress_ptr>(info)->input_scan_number > kJpegScansMost) {
    give_up_jpeg(*reinterpret_cast<JpegTrap*>(info->err), "a JPEG of more than 1000 scans");
  }
}

void skip_jpeg(j_decompress_ptr info, long bytes) {
  const auto wanted = static_cast<std::size_t>(std::max(0L, bytes));
  const std::size_t skipped = std::min(wanted, info->src->bytes_in_buffer);
  info->src->next_input_byte += skipped;
  info->src->bytes_in_buffer -= skipped;
}

// False where it failed: the message says why; "" that there was no more to read.
bool decode_jpeg_rows(JpegWork& work, EncodedImage encoded, const PixelRows& rows,
                      std::uint8_t* row) {
  jpeg_decompress_struct& info = work.info;
  if (setjmp(work.trap.jump) != 0) {
    return false;
  }
  jpeg_create_decompress(&info);
  work.source = {.next_input_byte = reinterpret_cast<const JOCTET*>(encoded.data()),
                 .bytes_in_buffer = encoded.size(),
                 .init_source = [](j_decompress_ptr) {},
                 .fill_input_buffer = [](j_decompress_ptr) -> boolean { return FALSE; },
                 .skip_input_data = skip_jpeg,
                 .resync_to_restart = jpeg_resync_to_restart,
                 .term_source = [](j_decompress_ptr) {}};
  info.src = &work.source;
  work.progress.progress_monitor = on_jpeg_progress;
  info.progress = &work.progress;
  if (jpeg_read_header(&info, TRUE) != JPEG_HEADER_OK) {
    return false;
  }
  if (info.image_width != rows.width() || info.image_height != rows.height()) {
    give_up_jpeg(work.trap, "a JPEG with several frame headers");
  }
  const bool cmyk = info.num_components == 4;
  info.out_color_space = cmyk ? JCS_CMYK : JCS_RGB;
  if (jpeg_start_decompress(&info) == FALSE) {
    return false;
  }
  const std::int64_t row_bytes = 3 * rows.width();
  while (info.output_scanline < info.output_height) {
    const std::int64_t y = info.output_scanline;
    if (rows.upright() && !cmyk) {  // Where they belong.
      const std::int64_t count = std::min(kJpegRows, rows.height() - y);
      std::array<JSAMPROW, kJpegRows> at{};
      for (std::int64_t i = 0; i < count; ++i) {
        at[static_cast<std::size_t>(i)] = rows.data() + (y + i) * row_bytes;
      }
      if (jpeg_read_scanlines(&info, at.data(), static_cast<JDIMENSION>(count)) == 0) {
        return false;
      }
      continue;
    }
    JSAMPROW at = row;
    if (jpeg_read_scanlines(&info, &at, 1) != 1) {
      return false;
    }
    if (cmyk) {  // Stored inverted, as Adobe has it; in place, three of four.
      for (std::int64_t x = 0; x < rows.width(); ++x) {
        const int key = row[4 * x + 3];
        for (int c = 0; c < 3; ++c) {
          const int product = (255 - row[4 * x + c]) * key + 128;
          row[3 * x + c] =
              static_cast<std::uint8_t>(std::max(0, key - ((product >> 8) + product) / 256));
        }
      }
    }
    rows.put(y, row);
  }
  return jpeg_finish_decompress(&info) != FALSE;
}

}  // namespace

namespace {

// What a frame's header says beside the image's size.
struct Frame {
  std::int64_t components{0};
  std::int64_t coefficients{0};  // Bytes, if all are held at once.
  bool progressive{false};
};

// The marker at `at` or behind it, junk before it left out; `at` then lies behind the marker.
Result<int> next_marker(EncodedImage encoded, std::size_t& at) {
  while (at < encoded.size() && encoded[at] != std::byte{0xFF}) {
    ++at;
  }
  while (at < encoded.size() && encoded[at] == std::byte{0xFF}) {
    ++at;
  }
  if (encoded.size() - std::min(at, encoded.size()) < 3) {
    return truncated_image();
  }
  return std::to_integer<int>(encoded[at++]);
}

Result<void> read_frame(EncodedImage body, int marker, StoredImage& stored, Frame& frame) {
  if (body.size() < 6 || frame.components > 0) {
    return damaged_image("a JPEG with a frame header that is none");
  }
  const auto components = std::to_integer<std::int64_t>(body[5]);
  frame.progressive = marker == 0xC2 || marker == 0xCA;
  frame.components = components;
  stored.height = image_number(body, 1, 2, true);
  stored.width = image_number(body, 3, 2, true);
  if (body[0] != std::byte{8} || (components != 1 && components != 3 && components != 4) ||
      body.size() < 6 + 3 * static_cast<std::size_t>(components)) {
    return fail(ErrorCode::kInvalidArgument,
                fmt::format("a JPEG of {} components of {} bits; 1, 3 or 4 of 8 are decoded",
                            components, std::to_integer<int>(body[0])),
                "convert it, or have undecodable images left out");
  }
  const auto factors = [&body](std::int64_t c) {
    return std::to_integer<std::int64_t>(body[static_cast<std::size_t>(7 + 3 * c)]);
  };
  std::int64_t widest = 1;
  std::int64_t tallest = 1;
  for (std::int64_t c = 0; c < components; ++c) {
    widest = std::max(widest, factors(c) >> 4);
    tallest = std::max(tallest, factors(c) & 15);
  }
  for (std::int64_t c = 0; c < components; ++c) {
    const std::int64_t across = round_up_div(stored.width, kJpegBlock * widest) * (factors(c) >> 4);
    const std::int64_t down = round_up_div(stored.height, kJpegBlock * tallest) * (factors(c) & 15);
    frame.coefficients +=
        across * down * kJpegBlock * kJpegBlock * static_cast<std::int64_t>(sizeof(JCOEF));
  }
  return {};
}

bool begins_frame(int marker) noexcept {
  return marker >= 0xC0 && marker <= 0xCF && marker != 0xC4 && marker != 0xC8 && marker != 0xCC;
}

}  // namespace

// Markers up to the first scan, as Pillow goes through them.
Result<StoredImage> read_jpeg_header(EncodedImage encoded) {
  constexpr std::string_view kExif("Exif\0\0", 6);
  constexpr std::string_view kXmp("http://ns.adobe.com/xap/1.0/\0", 29);
  StoredImage stored;
  Frame frame;
  std::size_t at = 2;
  for (;;) {
    PLIMSOLL_TRY(const int marker, next_marker(encoded, at));
    if (marker == 0 || marker == 1 || (marker >= 0xD0 && marker <= 0xD8)) {
      continue;  // Without a length.
    }
    if (marker == 0xD9) {
      return damaged_image("a JPEG without a scan");
    }
    const std::size_t size = image_number(encoded, at, 2, true);
    if (size < 2 || size > encoded.size() - at) {
      return truncated_image();
    }
    const EncodedImage body = encoded.subspan(at + 2, size - 2);
    at += size;
    if (marker == 0xE1 && text_of(body).starts_with(kExif)) {
      stored.exif += text_of(stored.exif.empty() ? body : body.subspan(kExif.size()));
    } else if (marker == 0xE1 && text_of(body).starts_with(kXmp)) {
      stored.xmp = text_of(body).substr(kXmp.size());
    } else if (begins_frame(marker)) {
      PLIMSOLL_TRY_VOID(read_frame(body, marker, stored, frame));
    } else if (marker == 0xDA) {
      if (frame.components == 0 || body.empty()) {
        return damaged_image("a JPEG without a frame header");
      }
      const bool one_scan =
          !frame.progressive && std::to_integer<std::int64_t>(body[0]) == frame.components;
      constexpr std::int64_t kTables = 512 << 10;
      constexpr std::int64_t kRowsHeld = 64;  // Of each component, while chroma is made wider.
      stored.scratch_bytes = kTables + (one_scan ? 0 : frame.coefficients) +
                             kRowsHeld * frame.components * (stored.width + 64);
      return stored;
    }
  }
}

Result<void> decode_jpeg(EncodedImage encoded, const PixelRows& rows) {
  std::vector<std::uint8_t> row(static_cast<std::size_t>(rows.width()) * 4);
  JpegWork work;
  work.info.err = jpeg_std_error(&work.trap.base);
  work.trap.base.error_exit = on_jpeg_error;
  work.trap.base.output_message = [](j_common_ptr) {};
  const bool decoded = decode_jpeg_rows(work, encoded, rows, row.data());
  jpeg_destroy_decompress(&work.info);
  if (!decoded) {
    const std::string_view why = work.trap.message.data();
    return why.empty() ? truncated_image() : damaged_image(std::string(why));
  }
  return {};
}

}  // namespace plimsoll

#else

namespace plimsoll {

Result<StoredImage> read_jpeg_header(EncodedImage) {
  return fail(ErrorCode::kInvalidArgument, "a JPEG, which this build does not decode",
              "build with libjpeg-turbo (libjpeg62-turbo-dev)");
}
Result<void> decode_jpeg(EncodedImage, const PixelRows&) {
  return tl::unexpected(read_jpeg_header({}).error());
}

}  // namespace plimsoll

#endif
