// SPDX-License-Identifier: Apache-2.0
#include "store/id_source.h"

#include <algorithm>
#include <array>
#include <bit>
#include <numeric>
#include <string>

#include <fmt/format.h>

#include "base/check.h"
#include "base/npy_header.h"
#include "os/file.h"

namespace plimsoll {
namespace {

static_assert(std::endian::native == std::endian::little, "files are read as they are");

constexpr std::int64_t kHeaderBytesMost = 4096;

tl::unexpected<Error> not_ids(const std::filesystem::path& path, const std::string& what) {
  return fail(ErrorCode::kInvalidArgument,
              fmt::format("{}: {}, expected a vector of int64", path.string(), what),
              "save the ids with numpy.save(file, ids.astype('int64'))");
}

// Of a vector of int64 that is the rest of the file.
Result<NpyFields> read_npy_header(const File& file) {
  const auto& path = file.path();
  PLIMSOLL_TRY(const std::int64_t size, file.size());
  std::array<std::byte, kHeaderBytesMost> start;
  const auto head = std::span(start).first(
      static_cast<std::size_t>(std::min<std::int64_t>(size, kHeaderBytesMost)));
  PLIMSOLL_TRY_VOID(file.read_at(0, head));
  PLIMSOLL_TRY(NpyFields fields, parse_npy_fields(head, path.string()));
  if (fields.descr != "<i8") {
    return not_ids(path, fmt::format("dtype {}", fields.descr));
  }
  if (fields.shape.size() != 1) {
    return not_ids(path, fmt::format("shape ({})", fmt::join(fields.shape, ", ")));
  }
  const std::int64_t bytes = size - fields.data_offset;
  if (bytes % 8 != 0 || bytes / 8 != fields.shape[0]) {
    return fail(ErrorCode::kCorrupt, fmt::format("{}: {} bytes of ids, expected those of {} ids",
                                                 path.string(), bytes, fields.shape[0]));
  }
  return fields;
}

}  // namespace

IdSource IdSource::range(std::int64_t rows) {
  IdSource source;
  source.rows_ = rows;
  source.dense_ = true;
  return source;
}

IdSource IdSource::borrowed(std::span<const std::int64_t> ids) {
  IdSource source;
  source.rows_ = static_cast<std::int64_t>(ids.size());
  source.ids_ = ids;
  return source;
}

Result<IdSource> IdSource::npy(const std::filesystem::path& path) {
  PLIMSOLL_TRY(const File file, File::open(path, FileMode::kRead));
  PLIMSOLL_TRY(const NpyFields fields, read_npy_header(file));
  IdSource source;
  source.rows_ = fields.shape[0];
  source.data_at_ = fields.data_offset;
  source.path_ = path;
  return source;
}

Result<void> IdSource::read(const Visit& visit) const {
  if (!dense_ && path_.empty()) {
    return visit(ids_);
  }
  File file;
  if (!dense_) {
    PLIMSOLL_TRY(file, File::open(path_, FileMode::kRead));
  }
  std::array<std::int64_t, 512> piece;
  for (std::int64_t at = 0; at < rows_; at += std::ssize(piece)) {
    const auto count = std::min<std::int64_t>(rows_ - at, std::ssize(piece));
    const auto ids = std::span(piece).first(static_cast<std::size_t>(count));
    if (dense_) {
      std::iota(ids.begin(), ids.end(), at);
    } else {
      PLIMSOLL_TRY_VOID(file.read_at(data_at_ + at * 8, std::as_writable_bytes(ids)));
    }
    PLIMSOLL_TRY_VOID(visit(ids));
  }
  return {};
}

Result<IdIndexInfo> IdSource::info() const {
  if (dense_) {
    return IdFingerprint::dense(rows_);
  }
  IdFingerprint fingerprint;
  PLIMSOLL_TRY_VOID(read([&](std::span<const std::int64_t> ids) -> Result<void> {
    fingerprint.add(ids);
    return {};
  }));
  return fingerprint.info();
}

}  // namespace plimsoll
