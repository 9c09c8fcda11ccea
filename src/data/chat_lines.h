// SPDX-License-Identifier: Apache-2.0
//
// ChatLines: the lines of many files in order, plain or packed, from any place in them.
//
// Reading order: can_bytes.h, this file, chat_row.h, chat_reader.h.
//
// Threads: single-owner.   Memory: 320 KiB and the longest line seen, leased (Tag::kOther).
#pragma once

#include <cstdint>
#include <filesystem>
#include <functional>
#include <optional>
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
  std::int64_t line{0};  ///< Lines of the file before it.
  std::int64_t at{0};    ///< Bytes of the unpacked file before it.
};

class ChatLines {
 public:
  /// `between` is called before each read of a file, and may throw: of a file that has no line to
  /// hand out, it is all that happens. Errors: kOverBudget.
  static Result<ChatLines> open(Governor governor, std::vector<std::filesystem::path> files,
                                std::int64_t line_bytes_max,
                                std::function<void()> between = nullptr);

  /// The next line, without its end, until the next call; nothing at the end of the last file.
  /// A line longer than line_bytes_max comes empty, and too_long() says so.
  /// Errors: kNotFound, kIo, kCorrupt (a damaged packed file), kOverBudget; all name the file.
  Result<std::optional<std::string_view>> next();
  [[nodiscard]] bool too_long() const noexcept { return too_long_; }

  /// Of the line that next() gave, counted from 1, and its file.
  [[nodiscard]] std::int64_t line() const noexcept { return place_.line; }
  [[nodiscard]] const std::filesystem::path& file() const noexcept { return files_[file_]; }
  /// Where the next line begins.
  [[nodiscard]] const ChatPlace& place() const noexcept { return place_; }
  /// Goes to a place that place() gave: a packed file is unpacked again up to there.
  /// Errors: kInvalidArgument (there is no such place: the file is shorter), and those of next().
  Result<void> go_to(const ChatPlace& place);

 private:
  ChatLines() noexcept = default;
  Result<bool> fill();  // More bytes behind text_end_; false at the end of the file.
  Result<bool> open_file();
  Result<std::int64_t> read(std::span<char> out);

  std::vector<std::filesystem::path> files_;
  std::int64_t line_bytes_max_{0};
  std::function<void()> between_{};
  Slab slab_;
  std::span<std::byte> packed_;
  Lease line_lease_;
  std::vector<char> text_;  // Bytes [begin_, end_) are read and not handed out.
  std::size_t begin_{0};
  std::size_t end_{0};
  std::optional<CanBytes> bytes_;
  std::size_t file_{0};
  ChatPlace place_{};
  bool too_long_{false};
};

}  // namespace plimsoll
