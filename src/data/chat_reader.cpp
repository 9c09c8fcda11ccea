// SPDX-License-Identifier: Apache-2.0
#include "data/chat_reader.h"

#include <algorithm>
#include <utility>

#include <fmt/format.h>

#include <nlohmann/json.hpp>

#include "base/check.h"
#include "base/crc32c.h"

namespace plimsoll {
namespace {

using Json = nlohmann::ordered_json;
constexpr std::size_t kExamples = 3;
constexpr std::size_t kSeen = 1 << 16;
constexpr std::size_t kTextBytes = 256 << 10;  // A row's text is cut from here on, where it may be.
constexpr std::size_t kTextsAtOnce = 1024;

bool is_white(unsigned char c) noexcept {
  return (c >= 9 && c <= 13) || (c >= 0x1C && c <= 0x20);
}

// Characters of UTF-8 text.
std::int64_t characters(std::string_view text) noexcept {
  return std::count_if(text.begin(), text.end(),
                       [](char c) { return (static_cast<unsigned char>(c) & 0xC0U) != 0x80U; });
}

// Without white space at its ends, as Python's strip() has it, but for that beyond ASCII.
std::string_view stripped(std::string_view text) noexcept {
  while (!text.empty() && is_white(static_cast<unsigned char>(text.front()))) {
    text.remove_prefix(1);
  }
  while (!text.empty() && is_white(static_cast<unsigned char>(text.back()))) {
    text.remove_suffix(1);
  }
  return text;
}

bool contains(const std::vector<std::string>& names, const std::string& name) {
  return std::find(names.begin(), names.end(), name) != names.end();
}

// What may be beside a gap: an end, or a message of a role.
constexpr std::array<std::string_view, 7> kRolesBeside{"",     "system",    "user",    "assistant",
                                                       "tool", "developer", "function"};
constexpr std::size_t kNear = 3;  // Distances from an end that are told apart.

std::size_t beside(std::string_view role) noexcept {
  return static_cast<std::size_t>(std::find(kRolesBeside.begin(), kRolesBeside.end() - 1, role) -
                                  kRolesBeside.begin());
}

std::size_t gap_index(std::size_t before, std::size_t behind, std::size_t k,
                      std::size_t left) noexcept {
  return ((before * kRolesBeside.size() + behind) * kNear + std::min(k, kNear - 1)) * kNear +
         std::min(left, kNear - 1);
}

// Adds [begin, end) to spans in order.
void add_span(std::vector<TokenSpan>& spans, std::int64_t begin, std::int64_t end) {
  if (begin == end) {
    return;
  }
  if (!spans.empty() && spans.back().end == begin) {
    spans.back().end = end;
  } else {
    spans.push_back({begin, end});
  }
}

}  // namespace

std::string chat_gap_key(const std::string& before, const std::string& behind, std::size_t k,
                         std::size_t count) {
  return fmt::format("{}|{}|{}|{}", before, behind, std::min<std::size_t>(k, 2),
                     std::min<std::size_t>(count - k, 2));
}

ChatReader::ChatReader(ChatReaderOptions options, ChatLines lines)
    : options_(std::move(options)), lines_(std::move(lines)), seen_(kSeen) {}

Result<ChatReader> ChatReader::open(Governor governor, ChatReaderOptions options) {
  PLIMSOLL_TRY(ChatLines lines, ChatLines::open(governor, options.files, options.line_bytes_max,
                                                options.feed, options.between));
  ChatReader reader(std::move(options), std::move(lines));
  PLIMSOLL_TRY(reader.lease_, governor.reserve(Tag::kOther, 1 << 20));
  return reader;
}

void ChatReader::set_pieces(ChatPieces pieces) {
  pieces_ = std::move(pieces);
  table_.assign(kRolesBeside.size() * kRolesBeside.size() * kNear * kNear, nullptr);
  for (std::size_t before = 0; before < kRolesBeside.size(); ++before) {
    for (std::size_t behind = 0; behind < kRolesBeside.size(); ++behind) {
      for (std::size_t k = 0; k < kNear; ++k) {
        for (std::size_t left = 0; left < kNear; ++left) {
          const auto found = pieces_.gaps.find(chat_gap_key(
              std::string(kRolesBeside[before]), std::string(kRolesBeside[behind]), k, k + left));
          if (found != pieces_.gaps.end()) {
            table_[gap_index(before, behind, k, left)] = &found->second;
          }
        }
      }
    }
  }
}

Result<void> ChatReader::note(ChatOddity oddity, std::int64_t file, std::int64_t line,
                              const std::string& detail) {
  Odd& odd = odd_[static_cast<std::size_t>(oddity)];
  ++odd.count;
  if (odd.first.size() < kExamples) {
    odd.first.push_back(lines_.name_of(file, line, true));
  }
  std::int64_t errors = 0;
  for (std::size_t i = 0; is_chat_error(static_cast<ChatOddity>(i)); ++i) {
    errors += odd_[i].count;
  }
  if (is_chat_error(oddity) && errors > options_.errors_max) {
    const bool particular = oddity == ChatOddity::kBadMessage && !detail.empty();
    return fail(
        ErrorCode::kInvalidArgument,
        fmt::format("{}: {}{}{}{}", lines_.name_of(file, line, false),
                    particular ? "" : chat_oddity_text(oddity),
                    particular || detail.empty() ? "" : ": ", detail,
                    errors > 1 ? fmt::format(" ({} lines before it were left out)", errors - 1)
                               : std::string()),
        "correct the line, or have more lines left out with errors_max (--errors-max)");
  }
  return {};
}

bool ChatReader::duplicate(std::string_view line) {
  const auto bytes = std::as_bytes(std::span(line));
  const std::uint64_t hash =
      (static_cast<std::uint64_t>(crc32c(bytes, 0x9E3779B9U)) << 32U) | crc32c(bytes) | 1U;
  return std::exchange(seen_[(hash >> 1U) % kSeen], hash) == hash;
}

void ChatReader::begin_file(std::int64_t file) {
  file_ = file;
  std::fill(seen_.begin(), seen_.end(), 0);
  rendered_ = 0;
}

// The row under way is a line that is left out.
bool ChatReader::bad(ChatOddity oddity, std::string detail) {
  keys_refused_ += row_.keys;
  row_ = {.kind = ChatRow::Kind::kBad, .oddity = oddity, .detail = std::move(detail)};
  return true;
}

void ChatReader::count_keys() {
  keys_used_ += row_.keys;
  for (const auto& [which, count] : row_.counted) {
    keys_used_ -= count;
    auto& [rows, keys] = keys_counted_[options_.keys.names()[static_cast<std::size_t>(which)]];
    ++rows;
    keys += count;
  }
}

void ChatReader::count_row(std::int64_t used, std::int64_t refused,
                           const std::vector<std::pair<std::string, std::int64_t>>& counted) {
  rows_ += used > 0 ? 1 : 0;
  keys_used_ += used;
  keys_refused_ += refused;
  for (const auto& [name, count] : counted) {
    auto& [rows, keys] = keys_counted_[name];
    ++rows;
    keys += count;
  }
}

// The next row, or a line that is left out, into row_; false at the end.
Result<bool> ChatReader::read_row() {
  for (;;) {
    PLIMSOLL_TRY(const auto line, lines_.next());
    if (!line) {
      return false;
    }
    ++lines_read_;
    if (lines_.place().file != file_) {
      begin_file(lines_.place().file);
    }
    line_ = lines_.line();
    row_ = {};
    const bool seen = duplicate(*line);
    if (lines_.too_long()) {
      return bad(ChatOddity::kLineTooLong);
    }
    if (stripped(*line).empty()) {
      PLIMSOLL_TRY_VOID(note(ChatOddity::kBlankLine, file_, line_, ""));
      continue;
    }
    const auto needed = (1 << 20) + 3 * static_cast<std::int64_t>(line->size());
    if (needed > lease_.bytes()) {
      PLIMSOLL_TRY_VOID(lease_.grow(needed));
    }
    row_ = parse_chat_row(*line, options_.keys);
    if (row_.kind == ChatRow::Kind::kBad) {
      return true;
    }
    find_gaps();
    if (row_.kind == ChatRow::Kind::kMessages && !compiled()) {
      row_.kind = ChatRow::Kind::kWhole;
    }
    if (row_.empty_turn && row_.kind != ChatRow::Kind::kWhole) {
      PLIMSOLL_TRY_VOID(note(ChatOddity::kEmptyTurn, file_, line_, ""));
    }
    if (seen) {
      PLIMSOLL_TRY_VOID(note(ChatOddity::kDuplicate, file_, line_, ""));
    }
    if (row_.kind == ChatRow::Kind::kWhole) {
      raw_ = std::string(*line);
      return true;
    }
    if (!row_.assistant && options_.training != ChatTraining::kAll) {
      PLIMSOLL_TRY_VOID(note(ChatOddity::kNoAssistant, file_, line_, ""));
      keys_refused_ += row_.keys;
      continue;
    }
    if (!fits()) {
      return bad(ChatOddity::kTextTooLong);
    }
    ++rows_;
    count_keys();
    return true;
  }
}

void ChatReader::find_gaps() {
  const std::size_t count = row_.messages.size();
  gaps_.assign(count + 1, nullptr);
  if (table_.empty()) {
    return;
  }
  std::size_t before = 0;
  for (std::size_t k = 0; k <= count; ++k) {
    const std::size_t behind = k == count ? 0 : beside(row_.messages[k].role);
    gaps_[k] = table_[gap_index(before, behind, k, count - k)];
    before = behind;
  }
}

// Whether no text between two places where it may be cut is too long.
bool ChatReader::fits() const {
  std::int64_t most = 0;
  std::int64_t run = 0;
  for (std::size_t k = 0; k < row_.messages.size(); ++k) {
    const ChatGap* const found = gaps_[k];
    run = found != nullptr && found->split >= 0 ? 0 : run;
    run += static_cast<std::int64_t>(row_.messages[k].content.size());
    most = std::max(most, run);
  }
  return most <= options_.text_bytes_max;
}

// Whether the pieces cover the row.
bool ChatReader::compiled() {
  if (std::find(gaps_.begin(), gaps_.end(), nullptr) != gaps_.end()) {
    return false;
  }
  for (const ChatMessage& message : row_.messages) {
    const auto triggered = [&](const std::string& trigger) {
      return message.content.find(trigger) != std::string::npos;
    };
    if (std::any_of(pieces_.triggers.begin(), pieces_.triggers.end(), triggered)) {
      return false;
    }
    if (contains(pieces_.stripped, message.role)) {
      const std::string_view rest = stripped(message.content);
      // Other white space at an end is for the template to strip.
      if (!rest.empty() && (static_cast<unsigned char>(rest.front()) >= 0x80 ||
                            static_cast<unsigned char>(rest.back()) >= 0x80)) {
        return false;
      }
    }
  }
  return true;
}

// The row's next text: to its end, or to where it may be cut once it is long.
ChatText ChatReader::render_more() {
  ChatText out = std::exchange(carried_, {});
  out.kind = ChatText::Kind::kRendered;
  out.file = file_;
  out.line = line_;
  out.last = true;
  auto& messages = row_.messages;
  const bool all = options_.training == ChatTraining::kAll;
  const auto trains = [&](std::size_t k) {
    return messages[k].role == "assistant" &&
           (options_.training == ChatTraining::kAssistant || k == last_answer_);
  };
  for (std::size_t k = next_gap_ - 1; k <= messages.size(); ++k) {
    const ChatGap& between = *gaps_[k];
    const std::int64_t size = characters(between.text);
    if (k > 0 && !all && trains(k - 1)) {
      add_span(out.trained, chars_, chars_ + between.after);
    }
    if (k < messages.size() && between.split >= 0 && out.text.size() >= kTextBytes) {
      const auto cut = static_cast<std::size_t>(between.split);
      out.text += std::string_view(between.text).substr(0, cut);
      carried_.text = between.text.substr(cut);
      chars_ = characters(carried_.text);
      out.last = false;
    } else {
      out.text += between.text;
      chars_ += size;
    }
    ChatText& open = out.last ? out : carried_;
    if (k < messages.size()) {
      const std::int64_t begin = chars_ - between.before;
      std::string_view content = messages[k].content;
      content = contains(pieces_.stripped, messages[k].role) ? stripped(content) : content;
      open.text += content;
      chars_ += characters(content);
      if (!all && trains(k)) {
        add_span(open.trained, begin, chars_);
      }
      messages[k].content = {};  // It may be long.
    }
    if (!out.last) {
      next_gap_ = k + 2;
      if (all) {
        out.trained = {{0, characters(out.text)}};
      }
      return out;
    }
  }
  next_gap_ = 0;
  if (all) {
    out.trained = {{0, chars_}};
  }
  chars_ = 0;
  return out;
}

// A row that is not rendered here.
ChatText ChatReader::whole_row() {
  ChatText out{.file = file_, .line = line_};
  switch (row_.kind) {
    case ChatRow::Kind::kBad:
      out.kind = ChatText::Kind::kBad;
      out.oddity = row_.oddity;
      out.text = std::move(row_.detail);
      break;
    case ChatRow::Kind::kWhole:
      out.kind = ChatText::Kind::kWhole;
      out.text = std::exchange(raw_, {});
      break;
    case ChatRow::Kind::kPrompt: {
      out.kind = ChatText::Kind::kPrompt;
      const std::int64_t prompt = characters(row_.messages[0].content);
      out.text = row_.messages[0].content + row_.messages[1].content;
      add_span(out.trained, options_.training == ChatTraining::kAll ? 0 : prompt,
               characters(out.text));
      break;
    }
    case ChatRow::Kind::kText:
      out.kind = ChatText::Kind::kText;
      out.text = std::move(row_.messages[0].content);
      add_span(out.trained, 0, characters(out.text));
      break;
    case ChatRow::Kind::kMessages:
      PLIMSOLL_CHECK(false, "a row of messages is rendered");
  }
  return out;
}

Result<std::vector<ChatText>> ChatReader::next(std::int64_t bytes, std::int64_t sample) {
  std::vector<ChatText> out;
  std::int64_t held = 0;
  while (held < bytes && out.size() < kTextsAtOnce) {
    if (next_gap_ == 0) {
      PLIMSOLL_TRY(const bool more, read_row());
      if (!more) {
        break;
      }
      if (row_.kind != ChatRow::Kind::kMessages) {
        out.push_back(whole_row());
        held += static_cast<std::int64_t>(out.back().text.size());
        continue;
      }
      next_gap_ = 1;
      carried_ = {};
      chars_ = 0;
      for (std::size_t k = 0; k < row_.messages.size(); ++k) {
        last_answer_ = row_.messages[k].role == "assistant" ? k : last_answer_;
      }
    }
    // Long rows are not sampled: their contents go as they are rendered.
    std::vector<ChatMessage> sampled;
    constexpr std::int64_t kSampledBytes = 64 << 10;
    if (next_gap_ == 1 && sample > 0 && rendered_++ % sample == 0) {
      std::int64_t size = 0;
      for (const ChatMessage& message : row_.messages) {
        size += static_cast<std::int64_t>(message.content.size());
      }
      if (size <= kSampledBytes) {
        sampled = row_.messages;
      }
    }
    out.push_back(render_more());
    out.back().messages = std::move(sampled);
    held += static_cast<std::int64_t>(out.back().text.size());
  }
  return out;
}

std::string ChatReader::state() const {
  Json odd = Json::object();
  for (std::size_t i = 0; i < odd_.size(); ++i) {
    if (odd_[i].count > 0) {
      odd[chat_oddity_key(static_cast<ChatOddity>(i))] = {{"count", odd_[i].count},
                                                          {"first", odd_[i].first}};
    }
  }
  const ChatPlace& place = lines_.place();
  Json sums = Json::array();
  for (const ChatSum& sum : lines_.sums()) {
    sums.push_back({sum.bytes, sum.crc});
  }
  const Json json{
      {"place", {place.file, place.line, place.at}},
      {"sums", sums},
      {"lines", lines_read_},
      {"rows", rows_},
      {"rendered", rendered_},
      {"odd", odd},
      {"keys", {{"used", keys_used_}, {"refused", keys_refused_}, {"counted", keys_counted_}}}};
  return json.dump(-1, ' ', false, Json::error_handler_t::replace);
}

std::string ChatReader::report() const {
  Json json = Json::parse(state());
  json.erase("place");
  json.erase("sums");
  json.erase("rendered");
  return json.dump();
}

Result<bool> ChatReader::go_on(const std::string& state) {
  try {
    const Json json = Json::parse(state);
    const auto& at = json.at("place");
    std::vector<ChatSum> sums;
    for (const Json& sum : json.at("sums")) {
      sums.push_back({.bytes = sum.at(0), .crc = sum.at(1)});
    }
    // The file under way is read by lines once more, to know them again.
    const ChatPlace place{.file = at.at(0), .line = at.at(1), .at = at.at(2)};
    std::vector<ChatSum> begun = sums;
    if (!begun.empty() && place.at > 0) {
      begun.back() = {};
    }
    PLIMSOLL_TRY(const bool same, lines_.go_to({.file = place.file}, begun));
    if (!same) {
      return false;
    }
    begin_file(place.file);
    while (lines_.place().file == place.file && lines_.place().at < place.at) {
      PLIMSOLL_TRY(const auto line, lines_.next());
      static_cast<void>(line && duplicate(*line));
    }
    if (lines_.sums() != sums) {
      return false;
    }
    lines_read_ = json.at("lines");
    rows_ = json.at("rows");
    rendered_ = json.at("rendered");
    keys_used_ = json.at("keys").at("used");
    keys_refused_ = json.at("keys").at("refused");
    json.at("keys").at("counted").get_to(keys_counted_);
    for (std::size_t i = 0; i < odd_.size(); ++i) {
      odd_[i] = {};
      const auto found = json.at("odd").find(chat_oddity_key(static_cast<ChatOddity>(i)));
      if (found != json.at("odd").end()) {
        odd_[i].count = found->at("count");
        odd_[i].first = found->at("first").get<std::vector<std::string>>();
      }
    }
  } catch (const nlohmann::json::exception&) {
    return fail(ErrorCode::kInvalidArgument, "the state of an import is not one of ours",
                "import it anew: rebuild=True (--rebuild)");
  }
  next_gap_ = 0;
  return true;
}

}  // namespace plimsoll
