// SPDX-License-Identifier: Apache-2.0
//
// ImageWriter: messages and images as rows of a RowWriter, each image decoded before it is written.
//
// Reading order: include/plimsoll/image_set.h, image_set_format.h, row_writer.h, this file.
//
// Threads: single-owner.   Memory: as the header says.
#include <algorithm>
#include <utility>

#include <fmt/format.h>

#include "base/check.h"
#include "base/crc32c.h"
#include "base/utf8.h"
#include "data/image_set_format.h"
#include "data/row_writer.h"

namespace plimsoll {

class ImageWriter::Impl {
 public:
  Impl(const ImageWriterOptions& options, RowWriter rows)
      : out(std::move(rows)), info(image_info(out.counts())), options_(options) {
    info.fingerprint = options.fingerprint;
  }
  static Result<std::unique_ptr<Impl>> open(Governor governor, const ImageWriterOptions& options);
  Result<void> append(const std::string& messages,
                      std::span<const std::span<const std::byte>> images);
  Result<std::int64_t> append_rows(const ImageSet& from, std::int64_t begin, std::int64_t end);

  RowWriter out;
  ImageSetInfo info{};

 private:
  Result<StoredPlace> check(std::span<const std::byte> encoded, ImageSetInfo& after);
  Result<std::uint32_t> put_head(const std::string& messages, std::span<const StoredPlace> places);
  Result<void> end_row(std::uint32_t head_bytes, const ImageSetInfo& after);

