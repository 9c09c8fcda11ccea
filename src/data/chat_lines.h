// SPDX-License-Identifier: Apache-2.0
//
// ChatLines: the lines of many files in order, plain or packed, from any place in them.
//
// A file whose first character that is no white space is a [ is one array: its elements are what
// lines are elsewhere; so are objects that are written over several lines. A feed may give the
// bytes of a file in its own way, or rows in place of files. What is read is read once: sums() says
// which bytes it was. Reading order: can_bytes.h, this file, chat_row.h, chat_reader.h.
//
// Threads: single-owner.   Memory: 320 KiB and the longest line seen, leased (Tag::kOther); while a
// zstd is read, kZstdBytes more.
#pragma once

#include <cstdint>
#include <filesystem>
#include <functional>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "data/can_bytes.h"
#include "memory/slab.h"
#include "plimsoll/governor.h"
#include "plimsoll/result.h"

namespace plimsoll {

/// The beginning of a line.
struct ChatPlace {
  std::int64_t file{0};  ///< Of the list; its length: the end.
  std::int64_t line{0};  ///< Lines of the file before it, or elements of its array.
  std::int64_t at{0};    ///< Bytes of the unpacked file before it.
};

/// Bytes of a file, unpacked, up to somewhere.
struct ChatSum {
  std::int64_t bytes{0};
  std::uint32_t crc{0};  ///< Their CRC-32C.
  bool operator==(const ChatSum&) const = default;
};

/// What gives the bytes of files that are not read here. Its calls may throw.
struct ChatFeed {
  enum class Kind : std::uint8_t {
    kNone,  ///< The file is read here.
    kText,  ///< Its bytes are those of a text.
    kRows   ///< Its bytes are rows, one a line.
  };
  /// Begins a file, from its first byte on.
  std::function<Kind(std::int64_t file)> begin{};
  /// Fills `out` from its beginning with the next bytes of the file begun: how many; 0 at the end.
  std::function<Result<std::int64_t>(std::span<std::byte>)> read{};
  /// How far the file begun is read, in what done() counts.
  std::function<std::int64_t()> done{};
  /// What a row of kRows is called behind its file; empty: by its number.
  std::function<std::string(std::int64_t file, std::int64_t line)> name{};

  explicit operator bool() const noexcept { return static_cast<bool>(begin); }
};

class ChatLines {
 public:
  /// `feed`: asked for each file, whose name it may be no more than.
  /// `between` is called before each read, and may throw: of a file that has no line to hand out,
  /// it is all that happens. Errors: kOverBudget.
  static Result<ChatLines> open(Governor governor, std::vector<std::filesystem::path> files,
                                std::int64_t line_bytes_max, ChatFeed feed = {},
                                std::function<void()> between = {});

  /// The next line, without its end, until the next call; nothing at the end of the last file.
  /// A line longer than line_bytes_max comes empty, and too_long() says so.
  /// Errors: kNotFound, kIo, kCorrupt (a damaged packed file, an array that does not end, or ends
  ///         before the file does), kInvalidArgument (packed as this build cannot read it),
  ///         kOverBudget; all name the file.
  Result<std::optional<std::string_view>> next();
  [[nodiscard]] bool too_long() const noexcept { return too_long_; }

  /// Of the line that next() gave, counted from 1.
  [[nodiscard]] std::int64_t line() const noexcept { return place_.line; }
  /// "chats.jsonl:7" for the seventh line of a file, "chats.json[6]" for an element or a row,
  /// "a.tar: 0006" for a row that has a name; `brief` without the folder.
  [[nodiscard]] std::string name_of(std::int64_t file, std::int64_t line, bool brief) const;
  /// Where the next line begins.
  [[nodiscard]] const ChatPlace& place() const noexcept { return place_; }
  /// Of the files up to place(), the last of them up to there.
  [[nodiscard]] std::vector<ChatSum> sums() const;
  /// Bytes of the files read so far, as they lie on disk; of a file of a feed, what the feed says.
  [[nodiscard]] std::int64_t done() const noexcept;

  /// Goes to a place that place() gave, with the sums() of then: what was read before it is read
  /// again, and compared. False where it is no longer the same; nothing else may be called then.
  /// Errors: kInvalidArgument (there is no such place), and those of next().
  Result<bool> go_to(const ChatPlace& place, const std::vector<ChatSum>& sums);
  /// Reads the rest of all files, no lines: sums() are then those of all. Errors: those of next().
  Result<void> skip_rest();

 private:
  ChatLines() noexcept = default;
  Result<bool> fill();  // More bytes behind end_; false at the end of the file.
  Result<bool> open_file();
  Result<void> open_bytes(const std::filesystem::path& file);
  Result<void> find_elements();
  void end_file();
  Result<std::int64_t> read_bytes(std::span<std::byte> out);
  Result<void> more_room();
  void take(std::size_t bytes) noexcept;  // Of text_ from begin_ on: they are read.
  Result<bool> skip(std::int64_t bytes);  // False where the file has fewer.
  Result<std::string_view> find_line(bool& found);
  Result<bool> begin_element();
  [[nodiscard]] std::size_t find_end(std::size_t from);
  [[nodiscard]] tl::unexpected<Error> corrupt(const std::string& what) const;

  std::vector<std::filesystem::path> files_;
  std::vector<bool> numbered_;  // Of a file that was opened: elements or rows, not lines.
  std::vector<bool> rows_;      // Of a file that was opened: it is of rows, which may have names.
  ChatFeed feed_;
  ChatFeed::Kind fed_{ChatFeed::Kind::kNone};  // The open file.
  std::function<void()> between_{};
  std::int64_t line_bytes_max_{0};
  Slab slab_;
  std::span<std::byte> packed_;
  Lease line_lease_;
  Lease unpack_lease_;
  std::vector<char> text_;  // Bytes [begin_, end_) are read and not handed out.
  std::size_t begin_{0};
  std::size_t end_{0};
  bool open_{false};
  std::optional<CanBytes> bytes_;  // Of the open file; none where it is fed.
  std::int64_t bytes_before_{0};   // Of files that are done, as done() counts.
  // The open file is an array, or objects over several lines; within the element under way.
  bool array_{false};
  bool objects_{false};
  int depth_{0};
  bool quoted_{false};
  bool ended_{false};  // Of an object over several lines.
  bool escaped_{false};
  ChatPlace place_{};
  std::vector<ChatSum> sums_;  // Of files that are done.
  ChatSum sum_{};              // Of the open one.
  bool too_long_{false};
};

}  // namespace plimsoll
