// SPDX-License-Identifier: Apache-2.0
//
// Byte sizes: literals (6_GiB), parsing ("512MiB", "6GB", "25%") and printing ("768.0 MiB").
//
// Threads: pure functions.   Memory: the returned strings.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>

#include "plimsoll/result.h"

namespace plimsoll {

namespace literals {
constexpr std::int64_t operator""_KiB(unsigned long long n) {
  return static_cast<std::int64_t>(n) << 10;
}
constexpr std::int64_t operator""_MiB(unsigned long long n) {
  return static_cast<std::int64_t>(n) << 20;
}
constexpr std::int64_t operator""_GiB(unsigned long long n) {
  return static_cast<std::int64_t>(n) << 30;
}
}  // namespace literals

/// Parses a size. Binary (KiB MiB GiB TiB) and decimal (KB MB GB TB) units, bare bytes, and
/// single letters as binary units ("512M"); case and inner spaces are ignored. "25%" is that
/// share of `whole_bytes`, and an error when `whole_bytes` is 0.
/// Errors: kInvalidArgument, naming the text and the accepted forms. Never returns < 0.
[[nodiscard]] Result<std::int64_t> parse_bytes(std::string_view text, std::int64_t whole_bytes = 0);

/// Prints a size with one decimal in the largest binary unit below it: "768.0 MiB", "512 B".
[[nodiscard]] std::string format_bytes(std::int64_t bytes);

}  // namespace plimsoll
