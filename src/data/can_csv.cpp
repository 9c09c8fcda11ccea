// SPDX-License-Identifier: Apache-2.0
#include "data/can_csv.h"

#include <algorithm>
#include <charconv>
#include <cmath>
#include <cstring>
#include <utility>

#include <fmt/core.h>

#include "base/check.h"

namespace plimsoll {
namespace {

constexpr std::uint8_t kNoDigit = 0xFF;
constexpr std::uint32_t kIdMost = 0x1FFFFFFF;  // 29 bits: the extended format.
constexpr const char* kRowAdvice =
    "mend the row, or pass --skip-bad (skip_bad) to leave such rows out and count them";
constexpr const char* kColumnAdvice =
    "pass --columns TIME,ID,PAYLOAD,LABEL (columns) with the names in its header";

constexpr std::array<std::uint8_t, 256> make_hex_digits() {
  std::array<std::uint8_t, 256> digits{};
  digits.fill(kNoDigit);
  for (std::uint8_t i = 0; i < 10; ++i) {
    digits[static_cast<std::size_t>('0' + i)] = i;
  }
  for (std::uint8_t i = 0; i < 6; ++i) {
    digits[static_cast<std::size_t>('a' + i)] = static_cast<std::uint8_t>(10 + i);
    digits[static_cast<std::size_t>('A' + i)] = static_cast<std::uint8_t>(10 + i);
  }
  return digits;
}
constexpr std::array<std::uint8_t, 256> kHex = make_hex_digits();

std::uint8_t hex(char c) noexcept {
  return kHex[static_cast<unsigned char>(c)];
}

bool is_space(char c) noexcept {
  return c == ' ' || c == '\t' || c == '\r';
}

std::string_view trim(std::string_view text) noexcept {
  while (!text.empty() && is_space(text.front())) {
    text.remove_prefix(1);
  }
  while (!text.empty() && is_space(text.back())) {
    text.remove_suffix(1);
  }
  return text;
}

// Without the spaces, then the quotes, then the spaces within them.
std::string_view bare(std::string_view text) noexcept {
  text = trim(text);
  if (text.size() >= 2 && text.front() == '"' && text.back() == '"') {
    text = trim(text.substr(1, text.size() - 2));
  }
  return text;
}

std::string lower(std::string_view text) {
  std::string out(text);
  std::transform(out.begin(), out.end(), out.begin(), [](char c) {
    return c >= 'A' && c <= 'Z' ? static_cast<char>(c - 'A' + 'a') : c;
  });
  return out;
}

// What an error shows of a line: its beginning, with whatever is no text as a dot.
std::string excerpt(std::string_view line) {
  constexpr std::size_t kShown = 60;
  std::string out(line.substr(0, kShown));
  std::replace_if(
      out.begin(), out.end(), [](char c) { return c < ' ' || c > '~'; }, '.');
  return line.size() > kShown ? out + "…" : out;
}

// Seconds as nanoseconds. Plain decimals are the rule; exponents and the like go the long way.
bool parse_time(std::string_view text, std::int64_t& ns) noexcept {
  constexpr std::size_t kWholeDigitsMost = 9 + 1;  // 9,999,999,999 s is the year 2286.
  constexpr double kNsPerSecond = 1e9;
  constexpr double kSecondsMost = 9.2e9;
  std::int64_t whole = 0;
  std::size_t at = 0;
  while (at < text.size() && text[at] >= '0' && text[at] <= '9' && at < kWholeDigitsMost) {
    whole = whole * 10 + (text[at++] - '0');
  }
  std::int64_t fraction = 0;
  std::size_t digits = 0;
  if (at > 0 && at < text.size() && text[at] == '.') {
    for (++at; at < text.size() && text[at] >= '0' && text[at] <= '9' && digits < 9; ++digits) {
      fraction = fraction * 10 + (text[at++] - '0');
    }
  }
  if (at > 0 && at == text.size() && whole < static_cast<std::int64_t>(kSecondsMost)) {
    for (; digits < 9; ++digits) {
      fraction *= 10;
    }
    ns = whole * static_cast<std::int64_t>(kNsPerSecond) + fraction;
    return true;
  }
  double seconds = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), seconds);
  if (text.empty() || error != std::errc() || end != text.data() + text.size() ||
      !(std::abs(seconds) < kSecondsMost)) {
    return false;
  }
  ns = static_cast<std::int64_t>(seconds * kNsPerSecond);
  return true;
}

