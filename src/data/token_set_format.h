// SPDX-License-Identifier: Apache-2.0
//
// What a token set is among files of rows: what its header counts, and how large a row is.
//
// Reading order: docs/formats/token_set.md, row_file.h, this file, token_writer.cpp, token_set.cpp.
//
// Threads: pure functions.   Memory: the header's bytes.
#pragma once

#include <cstdint>
#include <filesystem>

#include "data/row_file.h"
#include "plimsoll/token_set.h"

namespace plimsoll {

inline constexpr RowFileKind kTokenSetKind{.magic = {'P', 'L', 'T', 'O', 'K', 'E', 'N', 'S'},
                                           .name = "token set",
                                           .doing = "is making this token set"};

/// Bytes of a row of so many tokens.
[[nodiscard]] constexpr std::int64_t token_row_bytes(std::int64_t tokens, int id_bytes) noexcept {
  return tokens * id_bytes + (tokens + 7) / 8;
}

/// Whether the file begins as that of a token set does.
[[nodiscard]] inline bool is_token_set(const std::filesystem::path& path) {
  return is_row_file(path, kTokenSetKind);
}

/// What the header counts, in its order; unit is that of an id's bytes.
[[nodiscard]] std::array<std::int64_t, kRowCounts> token_counts(const TokenSetInfo& info) noexcept;
[[nodiscard]] TokenSetInfo token_info(const std::array<std::int64_t, kRowCounts>& counts,
                                      std::uint32_t id_bytes);
/// Whether a set may have such numbers.
[[nodiscard]] bool sensible_tokens(const TokenSetInfo& info) noexcept;

}  // namespace plimsoll
