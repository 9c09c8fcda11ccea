// SPDX-License-Identifier: Apache-2.0
//
// ChatRow: one line of JSON as messages or text, what is odd about it, or that Python is to read
// it.
//
// Read here are rows of strings alone: {"messages": [{"role", "content"}]} (OpenAI),
// {"conversations": [{"from", "value"}]} (ShareGPT), {"instruction", "input", "output", "system"}
// (Alpaca), {"prompt", "completion"}, {"text"}, and beside these keys that are to be ignored, and
// nulls. Every other row is one for python/plimsoll/data/importers/_row_reader.py, which reads
// these as well, in the same way (decision 0061).
//
// Threads: pure functions.   Memory: the strings, no more than the line.
#pragma once

#include <array>
#include <cstdint>
#include <string>
#include <string_view>
#include <unordered_map>
#include <utility>
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
  kDuplicateKey,
  kUnknownKey,
  kBadValue,
  kPreference,
  kBlankLine,  ///< The first that is no error.
  kEmptyTurn,
  kNoAssistant,
  kNothingTrained,  ///< Left out.
  kCut,             ///< Cut at the longest row.
  kDuplicate,
  kLabelFalse,  ///< Left out.
  kNotTrained,  ///< Left out.
  kNulls,
  kPartsPrinted,
};
inline constexpr std::size_t kChatOddities = 24;
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

/// The names of keys that are not used, at the top of a row and of its messages.
class ChatKeys {
 public:
  static constexpr int kNone = -1;
  static constexpr int kEmpty = 0;  ///< What nulls are counted as.

  ChatKeys() = default;
  ChatKeys(const std::vector<std::string>& of_rows, const std::vector<std::string>& of_messages);

  /// Its number, or kNone.
  [[nodiscard]] int of_row(const std::string& name) const { return number(of_rows_, name); }
  [[nodiscard]] int of_message(const std::string& name) const { return number(of_messages_, name); }
  /// By number: "id", "messages.id".
  [[nodiscard]] const std::vector<std::string>& names() const noexcept { return names_; }

 private:
  using Numbers = std::unordered_map<std::string, int>;
  static int number(const Numbers& numbers, const std::string& name) {
    const auto found = numbers.find(name);
    return found == numbers.end() ? kNone : found->second;
  }
  std::vector<std::string> names_{"empty"};
  Numbers of_rows_{};
  Numbers of_messages_{};
};

struct ChatRow {
  enum class Kind : std::uint8_t { kMessages, kPrompt, kText, kBad, kWhole };
  Kind kind{Kind::kBad};
  ChatOddity oddity{ChatOddity::kNoShape};  ///< Of a bad one.
  std::string detail{};                     ///< Of a bad one: the parser's words.
  /// Of kMessages: all of them. Of kPrompt: the prompt and the completion. Of kText: the text.
  std::vector<ChatMessage> messages{};
  bool empty_turn{false};
  bool assistant{false};
  std::int64_t keys{0};                                 ///< All of the line's.
  std::vector<std::pair<int, std::int64_t>> counted{};  ///< Those not used, by ChatKeys' numbers.
};

/// Names of roles as rows have them, and as templates do.
[[nodiscard]] std::vector<std::pair<std::string, std::string>> chat_roles();

/// Never fails: a line that is not one of the shapes is a bad row, or one of kWhole.
[[nodiscard]] ChatRow parse_chat_row(std::string_view line, const ChatKeys& keys);

}  // namespace plimsoll
