// SPDX-License-Identifier: Apache-2.0
//
// Self-checking table pages: see feature_table.h.
//
// Threads: as the header says.   Memory: the buffer given to the writer.
#include "store/feature_table.h"

#include <algorithm>

#include <fmt/core.h>

#include "base/check.h"
#include "base/crc32c.h"

namespace plimsoll {
namespace {

constexpr std::int64_t kNumberAt = kTablePayload;
constexpr std::int64_t kCrcAt = kTablePayload + 4;

std::uint32_t load32(const std::byte* at) {
  std::uint32_t value = 0;
  std::memcpy(&value, at, sizeof value);
  return value;
}

}  // namespace

Result<void> check_table_pages(std::span<const std::byte> pages, std::int64_t first_page,
                               const std::filesystem::path& path) {
  const auto count = static_cast<std::int64_t>(pages.size()) / kFeaturePage;
  for (std::int64_t i = 0; i < count; ++i) {
    const std::byte* page = pages.data() + i * kFeaturePage;
    if (load32(page + kNumberAt) != static_cast<std::uint32_t>(first_page + i) ||
        load32(page + kCrcAt) != crc32c({page, static_cast<std::size_t>(kCrcAt)})) {
      return fail(ErrorCode::kCorrupt, fmt::format("{}: page {} does not match its checksum",
                                                   path.string(), first_page + i));
    }
  }
  return {};
}

std::uint32_t fold_table_crc(std::span<const std::byte> pages, std::uint32_t seed) noexcept {
  for (std::size_t at = 0; at < pages.size(); at += static_cast<std::size_t>(kFeaturePage)) {
    seed = crc32c(pages.subspan(at + static_cast<std::size_t>(kCrcAt), 4), seed);
  }
  return seed;
}

Result<FeatureTableWriter> FeatureTableWriter::create(const std::filesystem::path& path,
                                                      std::int64_t width,
                                                      std::span<std::byte> buffer) {
  FeatureTableWriter writer = counting(width, buffer);
  PLIMSOLL_TRY(writer.file_, File::open(path, FileMode::kCreate));
  return writer;
}

FeatureTableWriter FeatureTableWriter::counting(std::int64_t width, std::span<std::byte> buffer) {
  PLIMSOLL_CHECK(static_cast<std::int64_t>(buffer.size()) >= kFeaturePage, "buffer below a page");
  FeatureTableWriter writer;
  writer.buffer_ = buffer;
  writer.width_ = width;
  std::fill(buffer.begin(), buffer.end(), std::byte{0});
  return writer;
}

Result<void> FeatureTableWriter::append(std::uint64_t value) {
  std::byte* at = buffer_.data() + buffered_ * kFeaturePage + in_page_ * width_;
  if (width_ == 4) {
    const auto narrow = static_cast<std::uint32_t>(value);
    std::memcpy(at, &narrow, sizeof narrow);
  } else {
    std::memcpy(at, &value, sizeof value);
  }
  ++entries_;
  if (++in_page_ == feature_table_per_page(width_)) {
    seal_page();
    if ((buffered_ + 1) * kFeaturePage > static_cast<std::int64_t>(buffer_.size())) {
      return flush();
    }
  }
  return {};
}

void FeatureTableWriter::seal_page() {
  std::byte* page = buffer_.data() + buffered_ * kFeaturePage;
  const auto number = static_cast<std::uint32_t>(pages_);
  std::memcpy(page + kNumberAt, &number, sizeof number);
  const std::uint32_t crc = crc32c({page, static_cast<std::size_t>(kCrcAt)});
  std::memcpy(page + kCrcAt, &crc, sizeof crc);
  in_page_ = 0;
  ++pages_;
  ++buffered_;
}

Result<void> FeatureTableWriter::flush() {
  const auto bytes = buffer_.first(static_cast<std::size_t>(buffered_ * kFeaturePage));
  if (file_.valid()) {
    PLIMSOLL_TRY_VOID(file_.write_at((pages_ - buffered_) * kFeaturePage, bytes));
  }
  crc_ = fold_table_crc(bytes, crc_);
  std::fill(bytes.begin(), bytes.end(), std::byte{0});
  buffered_ = 0;
  return {};
}

Result<SideFile> FeatureTableWriter::finish() {
  if (in_page_ > 0) {
    seal_page();
  }
  PLIMSOLL_TRY_VOID(flush());
  if (file_.valid()) {
    PLIMSOLL_TRY_VOID(file_.sync());
    file_.drop_cache();
  }
  return SideFile{pages_ * kFeaturePage, crc_};
}

}  // namespace plimsoll
