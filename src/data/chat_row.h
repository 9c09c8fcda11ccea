// SPDX-License-Identifier: Apache-2.0
//
// ChatRow: one line of JSON as messages or text, or what is odd about it.
//
// Five shapes: {"messages": [{"role", "content"}]} (OpenAI), {"conversations": [{"from", "value"}]}
// (ShareGPT), {"instruction", "input", "output"} (Alpaca), {"prompt", "completion"}, {"text"}.
// Only these strings are kept; all else in a line is read past.
//
// Threads: pure functions.   Memory: the strings, no more than the line.
#pragma once

#include <array>
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

namespace plimsoll {

/// What may be odd about a line. Up to kBad the line is left out as an error; from there on
/// counted.
enum class ChatOddity : std::uint8_t {
  kNotUtf8,
  kNotJson,
  kNotAnObject,
  kLineTooLong,
  kNoShape,     ///< None of the five.
  kBadMessage,  ///< A message that is no object with a role and content.
  kUnknownRole,
  kNoMessages,
  kTextTooLong,  ///< More bytes without a border between messages than are tokenized at once.
  kTemplate,     ///< The template refused the messages.
  kBlankLine,    ///< The first that is no error.
  kEmptyTurn,
  kNoAssistant,
  kNothingTrained,  ///< Left out.
  kCut,             ///< Cut at the longest row.
  kDuplicate,
};
inline constexpr std::size_t kChatOddities = 16;
/// The key it is counted under, "not_json"; and what is said of it in an error.
[[nodiscard]] const char* chat_oddity_key(ChatOddity oddity) noexcept;
[[nodiscard]] const char* chat_oddity_text(ChatOddity oddity) noexcept;
[[nodiscard]] constexpr bool is_chat_error(ChatOddity oddity) noexcept {
  return oddity < ChatOddity::kBlankLine;
}

struct ChatMessage {
  std::string role{};
  std::string content{};
};

struct ChatRow {
  enum class Kind : std::uint8_t { kMessages, kPrompt, kText, kBad };
  Kind kind{Kind::kBad};
  ChatOddity oddity{ChatOddity::kNoShape};  ///< Of a bad one.
  std::string detail{};                     ///< Of a bad one: the role, the parser's words.
  /// Of kMessages: all of them. Of kPrompt: the prompt and the completion. Of kText: the text.
  std::vector<ChatMessage> messages{};
  /// The line has more than roles and texts (tool calls, parts, tools): the template needs it all.
  bool rich{false};
  bool empty_turn{false};
  bool assistant{false};
};

/// The names at the top of a row that are looked at.
[[nodiscard]] std::vector<std::string> chat_row_keys();

/// Never fails: a line that is not one of the shapes is a bad row.
[[nodiscard]] ChatRow parse_chat_row(std::string_view line);

}  // namespace plimsoll
