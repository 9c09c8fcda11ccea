// SPDX-License-Identifier: Apache-2.0
#include "data/can_csv.h"

#include <algorithm>
#include <charconv>
#include <cstring>
#include <utility>

#include <fmt/core.h>

#include "base/check.h"

namespace plimsoll {
namespace {

constexpr const char* kRowAdvice =
    "mend the row, or pass --skip-bad (skip_bad) to leave such rows out and count them";
constexpr const char* kColumnAdvice =
    "pass --columns TIME,ID,PAYLOAD,LABEL (columns) with the names in its header, - for a time or "
    "a label that it has not, or --dialect (dialect)";
constexpr const char* kDialectAdvice = "pass --dialect (dialect) with the one it is of, or auto";

// What an error shows of a line: its beginning, with whatever is no text as a dot.
std::string excerpt(std::string_view line) {
  constexpr std::size_t kShown = 60;
  std::string out(line.substr(0, kShown));
  std::replace_if(
      out.begin(), out.end(), [](char c) { return c < ' ' || c > '~'; }, '.');
  return line.size() > kShown ? out + "…" : out;
}

// A name of a column in small letters and digits alone: "DATA[0]" is "data0".
std::string plain_name(std::string_view name) {
  std::string plain = can_lower(can_bare(name));
  std::erase_if(plain, [](char c) { return !((c >= 'a' && c <= 'z') || (c >= '0' && c <= '9')); });
  return plain;
}

// Names of columns seen in the field beside those of the options.
bool known_name(std::size_t column, const std::string& name) {
  static const std::array<std::vector<std::string>, 4> kNames{
      {{"timestamp", "time", "t", "ts", "timestamps", "times"},
       {"arbitrationid", "canid", "id", "messageid", "msgid"},
       {"datafield", "data", "payload"},
       {"attack", "label", "flag"}}};
  const auto& names = kNames[column];
  return std::find(names.begin(), names.end(), name) != names.end();
}

// Which byte of a payload a column has: of "data0", "d1", "byte7" and the like.
std::optional<int> byte_number(const std::string& name) {
  static const std::vector<std::string> kNames{"data", "d", "byte", "b", "databyte", "payload"};
  if (name.size() < 2 || name.back() < '0' || name.back() > '9') {
    return std::nullopt;
  }
  if (std::find(kNames.begin(), kNames.end(), name.substr(0, name.size() - 1)) == kNames.end()) {
    return std::nullopt;
  }
  return name.back() - '0';
}

bool is_length(const std::string& name) {
  return name == "dlc" || name == "len" || name == "length" || name == "datalength";
}

const char* dialect_name(CanDialect dialect) {
  return kCanDialects[static_cast<std::size_t>(dialect)];
}

}  // namespace

Result<CanDialect> can_dialect_named(const std::string& name) {
  const auto* const found = std::find(kCanDialects.begin(), kCanDialects.end(), name);
  if (found == kCanDialects.end()) {
    return fail(ErrorCode::kInvalidArgument, fmt::format("there is no dialect \"{}\"", name),
                "--dialect (dialect) is auto, csv, decimal, hcrl, candump or road");
  }
  return static_cast<CanDialect>(found - kCanDialects.begin());
}

CanCsv::CanCsv(CanBytes bytes, std::span<std::byte> buffer, CanCsvOptions options, Look look)
    : bytes_(std::move(bytes)),
      buffer_(reinterpret_cast<char*>(buffer.data()), buffer.size()),
      options_(std::move(options)),
      look_(std::move(look)),
      decimal_(options_.dialect == CanDialect::kDecimal) {
  PLIMSOLL_CHECK(buffer.size() > static_cast<std::size_t>(kCanLineMax), "a buffer below a line");
  column_of_field_.fill(-1);
  for (int i = 0; i < kNamed; ++i) {
    column_of_field_[static_cast<std::size_t>(i)] = i;
  }
}

tl::unexpected<Error> CanCsv::refuse(const std::string& what, const char* advice) const {
  return fail(ErrorCode::kInvalidArgument, fmt::format("{}:{}: {}", options_.name, line_, what),
              advice);
}

void CanCsv::note_skipped(const std::string& what) {
  if (counts_.first_skipped.empty()) {
    counts_.first_skipped = fmt::format("{}:{}: {}", options_.name, line_, what);
  }
}

// ---- Lines ----

// Moves what is left to the front and reads behind it, at most a chunk: the buffer less a line.
Result<void> CanCsv::fill() {
  if (bytes_.position() == 0) {
    PLIMSOLL_TRY(const FileSort sort, bytes_.sort());
    if (sort.kind != FileKind::kText && sort.kind != FileKind::kEmpty) {
      return not_text(options_.name, sort);
    }
  }
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
      return fail(ErrorCode::kInvalidArgument, options_.name + ": import cancelled");
    }
    return {};
  }
  if (got.error().code != ErrorCode::kCorrupt) {
    return tl::unexpected(got.error());
  }
  if (!options_.skip_bad) {
    return fail(ErrorCode::kCorrupt,
                fmt::format("{}:{}: {}", options_.name, line_ + 1, *got.error().detail),
                got.error().advice);
  }
  note_skipped(*got.error().detail);
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
          if (!options_.skip_bad) {
            return refuse(fmt::format("a line longer than {} bytes: not CSV (\"{}\")", kCanLineMax,
                                      excerpt({buffer_.data() + begin_, looked})),
                          kRowAdvice);
          }
          note_skipped("longer than a line may be");
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
      if (!options_.skip_bad) {
        return refuse(fmt::format("a line longer than {} bytes: not CSV (\"{}\")", kCanLineMax,
                                  excerpt(line)),
                      kRowAdvice);
      }
      note_skipped("longer than a line may be");
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
  const char separator = shape_.separator;
  fields.count = 0;
  for (;;) {
    const char* const begin = at;
    while (at != end && *at != separator) {
      ++at;
    }
    if (fields.count == fields_) {
      return false;
    }
    const int column = column_of_field_[static_cast<std::size_t>(fields.count++)];
    if (column >= 0) {
      fields.wanted[static_cast<std::size_t>(column)] =
          can_bare({begin, static_cast<std::size_t>(at - begin)});
    }
    if (at == end) {
      return fields.count == fields_;
    }
    ++at;
  }
}

