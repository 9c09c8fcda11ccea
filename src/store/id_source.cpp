// SPDX-License-Identifier: Apache-2.0
//
// Source of the .npy format: numpy/lib/format.py, versions 1.0 to 3.0.
#include "store/id_source.h"

#include <algorithm>
#include <array>
#include <bit>
#include <charconv>
#include <cstring>
#include <string>

#include <fmt/format.h>

#include "base/check.h"
#include "os/file.h"

namespace plimsoll {
namespace {

static_assert(std::endian::native == std::endian::little, "files are read as they are");

constexpr std::int64_t kHeaderBytesMost = 4096;

struct NpyVector {
  std::int64_t rows{0};
  std::int64_t data_at{0};
};

tl::unexpected<Error> not_ids(const std::filesystem::path& path, const std::string& what) {
  return fail(ErrorCode::kInvalidArgument,
              fmt::format("{}: {}, expected a vector of int64", path.string(), what),
              "save the ids with numpy.save(file, ids.astype('int64'))");
}

// The number in "'shape': (N,)" of a header that is a Python dictionary.
Result<std::int64_t> shape_of(const std::filesystem::path& path, const std::string& header) {
  const auto key = header.find("'shape'");
  const auto open = key == std::string::npos ? key : header.find('(', key);
  const auto close = open == std::string::npos ? open : header.find(')', open);
  if (close == std::string::npos) {
    return fail(ErrorCode::kCorrupt, path.string() + ": no shape in its header");
  }
  const std::string inside = header.substr(open + 1, close - open - 1);
  std::int64_t rows = 0;
  const auto parsed = std::from_chars(inside.data(), inside.data() + inside.size(), rows);
  if (parsed.ec != std::errc() || std::string(parsed.ptr) != "," || rows < 0) {
    return not_ids(path, "shape (" + inside + ")");
  }
  return rows;
}

Result<NpyVector> read_npy_header(const File& file) {
  const auto& path = file.path();
  std::array<std::byte, 12> start;
  PLIMSOLL_TRY_VOID(file.read_at(0, start));
  if (std::memcmp(start.data(), "\x93NUMPY", 6) != 0) {
    return fail(ErrorCode::kCorrupt, path.string() + ": not a .npy file");
  }
  const bool short_form = start[6] == std::byte{1};
  std::uint32_t length = 0;
  std::memcpy(&length, start.data() + 8, short_form ? 2 : 4);
  const std::int64_t header_at = short_form ? 10 : 12;
  if (length > kHeaderBytesMost) {
    return fail(ErrorCode::kCorrupt, path.string() + ": its header is too long");
  }
  std::string header(length, ' ');
  PLIMSOLL_TRY_VOID(file.read_at(header_at, std::as_writable_bytes(std::span(header))));
  if (header.find("'<i8'") == std::string::npos && header.find("\"<i8\"") == std::string::npos) {
    return not_ids(path, "another dtype");
  }
  PLIMSOLL_TRY(const std::int64_t rows, shape_of(path, header));
  PLIMSOLL_TRY(const std::int64_t size, file.size());
  const std::int64_t data_at = header_at + length;
  if (size != data_at + rows * 8) {
    return fail(ErrorCode::kCorrupt, fmt::format("{}: {} bytes, expected {} for {} ids",
                                                 path.string(), size, data_at + rows * 8, rows));
  }
  return NpyVector{rows, data_at};
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
  PLIMSOLL_TRY(const NpyVector vector, read_npy_header(file));
  IdSource source;
  source.rows_ = vector.rows;
  source.data_at_ = vector.data_at;
  source.path_ = path;
  return source;
}

Result<void> IdSource::read(const Visit& visit) const {
  if (!path_.empty()) {
    PLIMSOLL_TRY(const File file, File::open(path_, FileMode::kRead));
    std::array<std::int64_t, 512> piece;
    for (std::int64_t at = 0; at < rows_;) {
      const auto count = std::min<std::int64_t>(rows_ - at, piece.size());
      const auto ids = std::span(piece).first(static_cast<std::size_t>(count));
      PLIMSOLL_TRY_VOID(file.read_at(data_at_ + at * 8, std::as_writable_bytes(ids)));
      PLIMSOLL_TRY_VOID(visit(ids));
      at += count;
    }
    return {};
  }
  if (!dense_) {
    return visit(ids_);
  }
  std::array<std::int64_t, 512> piece;
  for (std::int64_t at = 0; at < rows_;) {
    const auto count = std::min<std::int64_t>(rows_ - at, piece.size());
    for (std::int64_t i = 0; i < count; ++i) {
      piece[static_cast<std::size_t>(i)] = at + i;
    }
    PLIMSOLL_TRY_VOID(visit(std::span(piece).first(static_cast<std::size_t>(count))));
    at += count;
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