bool parse_id(std::string_view text, std::uint32_t& id) noexcept {
  if (text.size() > 2 && text[0] == '0' && (text[1] == 'x' || text[1] == 'X')) {
    text.remove_prefix(2);
  }
  std::uint64_t value = 0;
  for (const char c : text) {
    const std::uint8_t digit = hex(c);
    if (digit == kNoDigit || value > kIdMost) {
      return false;
    }
    value = value * 16 + digit;
  }
  id = static_cast<std::uint32_t>(value);
  return !text.empty() && value <= kIdMost;
}

bool parse_payload(std::string_view text, std::array<std::uint8_t, 8>& bytes) noexcept {
  bytes.fill(0);
  std::size_t count = 0;
  for (std::size_t at = 0; at < text.size(); ++count) {
    if (is_space(text[at]) && count > 0) {  // Between bytes.
      ++at;
      --count;
      continue;
    }
    if (count == bytes.size() || at + 1 == text.size()) {
      return false;
    }
    const std::uint8_t high = hex(text[at]);
    const std::uint8_t low = hex(text[at + 1]);
    if (high == kNoDigit || low == kNoDigit) {
      return false;
    }
    bytes[count] = static_cast<std::uint8_t>(high << 4 | low);
    at += 2;
  }
  return true;
}

bool parse_label(std::string_view text, std::uint8_t& attack) noexcept {
  if (text.empty() || (text[0] != '0' && text[0] != '1')) {
    return false;
  }
  attack = static_cast<std::uint8_t>(text[0] - '0');
  return text.size() == 1 || text == "0.0" || text == "1.0";
}

// Names of columns seen in the field beside those of the options.
bool known_name(int column, const std::string& name) {
  static const std::array<std::vector<std::string>, 4> kNames{
      {{"timestamp", "time", "t"},
       {"arbitration_id", "can_id", "can id", "id"},
       {"data_field", "data", "payload"},
       {"attack", "label", "flag"}}};
  const auto& names = kNames[static_cast<std::size_t>(column)];
  return std::find(names.begin(), names.end(), name) != names.end();
}

}  // namespace

CanCsv::CanCsv(CanBytes bytes, std::span<std::byte> buffer, std::vector<std::string> columns,
               std::string name, bool skip_bad, Look look)
    : bytes_(std::move(bytes)),
      buffer_(reinterpret_cast<char*>(buffer.data()), buffer.size()),
      columns_(std::move(columns)),
      name_(std::move(name)),
      skip_bad_(skip_bad),
      look_(std::move(look)) {
  PLIMSOLL_CHECK(buffer.size() > static_cast<std::size_t>(kCanLineMax), "a buffer below a line");
  column_of_field_.fill(-1);
  for (int i = 0; i < kColumns; ++i) {
    column_of_field_[static_cast<std::size_t>(i)] = i;
  }
}

tl::unexpected<Error> CanCsv::refuse(const std::string& what, const char* advice) const {
  return fail(ErrorCode::kInvalidArgument, fmt::format("{}:{}: {}", name_, line_, what), advice);
}

// ---- Lines ----

