// SPDX-License-Identifier: Apache-2.0
//
// ImageSet: reading. A row's head is read and compared, then, for whoever wants them, the bytes of
// its images, each with a checksum of its own.
//
// Reading order: include/plimsoll/image_set.h, row_file.h, image_set_format.h, this file.
//
// Threads, Memory: as the header says.
#include "plimsoll/image_set.h"

#include <cstring>
#include <utility>

#include <fmt/core.h>

#include "base/check.h"
#include "base/crc32c.h"
#include "data/image_set_format.h"

namespace plimsoll {

namespace fs = std::filesystem;

class ImageSet::Impl {
 public:
  static Result<std::unique_ptr<Impl>> open(const fs::path& path);
  [[nodiscard]] Result<ImageRow> row(std::int64_t row) const;
  Result<void> read(const ImagePlace& place, std::span<std::byte> out) const;
  Result<void> verify(const std::function<bool(std::int64_t, std::int64_t)>& progress) const;

  ImageSetInfo info;

 private:
  RowFile file_;
};

Result<std::unique_ptr<ImageSet::Impl>> ImageSet::Impl::open(const fs::path& path) {
  auto set = std::make_unique<Impl>();
  PLIMSOLL_TRY(set->file_, RowFile::open(path, kImageSetKind));
  set->info = image_info(set->file_.header().counts);
  set->info.fingerprint = set->file_.header().fingerprint;
  set->info.about = set->file_.about();
  set->info.disk_bytes = set->file_.disk_bytes();
  return set;
}

Result<ImageRow> ImageSet::Impl::row(std::int64_t row) const {
  PLIMSOLL_TRY(const RowEntry entry, file_.entry(row));
  const std::int64_t bytes = entry.length;
  const auto damaged = [&] {
    return file_.corrupt(fmt::format("the checksum of row {} does not match", row));
  };
  std::uint32_t count = 0;
  if (bytes < static_cast<std::int64_t>(sizeof(count)) || bytes > kRowHeadMost ||
      !file_.holds(entry.offset, bytes)) {
    return file_.corrupt(fmt::format("the index entry of row {} is damaged", row));
  }
  std::vector<std::byte> head(static_cast<std::size_t>(bytes));
  PLIMSOLL_TRY_VOID(file_.read_at(entry.offset, head));
  std::memcpy(&count, head.data(), sizeof(count));
  if (row_crc(row, entry, crc32c(head)) != entry.crc ||
      count > (head.size() - sizeof(count)) / sizeof(StoredPlace)) {
    return damaged();
  }
  ImageRow out;
  std::int64_t offset = entry.offset + bytes;
  const std::byte* at = head.data() + sizeof(count);
  for (std::uint32_t i = 0; i < count; ++i, at += sizeof(StoredPlace)) {
    StoredPlace stored;
    std::memcpy(&stored, at, sizeof(stored));
    if (!file_.holds(offset, stored.bytes)) {
      return damaged();
    }
    out.images.push_back({.offset = offset,
                          .bytes = stored.bytes,
                          .crc = stored.crc,
                          .width = stored.width,
                          .height = stored.height});
    offset += stored.bytes;
  }
  out.messages.assign(reinterpret_cast<const char*>(at), head.data() + head.size() - at);
  return out;
}

Result<void> ImageSet::Impl::read(const ImagePlace& place, std::span<std::byte> out) const {
  if (static_cast<std::int64_t>(out.size()) != place.bytes) {
    return fail(
        ErrorCode::kInvalidArgument,
        fmt::format("an image of {} bytes; room for {} was given", place.bytes, out.size()));
  }
  if (!file_.holds(place.offset, place.bytes)) {
    return fail(ErrorCode::kInvalidArgument, file_.name() + ": there is no such image");
  }
  PLIMSOLL_TRY_VOID(file_.read_at(place.offset, out));
  if (crc32c(out) != place.crc) {
    return file_.corrupt(
        fmt::format("the checksum of the image at byte {} does not match", place.offset));
  }
  return {};
}

Result<void> ImageSet::Impl::verify(
    const std::function<bool(std::int64_t, std::int64_t)>& progress) const {
  std::vector<std::byte> bytes;
  std::int64_t images = 0;
  std::int64_t encoded_bytes = 0;
  for (std::int64_t number = 0; number < info.rows; ++number) {
    PLIMSOLL_TRY(const ImageRow found, row(number));
    for (const ImagePlace& place : found.images) {
      resize_anew(bytes, place.bytes);
      PLIMSOLL_TRY_VOID(read(place, bytes));
      ++images;
      encoded_bytes += place.bytes;
    }
    if (progress && !progress(number, info.rows)) {
      return fail(ErrorCode::kInvalidArgument, file_.name() + ": verify cancelled");
    }
  }
  if (images != info.images || encoded_bytes != info.encoded_bytes) {
    return file_.corrupt("its rows have other images than the header says");
  }
  return {};
}

ImageSet::ImageSet(std::unique_ptr<Impl> impl) noexcept : impl_(std::move(impl)) {}
ImageSet::ImageSet(ImageSet&&) noexcept = default;
ImageSet& ImageSet::operator=(ImageSet&&) noexcept = default;
ImageSet::~ImageSet() = default;

Result<ImageSet> ImageSet::open(const fs::path& path) {
  PLIMSOLL_TRY(auto impl, Impl::open(path));
  return ImageSet(std::move(impl));
}
Result<ImageSetInfo> ImageSet::inspect(const fs::path& path) {
  PLIMSOLL_TRY(const auto impl, Impl::open(path));
  return impl->info;
}
const ImageSetInfo& ImageSet::info() const noexcept {
  return impl_->info;
}
Result<ImageRow> ImageSet::row(std::int64_t row) const {
  return impl_->row(row);
}
Result<void> ImageSet::read(const ImagePlace& place, std::span<std::byte> out) const {
  return impl_->read(place, out);
}
Result<void> ImageSet::verify(
    const std::function<bool(std::int64_t, std::int64_t)>& progress) const {
  return impl_->verify(progress);
}

}  // namespace plimsoll