// A column a byte: those that a frame has, and nothing in the columns behind them.
CanBad CanCsv::parse_byte_columns(const Fields& fields, CanRow& row) const noexcept {
  row.frame.bytes.fill(0);
  bool ended = false;
  for (int i = 0; i < byte_columns_; ++i) {
    const std::string_view text =
        fields.wanted[static_cast<std::size_t>(kNamed) + static_cast<std::size_t>(i)];
    if (text.empty()) {
      ended = true;
      row.empty = row.empty || i == 0;
    } else if (ended ||
               !parse_can_byte(text, decimal_, row.frame.bytes[static_cast<std::size_t>(i)])) {
      return CanBad::kPayload;
    }
  }
  return CanBad::kNone;
}

CanBad CanCsv::parse_columns(std::string_view line, CanRow& row) noexcept {
  Fields fields;
  if (!split(line, fields)) {
    return CanBad::kFields;
  }
  if (has_[0] && !parse_can_time(fields.wanted[0], row.time)) {
    return CanBad::kTimestamp;
  }
  if (!parse_can_id(fields.wanted[1], decimal_, row.frame.id)) {
    return CanBad::kId;
  }
  if (byte_columns_ > 0) {
    if (const CanBad bad = parse_byte_columns(fields, row); bad != CanBad::kNone) {
      return bad;
    }
  } else if (!parse_can_payload(fields.wanted[2], row.frame.bytes)) {
    return CanBad::kPayload;
  } else {
    row.empty = fields.wanted[2].empty();
  }
  row.labelled = has_[3];
  return !has_[3] || parse_can_label(fields.wanted[3], row.frame.attack) ? CanBad::kNone
                                                                         : CanBad::kLabel;
}

CanBad CanCsv::parse(std::string_view line, CanFrame& frame) noexcept {
  CanRow row;
  const CanBad bad = shape_.form == CanForm::kColumns ? parse_columns(line, row)
                                                      : read_can_line(line, shape_, decimal_, row);
  if (bad != CanBad::kNone) {
    return bad;
  }
  if (counts_.frames == 0) {
    first_time_ = row.time;
  }
  if (options_.road && !row.labelled) {
    row.labelled = options_.road->known;
    row.frame.attack = options_.road->injected(row.frame, first_time_, row.time) ? 1 : 0;
  }
  counts_.back_steps += row.time < last_time_ ? 1 : 0;
  counts_.empty_payloads += row.empty ? 1 : 0;
  counts_.unlabelled_frames += row.labelled ? 0 : 1;
  counts_.attack_frames += row.frame.attack;
  ++counts_.frames;
  last_time_ = row.time;
  frame = row.frame;
  return CanBad::kNone;
}

