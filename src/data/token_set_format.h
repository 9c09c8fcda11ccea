// SPDX-License-Identifier: Apache-2.0
//
// The file of a TokenSet: its header, and the entry of a row in its index.
//
// Reading order: docs/formats/token_set.md, this file, token_writer.cpp, token_set.cpp.
//
// Threads: pure functions.   Memory: the header's bytes.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <span>
#include <string>

#include "plimsoll/result.h"
#include "plimsoll/token_set.h"

namespace plimsoll {

inline constexpr std::int64_t kTokenHeaderBytes = 4096;
inline constexpr std::int64_t kTokenFingerprintBytes = 64;
inline constexpr std::int64_t kTokenAboutMost = 8 << 20;

/// Where a row's bytes are, in the index.
struct TokenIndexEntry {
  std::int64_t offset{0};  ///< Of its ids in the file; the mask's bits follow them.
  std::uint32_t tokens{0};
  std::uint32_t crc{0};  ///< token_row_crc().
};
static_assert(sizeof(TokenIndexEntry) == 16);

/// Where the parts of a file are.
struct TokenSetPlaces {
  TokenSetInfo info{};
  std::int64_t index_at{0};
  std::int64_t about_at{0};
  std::int64_t about_bytes{0};
  std::uint32_t about_crc{0};
};

/// Bytes of a row of so many tokens.
[[nodiscard]] constexpr std::int64_t token_row_bytes(std::int64_t tokens, int id_bytes) noexcept {
  return tokens * id_bytes + (tokens + 7) / 8;
}

/// A row's checksum, of that of its bytes: its number and its entry are part of it.
[[nodiscard]] std::uint32_t token_row_crc(std::int64_t row, const TokenIndexEntry& entry,
                                          std::uint32_t crc_of_bytes) noexcept;

/// Whether the file begins as that of a token set does.
[[nodiscard]] bool is_token_set(const std::filesystem::path& path);

using TokenHeader = std::array<std::byte, kTokenHeaderBytes>;
[[nodiscard]] TokenHeader token_header(const TokenSetPlaces& places) noexcept;

/// Checks the header and that the parts fill the file. `info.about` is not there yet.
/// Errors: kCorrupt; `name` is what they call the file.
Result<TokenSetPlaces> parse_token_header(std::span<const std::byte, kTokenHeaderBytes> bytes,
                                          std::int64_t file_bytes, const std::string& name);

}  // namespace plimsoll
