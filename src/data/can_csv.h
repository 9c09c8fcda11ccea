// SPDX-License-Identifier: Apache-2.0
//
// CanCsv: the frames of one file, in its order, and a count of everything odd about it.
//
// Lines are found and fields parsed in one buffer, read a chunk at a time; a line that a chunk cuts
// is moved to the front. What the lines are, the first of them says: a header, or one of the forms
// of can_forms.h. Spaces, tabs, quotes around a field, CRLF and blank lines are taken as they come;
// time may step back. Whatever else does not parse is refused, or skipped and counted.
// Reading order: can_bytes.h, can_fields.h, can_forms.h, can_road.h, this file, can_window.h.
//
// Threads: single-owner.   Memory: the buffer lent at open.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "data/can_bytes.h"
#include "data/can_forms.h"
#include "data/can_road.h"
#include "plimsoll/can_import.h"
#include "plimsoll/graph_set.h"
#include "plimsoll/result.h"

namespace plimsoll {

inline constexpr std::int64_t kCanLineMax = 4096;  ///< Longer lines are no frames.

struct CanCsvOptions {
  std::vector<std::string> columns{};  ///< The names of time, id, payload and label.
  std::string name{};                  ///< What errors call the file.
  bool skip_bad{false};
  CanDialect dialect{CanDialect::kAuto};
  std::optional<RoadLabels> road{};  ///< Who says which frames of a candump log are attacks.
};

class CanCsv {
 public:
  /// Of the file's bytes those read so far, and the unpacked bytes of this part. False: cancelled.
  using Look = std::function<bool(std::int64_t position, std::int64_t part_bytes)>;

  /// Requires: buffer.size() > kCanLineMax; it outlives this.
  /// `look` is called with every part that was read; once it says no, reading ends with an error.
  CanCsv(CanBytes bytes, std::span<std::byte> buffer, CanCsvOptions options, Look look = {});

  /// Fills `out` with the frames that follow; fewer only at the end, where 0 are left.
  /// Errors: kInvalidArgument, kCorrupt (both as FILE:LINE), kIo.
  Result<std::int64_t> read(std::span<CanFrame> out);

  /// Counts so far, of rows and oddities; name, bytes and graphs are left to others.
  [[nodiscard]] const GraphFileInfo& counts() const noexcept { return counts_; }
  [[nodiscard]] CanBytes& bytes() noexcept { return bytes_; }

 private:
  // Columns, by what they say: the four of the options, then one for each byte of a payload.
  static constexpr int kNamed = 4;
  static constexpr int kBytes = 8;
  static constexpr int kColumns = kNamed + kBytes;
  static constexpr int kFieldsMax = 256;
  struct Fields {
    std::array<std::string_view, kColumns> wanted{};
    int count{0};
  };

  /// The next line without its end; false at the end of the file.
  Result<bool> next_line(std::string_view& line);
  Result<void> fill();
  Result<bool> begin_file(std::string_view line);  // True: the line was a header.
  Result<void> begin_columns(std::string_view line);
  Result<std::vector<std::string>> header_names(std::string_view line) const;
  Result<void> find_named(const std::vector<std::string>& names, std::string_view line);
  Result<void> find_bytes(const std::vector<std::string>& names);
  [[nodiscard]] Result<bool> known_form(std::string_view line);
  [[nodiscard]] bool split(std::string_view line, Fields& fields) const noexcept;
  CanBad parse(std::string_view line, CanFrame& frame) noexcept;
  CanBad parse_columns(std::string_view line, CanRow& row) noexcept;
  CanBad parse_byte_columns(const Fields& fields, CanRow& row) const noexcept;
  Result<void> refuse_or_count(CanBad bad, std::string_view line);
  [[nodiscard]] tl::unexpected<Error> refuse(const std::string& what, const char* advice) const;
  void note_skipped(const std::string& what);

  CanBytes bytes_;
  std::span<char> buffer_;
  CanCsvOptions options_;
  Look look_;
  std::size_t begin_{0};  // Of what is not yet parsed, in buffer_.
  std::size_t end_{0};
  bool at_end_{false};    // Nothing more will be read.
  bool dropping_{false};  // Inside a line that is too long.
  bool started_{false};
  std::int64_t line_{0};  // Number of the line handed out last.
  CanShape shape_{};
  bool decimal_{false};
  std::array<int, kFieldsMax> column_of_field_{};  // Which wanted column, or −1.
  std::array<bool, kNamed> has_{true, true, true, true};
  int byte_columns_{0};  // In place of a column for the whole payload.
  int fields_{kNamed};
  CanTime first_time_{};
  CanTime last_time_{};
  GraphFileInfo counts_{};
};

}  // namespace plimsoll
