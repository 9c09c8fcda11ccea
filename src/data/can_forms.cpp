// SPDX-License-Identifier: Apache-2.0
#include "data/can_forms.h"

#include <algorithm>
#include <array>
#include <span>

namespace plimsoll {
namespace {

constexpr std::size_t kFieldsMost = 32;
constexpr std::size_t kBeforeBytes = 3;  // Time, id, DLC.

struct Fields {
  std::array<std::string_view, kFieldsMost> all{};
  std::size_t count{0};
  bool more{false};  // Than there is room for.
};

Fields split(std::string_view line, char separator) noexcept {
  Fields fields;
  const auto put = [&](std::string_view field) {
    if (fields.count == kFieldsMost) {
      fields.more = true;
    } else {
      fields.all[fields.count++] = field;
    }
  };
  if (separator == ' ') {
    for (std::string_view rest = line; !fields.more;) {
      const std::string_view token = can_token(rest);
      if (token.empty()) {
        break;
      }
      put(token);
    }
    return fields;
  }
  for (std::string_view rest = line; !fields.more;) {
    const std::size_t at = rest.find(separator);
    put(can_bare(rest.substr(0, at)));
    if (at == std::string_view::npos) {
      break;
    }
    rest.remove_prefix(at + 1);
  }
  while (fields.count > 0 && fields.all[fields.count - 1].empty()) {
    --fields.count;  // As a table of rows of several lengths is filled up.
  }
  return fields;
}

// The position behind `word` in a text, whatever its case; npos where it is not there.
std::size_t behind(std::string_view text, std::string_view word, std::size_t from = 0) noexcept {
  const auto* const found =
      std::search(text.begin() + std::min(from, text.size()), text.end(), word.begin(), word.end(),
                  [](char a, char b) { return (a >= 'A' && a <= 'Z' ? a - 'A' + 'a' : a) == b; });
  return found == text.end() ? std::string_view::npos
                             : static_cast<std::size_t>(found - text.begin()) + word.size();
}

// Bytes of `fields`, each a field of its own.
bool read_bytes(std::span<const std::string_view> fields, bool decimal, CanFrame& frame) noexcept {
  frame.bytes.fill(0);
  for (std::size_t i = 0; i < fields.size(); ++i) {
    std::uint8_t byte = 0;
    if (!parse_can_byte(fields[i], decimal, byte) || (i >= frame.bytes.size() && byte != 0)) {
      return false;
    }
    if (i < frame.bytes.size()) {
      frame.bytes[i] = byte;
    }
  }
  return true;
}

CanBad read_hcrl_row(std::string_view line, const CanShape& shape, bool decimal,
                     CanRow& row) noexcept {
  const Fields fields = split(line, shape.separator);
  if (fields.more || fields.count < kBeforeBytes) {
    return CanBad::kFields;
  }
  if (!parse_can_time(fields.all[0], row.time)) {
    return CanBad::kTimestamp;
  }
  if (!parse_can_id(fields.all[1], decimal, row.frame.id)) {
    return CanBad::kId;
  }
  const auto length = parse_can_length(fields.all[2]);
  if (!length) {
    return CanBad::kPayload;
  }
  std::span<const std::string_view> rest(fields.all.data() + kBeforeBytes,
                                         fields.count - kBeforeBytes);
  if (rest.size() < *length) {
    return CanBad::kFields;
  }
  row.labelled = shape.labelled;
  if (shape.labelled) {
    if (rest.size() == *length) {
      return CanBad::kLabel;
    }
    if (!parse_can_label(rest.back(), row.frame.attack)) {
      return CanBad::kLabel;
    }
    rest = rest.first(rest.size() - 1);
  }
  // Behind the bytes that the DLC counts, a table has nothing, or zeros.
  for (const std::string_view beyond : rest.subspan(*length)) {
    std::uint8_t byte = 0;
    if (!beyond.empty() && (!parse_can_byte(beyond, decimal, byte) || byte != 0)) {
      return CanBad::kFields;
    }
  }
  row.empty = *length == 0;
  return read_bytes(rest.first(*length), decimal, row.frame) ? CanBad::kNone : CanBad::kPayload;
}

// Tokens of bytes up to the end, of which the last may be a label.
CanBad read_byte_tokens(std::string_view text, std::size_t length, bool remote,
                        CanRow& row) noexcept {
  const Fields fields = split(text, ' ');
  row.labelled = false;
  row.frame.bytes.fill(0);
  std::size_t count = fields.count;
  for (std::size_t i = 0; i < fields.count; ++i) {
    if (fields.all[i].starts_with('\'')) {  // The bytes once more, as characters.
      count = i;
      break;
    }
  }
  if (fields.more) {
    return CanBad::kFields;
  }
  row.empty = length == 0 || (remote && count < length);
  if (row.empty) {
    return CanBad::kNone;
  }
  if (count < length || count > length + 1) {
    return CanBad::kPayload;
  }
  if (count == length + 1) {
    if (!parse_can_label(fields.all[length], row.frame.attack)) {
      return CanBad::kLabel;
    }
    row.labelled = true;
  }
  return read_bytes(std::span(fields.all).first(length), false, row.frame) ? CanBad::kNone
                                                                           : CanBad::kPayload;
}

CanBad read_hcrl_text(std::string_view line, CanRow& row) noexcept {
  constexpr std::string_view kId = "id:";
  constexpr std::string_view kLength = "dlc:";
  const std::size_t time_at = behind(line, "timestamp:");
  const std::size_t id_at =
      time_at == std::string_view::npos ? time_at : behind(line, kId, time_at);
  const std::size_t dlc_at = id_at == std::string_view::npos ? id_at : behind(line, kLength, id_at);
  if (dlc_at == std::string_view::npos) {
    return CanBad::kFields;
  }
  if (!parse_can_time(can_trim(line.substr(time_at, id_at - kId.size() - time_at)), row.time)) {
    return CanBad::kTimestamp;
  }
  std::string_view middle = line.substr(id_at, dlc_at - kLength.size() - id_at);
  if (!parse_can_id(can_token(middle), false, row.frame.id)) {
    return CanBad::kId;
  }
  const bool remote = can_token(middle).starts_with('1');  // 100; a frame with data has 000.
  std::string_view rest = line.substr(dlc_at);
  const auto length = parse_can_length(can_token(rest));
  return length ? read_byte_tokens(rest, *length, remote, row) : CanBad::kPayload;
}

// What is behind the # of candump's short form.
CanBad read_short_payload(std::string_view data, CanRow& row) noexcept {
  if (data.starts_with('#')) {  // CAN FD: flags, then the bytes.
    data.remove_prefix(std::min<std::size_t>(2, data.size()));
  } else if (data.starts_with('R') || data.starts_with('r')) {
    data = {};
    row.empty = true;
  }
  if (const std::size_t raw = data.find('_'); raw != std::string_view::npos) {
    data = data.substr(0, raw);  // A length code above 8 of a frame of 8 bytes.
  }
  row.empty = data.empty();
  return parse_can_payload(data, row.frame.bytes) ? CanBad::kNone : CanBad::kPayload;
}

CanBad read_candump(std::string_view line, CanRow& row) noexcept {
  std::string_view rest = can_trim(line);
  row.time = {0, 0};
  if (rest.starts_with('(')) {
    const std::size_t end = rest.find(')');
    if (end == std::string_view::npos) {
      return CanBad::kFields;
    }
    if (!parse_can_time(can_trim(rest.substr(1, end - 1)), row.time)) {
      return CanBad::kTimestamp;
    }
    rest.remove_prefix(end + 1);
  }
  can_token(rest);  // The interface.
  std::string_view id = can_token(rest);
  const std::size_t mark = id.find('#');
  const std::string_view data = mark == std::string_view::npos ? id : id.substr(mark + 1);
  if (id.empty()) {
    return CanBad::kFields;
  }
  if (!parse_can_id(id.substr(0, mark), false, row.frame.id)) {
    return CanBad::kId;
  }
  if (mark == std::string_view::npos) {
    std::string_view length = can_token(rest);
    if (length.size() < 3 || length.front() != '[' || length.back() != ']') {
      return CanBad::kFields;
    }
    const auto count = parse_can_length(length.substr(1, length.size() - 2));
    const bool remote = behind(rest, "remote") != std::string_view::npos;
    return count ? read_byte_tokens(rest, *count, remote, row) : CanBad::kPayload;
  }
  row.labelled = false;
  const CanBad bad = read_short_payload(data, row);
  if (const std::string_view last = can_token(rest); bad == CanBad::kNone && !last.empty()) {
    // R and T are here the direction, as candump -x writes it.
    if (last == "R" || last == "T") {
      return can_token(rest).empty() ? CanBad::kNone : CanBad::kFields;
    }
    row.labelled = true;
    if (!parse_can_label(last, row.frame.attack)) {
      return CanBad::kLabel;
    }
    return can_token(rest).empty() ? CanBad::kNone : CanBad::kFields;
  }
  return bad;
}

bool is_candump(std::string_view line) noexcept {
  const bool timed = line.starts_with('(');
  if (timed) {
    const std::size_t end = line.find(')');
    if (end == std::string_view::npos) {
      return false;
    }
    line.remove_prefix(end + 1);
  }
  if (can_token(line).empty()) {
    return false;
  }
  std::string_view id = can_token(line);
  std::uint32_t number = 0;
  if (const std::size_t mark = id.find('#'); mark != std::string_view::npos) {
    return timed || parse_can_id(id.substr(0, mark), false, number);
  }
  return parse_can_id(id, false, number) && can_token(line).starts_with('[');
}

}  // namespace

char can_separator(std::string_view line) noexcept {
  for (const char separator : {',', ';', '\t'}) {
    if (line.find(separator) != std::string_view::npos) {
      return separator;
    }
  }
  return can_trim(line).find(' ') == std::string_view::npos ? ',' : ' ';
}

CanShape can_shape(std::string_view line, bool decimal) noexcept {
  line = can_trim(line);
  if (behind(line.substr(0, 10), "timestamp:") == 10 &&
      behind(line, "dlc:") != std::string_view::npos) {
    return {.form = CanForm::kHcrlText};
  }
  if (is_candump(line)) {
    return {.form = CanForm::kCandump};
  }
  CanShape shape{.separator = can_separator(line)};
  const Fields fields = split(line, shape.separator);
  CanTime time;
  std::uint32_t id = 0;
  const bool payload = fields.all[2].size() > 1 && fields.count <= kBeforeBytes + 1;
  if (fields.count < kBeforeBytes || payload || !parse_can_time(fields.all[0], time) ||
      !parse_can_id(fields.all[1], decimal, id)) {
    return shape;
  }
  const auto length = parse_can_length(fields.all[2]);
  if (length && fields.count >= kBeforeBytes + *length) {
    shape.form = CanForm::kHcrlRow;
    shape.labelled = fields.count > kBeforeBytes + *length;
  }
  return shape;
}

const char* foreign_can_log(std::string_view line) noexcept {
  line = can_trim(line);
  const bool columns = line.find(',') != std::string_view::npos;
  if (!columns && (line.starts_with("date ") || line.starts_with("base hex"))) {
    return "a log of Vector's (ASC)";
  }
  if (line.starts_with(";$FILEVERSION")) {
    return "a trace of PEAK's (TRC)";
  }
  if (line.starts_with("VERSION \"")) {
    return "a description of messages (DBC), which has no frames";
  }
  return nullptr;
}

CanBad read_can_line(std::string_view line, const CanShape& shape, bool decimal,
                     CanRow& row) noexcept {
  row.frame.attack = 0;
  switch (shape.form) {
    case CanForm::kHcrlRow:
      return read_hcrl_row(line, shape, decimal, row);
    case CanForm::kHcrlText:
      return read_hcrl_text(line, row);
    default:
      return read_candump(line, row);
  }
}

}  // namespace plimsoll