// Moves what is left to the front and reads behind it, at most a chunk: the buffer less a line.
Result<void> CanCsv::fill() {
  std::memmove(buffer_.data(), buffer_.data() + begin_, end_ - begin_);
  end_ -= begin_;
  begin_ = 0;
  const auto room =
      std::min(buffer_.size() - end_, buffer_.size() - static_cast<std::size_t>(kCanLineMax));
  const auto got = bytes_.read(std::as_writable_bytes(buffer_.subspan(end_, room)));
  if (got) {
    at_end_ = *got == 0;
    end_ += static_cast<std::size_t>(*got);
    if (look_ && !look_(bytes_.position(), *got)) {
      return fail(ErrorCode::kInvalidArgument, name_ + ": import cancelled");
    }
    return {};
  }
  if (got.error().code != ErrorCode::kCorrupt) {
    return tl::unexpected(got.error());
  }
  if (!skip_bad_) {
    return fail(ErrorCode::kCorrupt,
                fmt::format("{}:{}: {}", name_, line_ + 1, *got.error().detail),
                got.error().advice);
  }
  // The line that the damage cut is lost with it.
  ++counts_.damaged_ends;
  at_end_ = true;
  end_ = 0;
  return {};
}

Result<bool> CanCsv::next_line(std::string_view& line) {
  std::size_t looked = 0;  // Bytes from begin_ on that hold no end of line.
  for (;;) {
    const char* const from = buffer_.data() + begin_ + looked;
    const auto* newline = static_cast<const char*>(std::memchr(from, '\n', end_ - begin_ - looked));
    if (newline == nullptr && !at_end_) {
      looked = end_ - begin_;
      if (looked >= static_cast<std::size_t>(kCanLineMax)) {
        if (!dropping_) {
          ++line_;
          if (!skip_bad_) {
            return refuse(fmt::format("a line longer than {} bytes: not CSV (\"{}\")", kCanLineMax,
                                      excerpt({buffer_.data() + begin_, looked})),
                          kRowAdvice);
          }
          --line_;
          ++counts_.bad_lines;
        }
        dropping_ = true;
        begin_ = end_;
        looked = 0;
      }
      PLIMSOLL_TRY_VOID(fill());
      looked = std::min(looked, end_ - begin_);  // Less than it was where damage cut the line off.
      continue;
    }
    const std::size_t stop =
        newline != nullptr ? static_cast<std::size_t>(newline - buffer_.data()) : end_;
    if (newline == nullptr && begin_ == end_) {
      return false;
    }
    line = std::string_view(buffer_.data() + begin_, stop - begin_);
    begin_ = newline != nullptr ? stop + 1 : end_;
    ++line_;
    if (std::exchange(dropping_, false)) {
      looked = 0;
      continue;
    }
    if (line.size() >= static_cast<std::size_t>(kCanLineMax)) {
      if (!skip_bad_) {
        return refuse(fmt::format("a line longer than {} bytes: not CSV (\"{}\")", kCanLineMax,
                                  excerpt(line)),
                      kRowAdvice);
      }
      ++counts_.bad_lines;
      looked = 0;
      continue;
    }
    return true;
  }
}

// ---- Fields ----

bool CanCsv::split(std::string_view line, Fields& fields) const noexcept {
  const char* at = line.data();
  const char* const end = at + line.size();
  fields.count = 0;
  for (;;) {
    const char* const begin = at;
    while (at != end && *at != ',') {
      ++at;
    }
    if (fields.count == fields_) {
      return false;
    }
    const int column = column_of_field_[static_cast<std::size_t>(fields.count++)];
    if (column >= 0) {
      fields.wanted[static_cast<std::size_t>(column)] =
          bare({begin, static_cast<std::size_t>(at - begin)});
    }
    if (at == end) {
      return fields.count == fields_;
    }
    ++at;
  }
}

CanCsv::Bad CanCsv::parse(std::string_view line, CanFrame& frame) noexcept {
  Fields fields;
  if (!split(line, fields)) {
    return Bad::kFields;
  }
  std::int64_t time_ns = 0;
  if (!parse_time(fields.wanted[0], time_ns)) {
    return Bad::kTimestamp;
  }
  if (!parse_id(fields.wanted[1], frame.id)) {
    return Bad::kId;
  }
  if (!parse_payload(fields.wanted[2], frame.bytes)) {
    return Bad::kPayload;
  }
  if (!parse_label(fields.wanted[3], frame.attack)) {
    return Bad::kLabel;
  }
  counts_.back_steps += time_ns < last_time_ns_ ? 1 : 0;
  counts_.empty_payloads += fields.wanted[2].empty() ? 1 : 0;
  counts_.attack_frames += frame.attack;
  ++counts_.frames;
  last_time_ns_ = time_ns;
  return Bad::kNone;
}

