// SPDX-License-Identifier: Apache-2.0
#include "data/token_set_format.h"

#include <algorithm>

namespace plimsoll {

std::array<std::int64_t, kRowCounts> token_counts(const TokenSetInfo& info) noexcept {
  return {info.vocabulary, info.rows, info.tokens, info.trained_tokens, info.longest_row};
}

TokenSetInfo token_info(const std::array<std::int64_t, kRowCounts>& counts,
                        std::uint32_t id_bytes) {
  return {.rows = counts[1],
          .tokens = counts[2],
          .trained_tokens = counts[3],
          .longest_row = counts[4],
          .vocabulary = counts[0],
          .id_bytes = static_cast<int>(id_bytes)};
}

bool sensible_tokens(const TokenSetInfo& info) noexcept {
  return (info.id_bytes == 2 || info.id_bytes == 4) && info.vocabulary > 0 &&
         info.vocabulary <= (info.id_bytes == 2 ? 65536 : std::int64_t{1} << 31) &&
         info.rows <= info.tokens && info.trained_tokens <= info.tokens &&
         info.longest_row <= std::min(info.tokens, kRowTokensMost);
}

}  // namespace plimsoll