// ---- The first line ----

// True where it is a frame of a form that needs no header, and of the dialect asked for.
Result<bool> CanCsv::known_form(std::string_view line) {
  const CanDialect dialect = options_.dialect;
  if (const char* const foreign = foreign_can_log(line)) {
    return refuse(foreign,
                  "convert it to a log of candump's (python -m can.logconvert FILE FILE.log)");
  }
  const CanShape shape = can_shape(line, decimal_);
  const bool dumped = dialect == CanDialect::kCandump || dialect == CanDialect::kRoad;
  const bool wanted = dialect == CanDialect::kAuto ||
                      (shape.form == CanForm::kCandump
                           ? dumped
                           : dialect == CanDialect::kHcrl || dialect == CanDialect::kDecimal);
  shape_.separator = shape.separator;
  if (shape.form != CanForm::kColumns && wanted) {
    shape_ = shape;
    return true;
  }
  if (dumped || shape.form != CanForm::kColumns) {
    return refuse(
        fmt::format("no line of the dialect {} (\"{}\")", dialect_name(dialect), excerpt(line)),
        kDialectAdvice);
  }
  return false;
}

Result<bool> CanCsv::begin_file(std::string_view line) {
  PLIMSOLL_TRY(const bool known, known_form(line));
  if (known) {
    return false;
  }
  const std::size_t first = line.find(shape_.separator);
  CanTime time;
  std::uint32_t id = 0;
  if (first != std::string_view::npos && parse_can_time(can_bare(line.substr(0, first)), time)) {
    const std::string_view rest = line.substr(first + 1);
    if (parse_can_id(can_bare(rest.substr(0, rest.find(shape_.separator))), decimal_, id)) {
      return false;  // No header: the columns are in the usual order.
    }
  }
  PLIMSOLL_TRY_VOID(begin_columns(line));
  return true;
}

Result<std::vector<std::string>> CanCsv::header_names(std::string_view line) const {
  std::vector<std::string> names;
  for (std::string_view rest = line;;) {
    if (names.size() == kFieldsMax) {
      return refuse(fmt::format("more than {} columns", kFieldsMax), kColumnAdvice);
    }
    const auto at = rest.find(shape_.separator);
    names.push_back(can_lower(can_bare(rest.substr(0, at))));
    if (at == std::string_view::npos) {
      return names;
    }
    rest.remove_prefix(at + 1);
  }
}

// The four columns of the options, by these names or known others.
Result<void> CanCsv::find_named(const std::vector<std::string>& names, std::string_view line) {
  constexpr std::size_t kLabel = 3;
  std::array<int, kNamed> found{-1, -1, -1, -1};
  const auto take = [&](std::size_t column, auto matches) -> Result<void> {
    for (std::size_t i = 0; i < names.size(); ++i) {
      if (!matches(names[i])) {
        continue;
      }
      if (found[column] >= 0) {
        return refuse(fmt::format("two columns could be \"{}\"", options_.columns[column]),
                      kColumnAdvice);
      }
      found[column] = static_cast<int>(i);
    }
    return {};
  };
  for (std::size_t column = 0; column < kNamed; ++column) {
    const std::string wanted = can_lower(options_.columns[column]);
    has_[column] = wanted != "-";
    if (has_[column]) {
      PLIMSOLL_TRY_VOID(take(column, [&](const std::string& name) {
        return name == wanted || known_name(column, plain_name(name));
      }));
    }
  }
  if (has_[kLabel] && found[kLabel] < 0) {
    PLIMSOLL_TRY_VOID(
        take(kLabel, [](const std::string& name) { return plain_name(name) == "class"; }));
  }
  column_of_field_.fill(-1);
  for (std::size_t column = 0; column < kNamed; ++column) {
    if (found[column] >= 0) {
      column_of_field_[static_cast<std::size_t>(found[column])] = static_cast<int>(column);
    }
  }
  PLIMSOLL_TRY_VOID(find_bytes(names));
  for (std::size_t column = 0; column < kNamed; ++column) {
    const bool needed = column == 2 ? byte_columns_ == 0 : has_[column];
    if (needed && found[column] < 0) {
      return refuse(
          fmt::format("no column \"{}\" in \"{}\"", options_.columns[column], excerpt(line)),
          kColumnAdvice);
    }
  }
  return {};
}

