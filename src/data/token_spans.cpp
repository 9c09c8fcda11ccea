// SPDX-License-Identifier: Apache-2.0
#include "data/token_spans.h"

#include <algorithm>
#include <utility>

namespace plimsoll {
namespace {

// Bytes of a text before each of some characters, asked for in order.
class ByteOfCharacter {
 public:
  explicit ByteOfCharacter(std::string_view text) noexcept : text_(text) {}
  std::int64_t operator()(std::int64_t character) noexcept {
    while (at_ < text_.size() && character_ < character) {
      do {
        ++at_;
      } while (at_ < text_.size() && (static_cast<unsigned char>(text_[at_]) & 0xC0U) == 0x80U);
      ++character_;
    }
    return static_cast<std::int64_t>(at_);
  }

 private:
  std::string_view text_;
  std::size_t at_{0};
  std::int64_t character_{0};
};

}  // namespace

TokenSpans::TokenSpans(const std::vector<std::string>& tokens, bool trimmed, bool prefixed)
    : trimmed_(trimmed), prefixed_(prefixed) {
  ends_.reserve(tokens.size());
  for (const std::string& token : tokens) {
    bytes_ += token;
    ends_.push_back(static_cast<std::int64_t>(bytes_.size()));
  }
}

std::string_view TokenSpans::token(std::uint32_t id) const noexcept {
  if (id >= ends_.size()) {
    return {};
  }
  const auto begin = static_cast<std::size_t>(id == 0 ? 0 : ends_[id - 1]);
  return std::string_view(bytes_).substr(begin, static_cast<std::size_t>(ends_[id]) - begin);
}

// Spaces at the ends of a token that are not its own.
std::pair<std::size_t, std::size_t> TokenSpans::spaces(std::string_view token,
                                                       bool first) const noexcept {
  if (!trimmed_) {
    return {0, 0};
  }
  const std::size_t before = token.find_first_not_of(' ');
  if (before == std::string_view::npos) {
    return {token.size(), 0};
  }
  return {first && prefixed_ ? 0 : before, token.size() - 1 - token.find_last_not_of(' ')};
}

std::optional<std::vector<TokenSpan>> TokenSpans::find(
    std::span<const std::uint32_t> ids, std::string_view text,
    const std::vector<TokenSpan>& characters) const {
  ByteOfCharacter byte_of(text);
  std::vector<TokenSpan> bytes;
  for (const TokenSpan& span : characters) {
    const std::int64_t begin = byte_of(span.begin);
    bytes.push_back({begin, byte_of(span.end)});
  }
  std::vector<TokenSpan> found(bytes.size());
  std::size_t next = 0;  // The first span that may have more tokens.
  std::size_t at = 0;
  for (std::size_t k = 0; k < ids.size(); ++k) {
    const std::string_view said = token(ids[k]);
    if (said.empty() || text.compare(at, said.size(), said) != 0) {
      return std::nullopt;
    }
    const auto [before, behind] = spaces(said, k == 0);
    const auto begin = static_cast<std::int64_t>(at + before);
    at += said.size();
    const auto end = static_cast<std::int64_t>(at - behind);
    while (next < bytes.size() && bytes[next].end <= begin) {
      ++next;
    }
    for (std::size_t i = next; begin < end && i < bytes.size() && bytes[i].begin < end; ++i) {
      const auto number = static_cast<std::int64_t>(k);
      found[i] = {found[i].end == 0 ? number : found[i].begin, number + 1};
    }
  }
  if (at != text.size()) {
    return std::nullopt;
  }
  std::erase_if(found, [](const TokenSpan& span) { return span.end == 0; });
  return found;
}

}  // namespace plimsoll
