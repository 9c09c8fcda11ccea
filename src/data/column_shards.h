// SPDX-License-Identifier: Apache-2.0
//
// ColumnShards: the files of one column, read as if they were one array.
//
// Reading order: tensor_rows.h, this file, dataset_import.cpp.
//
// Threads: single-owner.   Memory: a path and a row count per shard; one file open at a time.
#pragma once

#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "data/tensor_rows.h"
#include "plimsoll/result.h"

namespace plimsoll {

/// Orders names as people do: runs of digits compare as numbers, "part2" before "part10".
[[nodiscard]] bool name_before(std::string_view a, std::string_view b) noexcept;

class ColumnShards {
 public:
  /// Finds the shards of `column` and compares their types and widths.
  /// Errors: kNotFound (a path, or no shard in a directory), kCorrupt, kInvalidArgument (a shard
  ///         unlike the first, or an ambiguous .safetensors file), naming the file.
  static Result<ColumnShards> open(const std::string& column,
                                   const std::vector<std::filesystem::path>& paths);

  /// Reads the next out.size() / row_bytes() rows, across shards, refusing NaN and infinity.
  /// Requires: as many rows are left.   Errors: kInvalidArgument naming file and row; kIo,
  /// kCorrupt.
  Result<void> read(std::span<std::byte> out);

  [[nodiscard]] std::int64_t rows() const noexcept { return rows_; }
  [[nodiscard]] std::int64_t row_bytes() const noexcept { return row_bytes_; }
  [[nodiscard]] DType dtype() const noexcept { return dtype_; }
  [[nodiscard]] const std::vector<std::int64_t>& row_shape() const noexcept { return row_shape_; }
  /// The first file, and how many more there are: "a/part0.npy and 3 more".
  [[nodiscard]] std::string described() const;

 private:
  struct Shard {
    std::filesystem::path path;
    std::int64_t rows{0};
  };

  std::string column_;
  std::vector<Shard> shards_;
  DType dtype_{DType::kFloat32};
  std::vector<std::int64_t> row_shape_;
  std::int64_t rows_{0};
  std::int64_t row_bytes_{0};
  std::size_t shard_{0};               // Being read.
  std::int64_t row_{0};                // Its next row.
  std::optional<TensorRows> current_;  // Open once its first row is wanted.
};

}  // namespace plimsoll
