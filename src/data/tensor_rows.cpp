// SPDX-License-Identifier: Apache-2.0
//
// TensorRows: see tensor_rows.h.
//
// Threads, Memory: as the header says.
#include "data/tensor_rows.h"

#include <fmt/core.h>

#include "base/check.h"

namespace plimsoll {

std::optional<std::int64_t> tensor_bytes(std::int64_t element_bytes,
                                         std::span<const std::int64_t> shape) noexcept {
  std::int64_t bytes = element_bytes;
  for (const std::int64_t extent : shape) {
    if (extent < 0 || extent > (std::int64_t{1} << 62) ||
        __builtin_mul_overflow(bytes, extent, &bytes) || bytes > (std::int64_t{1} << 62)) {
      return std::nullopt;
    }
  }
  return bytes;
}

std::string shape_text(std::span<const std::int64_t> shape) {
  std::string text;
  for (const std::int64_t extent : shape) {
    text += fmt::format("{}{}", text.empty() ? "" : ", ", extent);
  }
  return fmt::format("[{}]", text);
}

TensorRows::TensorRows(File file, DType dtype, std::vector<std::int64_t> shape, std::int64_t offset)
    : file_(std::move(file)), dtype_(dtype), row_shape_(std::move(shape)), offset_(offset) {
  PLIMSOLL_CHECK(!row_shape_.empty(), "a tensor of no dimension has no rows");
  rows_ = row_shape_.front();
  row_shape_.erase(row_shape_.begin());
  row_bytes_ = tensor_bytes(dtype_bytes(dtype), row_shape_).value_or(0);
}

Result<void> TensorRows::read(std::int64_t first, std::span<std::byte> out) const {
  return file_.read_at(offset_ + first * row_bytes_, out);
}

}  // namespace plimsoll
