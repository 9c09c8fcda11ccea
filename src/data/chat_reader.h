// SPDX-License-Identifier: Apache-2.0
//
// ChatReader: files of chats become texts to tokenize, a bounded piece at a time, with the
// characters that are trained on; ChatPieces: a chat template as the texts around the messages.
//
// What is between two messages depends on their roles and on how near they are to the ends
// (chat_gap_key()): Python finds these texts by rendering probes, and proves them on others. A row
// that they do not cover is read and rendered in Python.
// Reading order: chat_lines.h, chat_row.h, this file,
// python/plimsoll/data/importers/_chat_template.py.
//
// Threads: single-owner.   Memory: that of ChatLines, three times the longest line, 1 MiB; leased.
#pragma once

#include <array>
#include <cstdint>
#include <filesystem>
#include <functional>
#include <map>
#include <string>
#include <vector>

#include "data/chat_lines.h"
#include "data/chat_row.h"
#include "plimsoll/token_set.h"

namespace plimsoll {

/// The text between two messages (or an end), and what of it is trained on with them.
struct ChatGap {
  std::string text{};
  std::int64_t after{0};   ///< Characters at its beginning that belong to the message before it.
  std::int64_t before{0};  ///< Characters at its end that belong to the message behind it.
  std::int64_t split{-1};  ///< Byte where a text may be cut without changing a token; −1: nowhere.
};

/// A template, compiled.
struct ChatPieces {
  std::map<std::string, ChatGap> gaps{};
  std::vector<std::string> stripped{};  ///< Roles whose contents lose white space at their ends.
  std::vector<std::string> triggers{};  ///< A content with one of these goes to the template.
};

/// The key of the gap before message k of `count` (k = count: the end), between these roles ("" at
/// an end).
[[nodiscard]] std::string chat_gap_key(const std::string& before, const std::string& behind,
                                       std::size_t k, std::size_t count);

enum class ChatTraining : std::uint8_t { kAssistant, kLast, kAll };

struct ChatReaderOptions {
  std::vector<std::filesystem::path> files{};
  ChatFeed feed{};  ///< In place of files: they are then one name for it.
  ChatTraining training{ChatTraining::kAssistant};
  std::int64_t line_bytes_max{100 << 20};
  std::int64_t text_bytes_max{2 << 20};  ///< Most bytes of one text to tokenize.
  std::int64_t errors_max{0};            ///< Lines left out as errors; one more ends the import.
  std::function<void()> between{};       ///< As of ChatLines::open().
  ChatKeys keys{};
};

/// One text to tokenize, a row for Python, or what is wrong with a line.
struct ChatText {
  enum class Kind : std::uint8_t { kRendered, kPrompt, kText, kWhole, kBad };
  Kind kind{Kind::kRendered};
  ChatOddity oddity{ChatOddity::kNoShape};  ///< Of kBad.
  std::int64_t file{0};
  std::int64_t line{0};
  std::string text{};                ///< Of kWhole: the line. Of kBad: what note() is told.
  std::vector<TokenSpan> trained{};  ///< Characters. Of kText and kPrompt: those of the file's.
  bool last{true};                   ///< Of its row; more texts of the same row follow otherwise.
  std::vector<ChatMessage> messages{};  ///< Of every sampled row.
};

class ChatReader {
 public:
  /// Errors: kOverBudget.
  static Result<ChatReader> open(Governor governor, ChatReaderOptions options);
  void set_pieces(ChatPieces pieces);

  /// The next texts, of about so many bytes: none at the end. Every `sample`-th row that is
  /// rendered here, counted in each file anew, brings its messages along, to be compared; 0: none
  /// does.
  /// Errors: kInvalidArgument naming file and line, past errors_max; those of ChatLines.
  Result<std::vector<ChatText>> next(std::int64_t bytes, std::int64_t sample);

  /// Counts what is odd about a line; one that came as kBad, too. Errors: kInvalidArgument, past
  /// errors_max.
  Result<void> note(ChatOddity oddity, std::int64_t file, std::int64_t line,
                    const std::string& detail);

  /// Counts the keys of rows that came as kWhole. `counted`: names, and how many are not used.
  void count_row(std::int64_t used, std::int64_t refused,
                 const std::vector<std::pair<std::string, std::int64_t>>& counted);

  /// Between two rows: where the next begins, what was read, and the counts, as JSON for go_on().
  [[nodiscard]] std::string state() const;
  [[nodiscard]] bool between_rows() const noexcept { return next_gap_ == 0; }
  /// False where what was read is no longer what the state says: this reader is then of no use.
  /// Errors: kInvalidArgument (no such state), those of ChatLines::go_to().
  Result<bool> go_on(const std::string& state);
  /// Reads the rest of the files, no rows. Errors: those of ChatLines.
  Result<void> skip_rest() { return lines_.skip_rest(); }

  [[nodiscard]] std::int64_t rows() const noexcept { return rows_; }
  [[nodiscard]] std::int64_t done() const noexcept { return lines_.done(); }
  [[nodiscard]] std::string name_of(std::int64_t file, std::int64_t line) const {
    return lines_.name_of(file, line, false);
  }
  [[nodiscard]] std::vector<ChatSum> sums() const { return lines_.sums(); }
  /// {"lines": …, "rows": …, "odd": {key: {"count": …, "first": ["FILE:LINE", …]}},
  /// "keys": {"used": …, "refused": …, "counted": {name: [rows, keys]}}}.
  [[nodiscard]] std::string report() const;

 private:
  struct Odd {
    std::int64_t count{0};
    std::vector<std::string> first{};  // At most kExamples of them.
  };
  ChatReader(ChatReaderOptions options, ChatLines lines);
  Result<bool> read_row();
  [[nodiscard]] bool bad(ChatOddity oddity, std::string detail = {});
  void count_keys();
  void begin_file(std::int64_t file);
  [[nodiscard]] bool duplicate(std::string_view line);
  bool compiled();
  void find_gaps();
  [[nodiscard]] bool fits() const;
  ChatText render_more();
  ChatText whole_row();

  ChatReaderOptions options_;
  ChatLines lines_;
  Lease lease_;
  ChatPieces pieces_;
  std::vector<const ChatGap*> table_;  // By the roles beside a gap and its distance from the ends.
  std::array<Odd, kChatOddities> odd_{};
  std::int64_t lines_read_{0};
  std::int64_t rows_{0};
  std::int64_t keys_used_{0};
  std::int64_t keys_refused_{0};
  std::map<std::string, std::array<std::int64_t, 2>> keys_counted_{};  // Rows, keys.
  // Of the file under way alone, so that a part of the files is read as it is among all of them.
  std::vector<std::uint64_t> seen_;  // Hashes of lines, by their low bits.
  std::int64_t rendered_{0};
  // The row under way.
  ChatRow row_{};
  std::vector<const ChatGap*> gaps_{};  // Of the row, from table_; null where there is none.
  std::string raw_{};
  std::int64_t file_{0};
  std::int64_t line_{0};
  std::size_t next_gap_{0};  // 0: no row is under way.
  std::size_t last_answer_{0};
  ChatText carried_{};  // What of the row's text was cut off for the next text.
  std::int64_t chars_{0};
};

}  // namespace plimsoll
