// SPDX-License-Identifier: Apache-2.0
//
// can_forms: lines of CAN logs that no header describes: HCRL's rows and texts, and candump's.
//
//   1478198376.389427,0316,8,05,21,68,09,21,21,00,6f,R                  HCRL: DLC, bytes, flag
//   Timestamp: 1479121434.850202  ID: 0350  000  DLC: 8  05 28 84 66 6d 00 00 a2
//   (1436509052.249713) can0 044#2A366C2B0A                             candump -l
//   can0  044   [5]  2A 36 6C 2B 0A                                     candump
//
// Reading order: can_fields.h, this file, can_csv.h.
//
// Threads: pure functions.   Memory: none.
#pragma once

#include <cstdint>
#include <string_view>

#include "data/can_fields.h"

namespace plimsoll {

enum class CanForm : std::uint8_t { kColumns, kHcrlRow, kHcrlText, kCandump };

/// What the first line of a file says of all its lines.
struct CanShape {
  CanForm form{CanForm::kColumns};
  char separator{','};
  bool labelled{true};  ///< Of kHcrlRow: a flag is behind the bytes.
};

/// One line, read.
struct CanRow {
  CanFrame frame{};
  CanTime time{};
  bool empty{false};    ///< It has no payload.
  bool labelled{true};  ///< Otherwise the frame is taken as normal.
};

/// The character between the fields of a line.
[[nodiscard]] char can_separator(std::string_view line) noexcept;
/// The form of a line. kColumns: it is none of the others. `decimal`: numbers are.
[[nodiscard]] CanShape can_shape(std::string_view line, bool decimal) noexcept;
/// What a file is called that another program reads ("Vector's ASC log"); null for any other line.
[[nodiscard]] const char* foreign_can_log(std::string_view line) noexcept;
/// Reads a line of a form that is not kColumns.
[[nodiscard]] CanBad read_can_line(std::string_view line, const CanShape& shape, bool decimal,
                                   CanRow& row) noexcept;

}  // namespace plimsoll
