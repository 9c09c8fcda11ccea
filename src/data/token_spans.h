// SPDX-License-Identifier: Apache-2.0
//
// TokenSpans: which tokens have a character of a text's spans, by the bytes of a byte-level
// vocabulary's tokens.
//
// Nothing is searched: the tokens' bytes, one behind the other, are compared with the text's, and
// where they are not the same there is no answer. Offsets of tokenizers give the same spans, and
// take longer to make.
//
// Threads: thread-safe once made.   Memory: the tokens' bytes, and 8 a token.
#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "plimsoll/token_set.h"

namespace plimsoll {

class TokenSpans {
 public:
  /// `tokens`: bytes of each id, "" where there are none. `trimmed`: spaces at a token's ends are
  /// not its own; `prefixed`: but those of a text's first token are.
  TokenSpans(const std::vector<std::string>& tokens, bool trimmed, bool prefixed);

  /// For each span of characters of `text`, which are in order, the tokens of its first to its last
  /// one, where there are any. Nothing where `ids` are not the tokens of `text`.
  [[nodiscard]] std::optional<std::vector<TokenSpan>> find(
      std::span<const std::uint32_t> ids, std::string_view text,
      const std::vector<TokenSpan>& characters) const;

 private:
  [[nodiscard]] std::string_view token(std::uint32_t id) const noexcept;
  [[nodiscard]] std::pair<std::size_t, std::size_t> spaces(std::string_view token,
                                                           bool first) const noexcept;
  std::string bytes_;
  std::vector<std::int64_t> ends_;  // Of each id's token in bytes_.
  bool trimmed_;
  bool prefixed_;
};

}  // namespace plimsoll
