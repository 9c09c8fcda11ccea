// SPDX-License-Identifier: Apache-2.0
//
// TensorRows: one array in a file (.npy, or a tensor of a .safetensors), read by rows.
//
// Reading order: this file, npy.h, safetensors.h, dataset_import.cpp.
//
// Threads: thread-compatible; read() may be called concurrently.   Memory: a descriptor and a path.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "os/file.h"
#include "plimsoll/feature_store.h"
#include "plimsoll/result.h"

namespace plimsoll {

/// dtype × product of `shape` in bytes, or nothing when negative or too large for 62 bits.
[[nodiscard]] std::optional<std::int64_t> tensor_bytes(
    std::int64_t element_bytes, std::span<const std::int64_t> shape) noexcept;

/// "[3, 512]".
[[nodiscard]] std::string shape_text(std::span<const std::int64_t> shape);

class TensorRows {
 public:
  TensorRows() noexcept = default;
  /// Requires: the file holds rows × row bytes from `offset` on.
  TensorRows(File file, DType dtype, std::vector<std::int64_t> shape, std::int64_t offset);

  /// Reads rows first, first + 1, … into `out`.
  /// Requires: out.size() is a multiple of row_bytes(); the rows exist.   Errors: kIo, kCorrupt.
  Result<void> read(std::int64_t first, std::span<std::byte> out) const;

  /// Lets the kernel forget what was read.
  void drop_cache() noexcept { file_.drop_cache(); }

  [[nodiscard]] DType dtype() const noexcept { return dtype_; }
  [[nodiscard]] std::int64_t rows() const noexcept { return rows_; }
  [[nodiscard]] std::int64_t row_bytes() const noexcept { return row_bytes_; }
  [[nodiscard]] const std::vector<std::int64_t>& row_shape() const noexcept { return row_shape_; }
  [[nodiscard]] const std::filesystem::path& path() const noexcept { return file_.path(); }

 private:
  File file_;
  DType dtype_{DType::kFloat32};
  std::vector<std::int64_t> row_shape_{};
  std::int64_t rows_{0};
  std::int64_t row_bytes_{0};
  std::int64_t offset_{0};
};

}  // namespace plimsoll
