// SPDX-License-Identifier: Apache-2.0
//
// Reads NumPy's .npy files, versions 1 to 3: little-endian, C order, at least one dimension.
// Source: NumPy, "NEP 1: A simple file format for NumPy arrays".
//
// Reading order: tensor_rows.h, this file.
//
// Threads: pure functions.   Memory: the header, at most 1 MiB.
#pragma once

#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <span>
#include <string>
#include <vector>

#include "data/tensor_rows.h"
#include "plimsoll/result.h"

namespace plimsoll {

/// What the header says.
struct NpyHeader {
  DType dtype{DType::kFloat32};
  std::vector<std::int64_t> shape{};
  std::int64_t data_offset{0};
};

/// Parses the first bytes of a file of `file_bytes`; `name` is what errors call it.
/// Errors: kCorrupt (not .npy, malformed, or truncated: naming the row at which it ends),
///         kInvalidArgument (an element type, byte or index order that is not read).
Result<NpyHeader> parse_npy_header(std::span<const std::byte> head, std::int64_t file_bytes,
                                   const std::string& name);

/// Opens a file for reading by rows. Errors: kNotFound, kIo, and as parse_npy_header().
Result<TensorRows> open_npy(const std::filesystem::path& path);

}  // namespace plimsoll
