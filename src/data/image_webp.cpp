// SPDX-License-Identifier: Apache-2.0
//
// WebP by libwebp: the first frame, on a black canvas where it does not fill it.
//
// Reading order: image_format.h, this file.
//
// Threads: pure functions.   Memory: of a lossless image four bytes a pixel; that of the library.
#include "data/image_format.h"

#ifdef PLIMSOLL_HAVE_WEBP

#include <memory>

#include <webp/decode.h>
#include <webp/demux.h>

#include "base/check.h"

namespace plimsoll {
namespace {

struct WebpEnd {
  void operator()(WebPDemuxer* demuxer) const noexcept { WebPDemuxDelete(demuxer); }
};
using Webp = std::unique_ptr<WebPDemuxer, WebpEnd>;

// Null for a file that is damaged or truncated.
Webp open_webp(EncodedImage encoded) {
  const WebPData data{reinterpret_cast<const std::uint8_t*>(encoded.data()), encoded.size()};
  return Webp(WebPDemux(&data));
}

std::string_view webp_chunk(const Webp& webp, const char* name) {
  WebPChunkIterator chunk;
  std::string_view found;  // Of the file's bytes.
  if (WebPDemuxGetChunk(webp.get(), name, 1, &chunk) != 0) {
    found = {reinterpret_cast<const char*>(chunk.chunk.bytes), chunk.chunk.size};
    WebPDemuxReleaseChunkIterator(&chunk);
  }
  return found;
}

}  // namespace

Result<StoredImage> read_webp_header(EncodedImage encoded) {
  const Webp webp = open_webp(encoded);
  if (!webp) {
    return damaged_image("a WebP that is damaged or truncated");
  }
  StoredImage stored{.width = WebPDemuxGetI(webp.get(), WEBP_FF_CANVAS_WIDTH),
                     .height = WebPDemuxGetI(webp.get(), WEBP_FF_CANVAS_HEIGHT),
                     .whole_turned = true,
                     .exif = std::string(webp_chunk(webp, "EXIF")),
                     .xmp = webp_chunk(webp, "XMP ")};
  // A frame that is lossless, or its alpha, is whole in memory: at most four bytes a pixel; rows
  // of context, and tables for Huffman codes.
  constexpr std::int64_t kTables = 4 << 20;
  constexpr std::int64_t kRowsHeld = 64 * 4;
  stored.scratch_bytes = kTables + stored.width * (4 * stored.height + kRowsHeld);
  return stored;
}

Result<void> decode_webp(EncodedImage encoded, const PixelRows& rows) {
  const Webp webp = open_webp(encoded);
  WebPIterator frame;
  if (!webp || WebPDemuxGetFrame(webp.get(), 1, &frame) == 0) {
    return damaged_image("a WebP without a whole frame");
  }
  const std::unique_ptr<WebPIterator, void (*)(WebPIterator*)> ended(&frame,
                                                                     WebPDemuxReleaseIterator);
  if (frame.x_offset < 0 || frame.y_offset < 0 || frame.width < 1 || frame.height < 1 ||
      frame.x_offset + frame.width > rows.width() ||
      frame.y_offset + frame.height > rows.height()) {
    return damaged_image("a WebP whose frame is larger than its canvas");
  }
  const std::int64_t stride = rows.width() * 3;
  std::vector<std::uint8_t> other(
      static_cast<std::size_t>(rows.upright() ? 0 : stride * rows.height()));
  std::uint8_t* const image = rows.upright() ? rows.data() : other.data();
  if (frame.width < rows.width() || frame.height < rows.height()) {
    std::fill_n(image, stride * rows.height(), std::uint8_t{0});
  }
  std::uint8_t* const begin = image + frame.y_offset * stride + std::int64_t{3} * frame.x_offset;
  const std::int64_t room = (frame.height - 1) * stride + std::int64_t{3} * frame.width;
  if (WebPDecodeRGBInto(frame.fragment.bytes, frame.fragment.size, begin,
                        static_cast<std::size_t>(room), static_cast<int>(stride)) == nullptr) {
    return damaged_image("a WebP that cannot be decoded");
  }
  if (!rows.upright()) {
    for (std::int64_t y = 0; y < rows.height(); ++y) {
      rows.put(y, image + y * stride);
    }
  }
  return {};
}

}  // namespace plimsoll

#else

namespace plimsoll {

Result<StoredImage> read_webp_header(EncodedImage) {
  return fail(ErrorCode::kInvalidArgument, "a WebP, which this build does not decode",
              "build with libwebp (libwebp-dev)");
}
Result<void> decode_webp(EncodedImage, const PixelRows&) {
  return tl::unexpected(read_webp_header({}).error());
}

}  // namespace plimsoll

#endif