// Columns of single bytes: "data0" … "data7", or "d1" … "d8", or "data", "data1" … "data7".
Result<void> CanCsv::find_bytes(const std::vector<std::string>& names) {
  std::array<int, 10> at{};
  at.fill(-1);
  int whole = -1;
  for (std::size_t i = 0; i < names.size(); ++i) {
    if (column_of_field_[i] == 2) {
      whole = static_cast<int>(i);
    } else if (const auto number = byte_number(plain_name(names[i]));
               number && column_of_field_[i] < 0) {
      at[static_cast<std::size_t>(*number)] = static_cast<int>(i);
    }
  }
  if (at[1] < 0 || (at[0] >= 0 && whole >= 0)) {
    return {};  // None, or a column for the whole payload beside them.
  }
  if (whole >= 0) {
    at[0] = whole;
  } else if (at[0] < 0) {
    std::rotate(at.begin(), at.begin() + 1, at.end());
  }
  const auto* const end = std::find(std::as_const(at).begin(), std::as_const(at).end(), -1);
  byte_columns_ = static_cast<int>(end - std::as_const(at).begin());
  if (byte_columns_ > kBytes ||
      std::any_of(end, std::as_const(at).end(), [](int i) { return i >= 0; })) {
    return refuse("its columns of single bytes are not numbered as those of 1 to 8 bytes",
                  kColumnAdvice);
  }
  for (int i = 0; i < byte_columns_; ++i) {
    column_of_field_[static_cast<std::size_t>(at[static_cast<std::size_t>(i)])] = kNamed + i;
  }
  return {};
}

Result<void> CanCsv::begin_columns(std::string_view line) {
  PLIMSOLL_TRY(const std::vector<std::string> names, header_names(line));
  PLIMSOLL_TRY_VOID(find_named(names, line));
  fields_ = static_cast<int>(names.size());
  // A header of HCRL's order. Its rows are as many fields as they have bytes, or filled up.
  const bool hcrl = byte_columns_ > 0 && fields_ >= 3 && column_of_field_[0] == 0 &&
                    column_of_field_[1] == 1 && is_length(plain_name(names[2]));
  if (hcrl) {
    bool in_order = true;
    for (int i = 0; i < byte_columns_; ++i) {
      const std::size_t field = 3 + static_cast<std::size_t>(i);
      in_order = in_order && 3 + i < fields_ && column_of_field_[field] == kNamed + i;
    }
    const int behind = 3 + byte_columns_;
    const bool labelled =
        behind < fields_ && column_of_field_[static_cast<std::size_t>(behind)] == 3;
    if (in_order && fields_ == behind + (labelled ? 1 : 0)) {
      shape_.form = CanForm::kHcrlRow;
      shape_.labelled = labelled;
      return {};
    }
  }
  counts_.ignored_columns =
      std::count(column_of_field_.begin(), column_of_field_.begin() + fields_, -1);
  return {};
}

Result<void> CanCsv::refuse_or_count(CanBad bad, std::string_view line) {
  struct Kind {
    const char* what;
    std::int64_t GraphFileInfo::*count;
  };
  static constexpr std::array<Kind, 6> kKinds{
      {{"", nullptr},
       {"not as many fields as columns, or bytes", &GraphFileInfo::bad_fields},
       {"the timestamp is no number", &GraphFileInfo::bad_timestamps},
       {"the id is no hexadecimal number of at most 29 bits", &GraphFileInfo::bad_ids},
       {"the payload is not 0 to 8 bytes in hexadecimal", &GraphFileInfo::bad_payloads},
       {"the label is neither 0 nor 1, nor R or T, nor normal or attack",
        &GraphFileInfo::bad_labels}}};
  const Kind& kind = kKinds[static_cast<std::size_t>(bad)];
  const std::string what = fmt::format("{} (\"{}\")", kind.what, excerpt(line));
  if (!options_.skip_bad) {
    return refuse(what, kRowAdvice);
  }
  note_skipped(what);
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
      if (!can_trim(line).empty()) {
        started_ = true;
        PLIMSOLL_TRY(const bool header, begin_file(line));
        if (header) {
          continue;
        }
      }
    }
    const CanBad bad = parse(line, out[count]);
    if (bad == CanBad::kNone) {
      ++count;
    } else if (can_trim(line).empty()) {
      ++counts_.blank_lines;
    } else {
      PLIMSOLL_TRY_VOID(refuse_or_count(bad, line));
    }
  }
  return static_cast<std::int64_t>(count);
}

}  // namespace plimsoll
