// SPDX-License-Identifier: Apache-2.0
//
// npy_header: what stands before the numbers of a .npy file, a Python dictionary of three keys.
//
// What it means for rows is src/data/npy.cpp's, and for ids src/store/id_source.cpp's.
//
// Threads: pure functions.   Memory: the text, at most 1 MiB.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "plimsoll/result.h"

namespace plimsoll {

/// The header of an array in C order, version 1.0. `descr` is NumPy's ("<f4").
/// 128 bytes, or for a shape too long for that the next multiple of 64: so that it can be written
/// again, in place, once it is known how many rows there are.
/// Requires: fewer than 65,000 bytes of shape.
/// Source:   numpy.lib.format, "Format Version 1.0".
[[nodiscard]] std::string npy_header(std::string_view descr, std::span<const std::int64_t> shape);

/// The first bytes of a file, of which no more tell anything.
inline constexpr std::int64_t kNpyHeaderBytesMax = (1 << 20) + 16;

/// What a header says, unchecked but for its form: the size of the file is the caller's to compare.
struct NpyFields {
  std::string descr{};
  bool fortran_order{false};
  std::vector<std::int64_t> shape{};  // None is negative.
  std::int64_t data_offset{0};
};

/// Parses the first bytes of a file, of versions 1.0 to 3.0; `name` is what errors call it.
/// Errors: kCorrupt (not .npy, malformed, truncated).
[[nodiscard]] Result<NpyFields> parse_npy_fields(std::span<const std::byte> head,
                                                 const std::string& name);

}  // namespace plimsoll
