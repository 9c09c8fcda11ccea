// SPDX-License-Identifier: Apache-2.0
//
// CanCsv: the frames of one file, in its order, and a count of everything odd about it.
//
// Lines are found and fields parsed in one buffer, read a chunk at a time; a line that a chunk cuts
// is moved to the front. Spaces, tabs, quotes around a field, CRLF and blank lines are taken as
// they come; time may step back. Whatever else does not parse is refused, or skipped and counted.
// Reading order: can_bytes.h, this file, can_window.h.
//
// Threads: single-owner.   Memory: the buffer lent at open.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "data/can_bytes.h"
#include "plimsoll/graph_set.h"
#include "plimsoll/result.h"

namespace plimsoll {

struct CanFrame {
  std::uint32_t id{0};                  ///< At most 29 bits.
  std::array<std::uint8_t, 8> bytes{};  ///< Of the payload; zeros beyond its end.
  std::uint8_t attack{0};
};

inline constexpr std::int64_t kCanLineMax = 4096;  ///< Longer lines are no frames.

class CanCsv {
 public:
  /// Of the file's bytes those read so far, and the unpacked bytes of this part. False: cancelled.
  using Look = std::function<bool(std::int64_t position, std::int64_t part_bytes)>;

  /// `columns`: the names of time, id, payload and label. `name`: what errors call the file.
  /// Requires: buffer.size() > kCanLineMax; it outlives this.
  /// `look` is called with every part that was read; once it says no, reading ends with an error.
  CanCsv(CanBytes bytes, std::span<std::byte> buffer, std::vector<std::string> columns,
         std::string name, bool skip_bad, Look look = {});

  /// Fills `out` with the frames that follow; fewer only at the end, where 0 are left.
  /// Errors: kInvalidArgument, kCorrupt (both as FILE:LINE), kIo.
  Result<std::int64_t> read(std::span<CanFrame> out);

  /// Counts so far, of rows and oddities; name, bytes and graphs are left to others.
  [[nodiscard]] const GraphFileInfo& counts() const noexcept { return counts_; }
  [[nodiscard]] CanBytes& bytes() noexcept { return bytes_; }

 private:
  enum class Bad { kNone, kFields, kTimestamp, kId, kPayload, kLabel };
  static constexpr int kColumns = 4;
  static constexpr int kFieldsMax = 256;
  struct Fields {
    std::array<std::string_view, kColumns> wanted{};
    int count{0};
  };

  /// The next line without its end; false at the end of the file.
  Result<bool> next_line(std::string_view& line);
  Result<void> fill();
  Result<bool> begin_file(std::string_view line);  // True: the line was a header.
  [[nodiscard]] bool split(std::string_view line, Fields& fields) const noexcept;
  Bad parse(std::string_view line, CanFrame& frame) noexcept;
  Result<void> refuse_or_count(Bad bad, std::string_view line);
  [[nodiscard]] tl::unexpected<Error> refuse(const std::string& what, const char* advice) const;

  CanBytes bytes_;
  std::span<char> buffer_;
  std::vector<std::string> columns_;
  std::string name_;
  bool skip_bad_;
  Look look_;
  std::size_t begin_{0};  // Of what is not yet parsed, in buffer_.
  std::size_t end_{0};
  bool at_end_{false};    // Nothing more will be read.
  bool dropping_{false};  // Inside a line that is too long.
  bool started_{false};
  std::int64_t line_{0};                         // Number of the line handed out last.
  std::array<int, kFieldsMax> column_of_field_;  // Which wanted column, or −1.
  int fields_{kColumns};
  std::int64_t last_time_ns_{INT64_MIN};
  GraphFileInfo counts_{};
};

}  // namespace plimsoll
