// SPDX-License-Identifier: Apache-2.0
//
// npy_header: what stands before the numbers of a .npy file.
//
// The readers are src/data/npy.cpp and, for ids, src/store/id_source.cpp.
//
// Threads: a pure function.   Memory: the text it returns.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <string_view>

namespace plimsoll {

/// The header of an array in C order, version 1.0. `descr` is NumPy's ("<f4").
/// 128 bytes, or for a shape too long for that the next multiple of 64: so that it can be written
/// again, in place, once it is known how many rows there are.
/// Requires: fewer than 65,000 bytes of shape.
/// Source:   numpy.lib.format, "Format Version 1.0".
[[nodiscard]] std::string npy_header(std::string_view descr, std::span<const std::int64_t> shape);

}  // namespace plimsoll