  ImageWriterOptions options_;
  Lease lease_;  // Of what decoding takes, and the encoded bytes, which the caller holds.
  std::vector<std::uint8_t> pixels_;
};

Result<std::unique_ptr<ImageWriter::Impl>> ImageWriter::Impl::open(
    Governor governor, const ImageWriterOptions& options) {
  if (options.pixels_max < 1) {
    return fail(ErrorCode::kInvalidArgument,
                fmt::format("pixels_max: {} is not above 0", options.pixels_max));
  }
  PLIMSOLL_TRY(auto rows,
               RowWriter::open(governor, {.kind = &kImageSetKind,
                                          .path = options.path,
                                          .fingerprint = options.fingerprint,
                                          .rebuild = options.rebuild,
                                          .sensible = [](const auto&) { return true; }}));
  auto impl = std::make_unique<Impl>(options, std::move(rows));
  PLIMSOLL_TRY(impl->lease_, governor.reserve(Tag::kOther, 0));
  return impl;
}

// Decodes an image, whose pixels are of no use then: who reads the set meets no damaged one.
Result<StoredPlace> ImageWriter::Impl::check(std::span<const std::byte> encoded,
                                             ImageSetInfo& after) {
  PLIMSOLL_TRY(const ImageInfo image, read_image_info(encoded, options_.pixels_max));
  const auto bytes = static_cast<std::int64_t>(encoded.size());
  if (bytes > kImageBytesMost) {
    return fail(ErrorCode::kInvalidArgument, "an image of more than 4 GiB");
  }
  const std::int64_t work = bytes + image.scratch_bytes;
  const std::int64_t needed = work + image.pixel_bytes();
  if (needed > lease_.bytes()) {
    PLIMSOLL_TRY_VOID(lease_.grow(needed));
  }
  resize_anew(pixels_, image.pixel_bytes());
  PLIMSOLL_TRY_VOID(decode_image(encoded, image, pixels_));
  ++after.images;
  after.encoded_bytes += bytes;
  after.decoded_bytes += image.pixel_bytes();
  after.work_bytes_max = std::max(after.work_bytes_max, work);
  return StoredPlace{.bytes = static_cast<std::uint32_t>(bytes),
                     .crc = crc32c(encoded),
                     .width = static_cast<std::uint32_t>(image.width),
                     .height = static_cast<std::uint32_t>(image.height)};
}

Result<void> ImageWriter::Impl::append(const std::string& messages,
                                       std::span<const std::span<const std::byte>> images) {
  ImageSetInfo after = info;
  std::vector<StoredPlace> places;
  for (std::size_t i = 0; i < images.size(); ++i) {
    auto place = check(images[i], after);
    if (!place) {
      Error error = std::move(place).error();
      if (images.size() > 1 && error.detail) {
        error.detail = std::make_shared<const std::string>(
            fmt::format("image {} of {}: {}", i + 1, images.size(), *error.detail));
      }
      return tl::unexpected(std::move(error));
    }
    places.push_back(*place);
  }
  PLIMSOLL_TRY(const std::uint32_t head_bytes, put_head(messages, places));
  for (const auto& encoded : images) {
    PLIMSOLL_TRY_VOID(out.put_apart(encoded));
  }
  return end_row(head_bytes, after);
}

// Everything of a row but its images' bytes; how much that is.
Result<std::uint32_t> ImageWriter::Impl::put_head(const std::string& messages,
                                                  std::span<const StoredPlace> places) {
  const auto count = static_cast<std::uint32_t>(places.size());
  const std::int64_t head_bytes = static_cast<std::int64_t>(
      sizeof(count) + places.size() * sizeof(StoredPlace) + messages.size());
  if (head_bytes > kRowHeadMost || !is_utf8(messages)) {
    return fail(ErrorCode::kInvalidArgument, "messages of more than 64 MiB, or not UTF-8");
  }
  PLIMSOLL_TRY_VOID(out.put(std::as_bytes(std::span(&count, 1))));
  PLIMSOLL_TRY_VOID(out.put(std::as_bytes(places)));
  PLIMSOLL_TRY_VOID(out.put(std::as_bytes(std::span(messages))));
  return static_cast<std::uint32_t>(head_bytes);
}

Result<void> ImageWriter::Impl::end_row(std::uint32_t head_bytes, const ImageSetInfo& after) {
  PLIMSOLL_TRY_VOID(out.end_row(head_bytes));
  info = after;
  ++info.rows;
  out.counts() = image_counts(info);
  return {};
}

Result<std::int64_t> ImageWriter::Impl::append_rows(const ImageSet& from, std::int64_t begin,
                                                    std::int64_t end) {
  std::int64_t bytes = 0;
  for (std::int64_t number = begin; number < end; ++number) {
    PLIMSOLL_TRY(const ImageRow row, from.row(number));
    ImageSetInfo after = info;
    after.work_bytes_max = std::max(after.work_bytes_max, from.info().work_bytes_max);
    std::vector<StoredPlace> places;
    for (const ImagePlace& place : row.images) {
      places.push_back({.bytes = static_cast<std::uint32_t>(place.bytes),
                        .crc = place.crc,
                        .width = static_cast<std::uint32_t>(place.width),
                        .height = static_cast<std::uint32_t>(place.height)});
      ++after.images;
      after.encoded_bytes += place.bytes;
      after.decoded_bytes += 3 * place.width * place.height;
    }
    PLIMSOLL_TRY(const std::uint32_t head_bytes, put_head(row.messages, places));
    for (const ImagePlace& place : row.images) {
      if (place.bytes > lease_.bytes()) {
        PLIMSOLL_TRY_VOID(lease_.grow(place.bytes));
      }
      resize_anew(pixels_, place.bytes);
      PLIMSOLL_TRY_VOID(from.read(place, std::as_writable_bytes(std::span(pixels_))));
      PLIMSOLL_TRY_VOID(out.put_apart(std::as_bytes(std::span(pixels_))));
      bytes += place.bytes;
    }
    PLIMSOLL_TRY_VOID(end_row(head_bytes, after));
    bytes += head_bytes;
  }
  return bytes;
}

ImageWriter::ImageWriter(std::unique_ptr<Impl> impl) noexcept : impl_(std::move(impl)) {}
ImageWriter::ImageWriter(ImageWriter&&) noexcept = default;
ImageWriter& ImageWriter::operator=(ImageWriter&&) noexcept = default;
ImageWriter::~ImageWriter() = default;

Result<ImageWriter> ImageWriter::open(Governor governor, const ImageWriterOptions& options) {
  PLIMSOLL_TRY(auto impl, Impl::open(std::move(governor), options));
  return ImageWriter(std::move(impl));
}

bool ImageWriter::whole() const noexcept {
  return impl_->out.whole();
}
const std::string& ImageWriter::position() const noexcept {
  return impl_->out.position();
}
const ImageSetInfo& ImageWriter::info() const noexcept {
  return impl_->info;
}
Result<void> ImageWriter::append(const std::string& messages,
                                 std::span<const std::span<const std::byte>> images) {
  return impl_->append(messages, images);
}
Result<std::int64_t> ImageWriter::append_rows(const ImageSet& from, std::int64_t begin,
                                              std::int64_t end) {
  return impl_->append_rows(from, begin, end);
}
Result<void> ImageWriter::commit(const std::string& position) {
  return impl_->out.commit(position);
}
Result<void> ImageWriter::finish(const std::string& about, const std::string& fingerprint) {
  return impl_->out.finish(about, fingerprint);
}

}  // namespace plimsoll