Result<bool> CanCsv::begin_file(std::string_view line) {
  CanFrame ignored;
  Fields fields;
  std::int64_t time_ns = 0;
  if (split(line, fields) && parse_time(fields.wanted[0], time_ns) &&
      parse_id(fields.wanted[1], ignored.id)) {
    return false;  // No header: the columns are in the usual order.
  }
  std::array<int, kColumns> found{-1, -1, -1, -1};
  column_of_field_.fill(-1);
  int count = 0;
  for (std::string_view rest = line;; ++count) {
    if (count == kFieldsMax) {
      return refuse(fmt::format("more than {} columns", kFieldsMax), kColumnAdvice);
    }
    const auto comma = rest.find(',');
    const std::string name = lower(bare(rest.substr(0, comma)));
    for (int column = 0; column < kColumns; ++column) {
      const auto slot = static_cast<std::size_t>(column);
      if (name != lower(columns_[slot]) && !known_name(column, name)) {
        continue;
      }
      if (found[slot] >= 0) {
        return refuse(fmt::format("two columns could be \"{}\"", columns_[slot]), kColumnAdvice);
      }
      found[slot] = count;
      column_of_field_[static_cast<std::size_t>(count)] = column;
      break;
    }
    if (comma == std::string_view::npos) {
      ++count;
      break;
    }
    rest.remove_prefix(comma + 1);
  }
  for (std::size_t column = 0; column < kColumns; ++column) {
    if (found[column] < 0) {
      return refuse(fmt::format("no column \"{}\" in \"{}\"", columns_[column], excerpt(line)),
                    kColumnAdvice);
    }
  }
  fields_ = count;
  counts_.ignored_columns = count - kColumns;
  return true;
}

Result<void> CanCsv::refuse_or_count(Bad bad, std::string_view line) {
  struct Kind {
    const char* what;
    std::int64_t GraphFileInfo::*count;
  };
  static constexpr std::array<Kind, 6> kKinds{
      {{"", nullptr},
       {"not as many fields as columns", &GraphFileInfo::bad_fields},
       {"the timestamp is no number", &GraphFileInfo::bad_timestamps},
       {"the id is no hexadecimal number of at most 29 bits", &GraphFileInfo::bad_ids},
       {"the payload is not 0 to 8 bytes in hexadecimal", &GraphFileInfo::bad_payloads},
       {"the label is neither 0 nor 1", &GraphFileInfo::bad_labels}}};
  const Kind& kind = kKinds[static_cast<std::size_t>(bad)];
  if (!skip_bad_) {
    return refuse(fmt::format("{} (\"{}\")", kind.what, excerpt(line)), kRowAdvice);
  }
  ++(counts_.*kind.count);
  return {};
}

Result<std::int64_t> CanCsv::read(std::span<CanFrame> out) {
  std::size_t count = 0;
  std::string_view line;
  while (count < out.size()) {
    PLIMSOLL_TRY(const bool more, next_line(line));
    if (!more) {
      break;
    }
    if (!started_) {
      constexpr std::string_view kByteOrderMark = "\xEF\xBB\xBF";
      if (line_ == 1 && line.starts_with(kByteOrderMark)) {
        line.remove_prefix(kByteOrderMark.size());
      }
      if (!trim(line).empty()) {
        started_ = true;
        PLIMSOLL_TRY(const bool header, begin_file(line));
        if (header) {
          continue;
        }
      }
    }
    const Bad bad = parse(line, out[count]);
    if (bad == Bad::kNone) {
      ++count;
    } else if (trim(line).empty()) {
      ++counts_.blank_lines;
    } else {
      PLIMSOLL_TRY_VOID(refuse_or_count(bad, line));
    }
  }
  return static_cast<std::int64_t>(count);
}

}  // namespace plimsoll
