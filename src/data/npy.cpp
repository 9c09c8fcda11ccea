// SPDX-License-Identifier: Apache-2.0
//
// Threads, Memory: as the header says.
#include "data/npy.h"

#include <algorithm>
#include <utility>

#include <fmt/core.h>

#include "base/check.h"
#include "base/npy_header.h"

namespace plimsoll {

Result<NpyHeader> parse_npy_header(std::span<const std::byte> head, std::int64_t file_bytes,
                                   const std::string& name) {
  PLIMSOLL_TRY(NpyFields fields, parse_npy_fields(head, name));
  const auto dtype = parse_dtype(fields.descr);
  if (!dtype) {
    return fail(ErrorCode::kInvalidArgument, fmt::format("{}: {}", name, *dtype.error().detail));
  }
  if (fields.fortran_order) {
    return fail(ErrorCode::kInvalidArgument, fmt::format("{}: Fortran order is not read", name),
                "save numpy.ascontiguousarray(array)");
  }
  NpyHeader header{*dtype, std::move(fields.shape), fields.data_offset};
  const auto data_bytes = tensor_bytes(dtype_bytes(header.dtype), header.shape);
  if (header.shape.empty() || !data_bytes) {
    return fail(ErrorCode::kCorrupt,
                fmt::format("{}: shape {} cannot be read by rows", name, shape_text(header.shape)));
  }
  const std::int64_t there = std::max<std::int64_t>(0, file_bytes - header.data_offset);
  if (there < *data_bytes) {  // So no extent is 0.
    const std::int64_t row_bytes = *data_bytes / header.shape.front();
    return fail(ErrorCode::kCorrupt,
                fmt::format("{}: truncated: it promises {} rows of {} bytes and ends in row {}",
                            name, header.shape.front(), row_bytes, there / row_bytes));
  }
  return header;
}

Result<TensorRows> open_npy(const std::filesystem::path& path) {
  PLIMSOLL_TRY(File file, File::open(path, FileMode::kRead));
  PLIMSOLL_TRY(const std::int64_t file_bytes, file.size());
  // Nearly every header is 128 bytes; the length it states tells whether to read more.
  std::vector<std::byte> head(static_cast<std::size_t>(std::min<std::int64_t>(file_bytes, 4096)));
  PLIMSOLL_TRY_VOID(file.read_at(0, head));
  auto header = parse_npy_header(head, file_bytes, path.string());
  if (!header && file_bytes > 4096) {
    head.resize(static_cast<std::size_t>(std::min(file_bytes, kNpyHeaderBytesMax)));
    PLIMSOLL_TRY_VOID(file.read_at(0, head));
    header = parse_npy_header(head, file_bytes, path.string());
  }
  if (!header) {
    return tl::unexpected(header.error());
  }
  return TensorRows(std::move(file), header->dtype, std::move(header->shape), header->data_offset);
}

}  // namespace plimsoll
