// SPDX-License-Identifier: Apache-2.0
//
// Small text files that a run reads again, each ending with a checksum of all that comes before.
//
//   .toml   last line "# crc32c 0a1b2c3d"        .json   last member "crc32c": "0a1b2c3d"
//
// The checksum is the CRC-32C of every byte before it: a file cut short or a flipped bit is noticed
// before anything of it is used.
//
// Threads: free functions.   Memory: the text.
#pragma once

#include <cstdint>
#include <filesystem>
#include <string>

#include "plimsoll/result.h"

namespace plimsoll {

inline constexpr const char* kSealKey = "crc32c";  ///< The last member of a sealed JSON object.

/// Replaces the file by `text` and its checksum, whole or not at all.
/// Requires: a path that ends in .toml, or in .json and an object that is not empty. Errors: kIo.
Result<void> write_sealed(const std::filesystem::path& path, const std::string& text);

/// Reads what write_sealed() wrote, checksum included: it is a comment, or a member.
/// Errors: kNotFound; kCorrupt (no checksum at its end, or another one), naming the file; kIo.
Result<std::string> read_sealed(const std::filesystem::path& path,
                                std::int64_t bytes_max = 16 << 20);

}  // namespace plimsoll
