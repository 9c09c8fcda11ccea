// SPDX-License-Identifier: Apache-2.0
#include "data/chat_row.h"

#include <algorithm>
#include <optional>
#include <utility>

#include <nlohmann/json.hpp>

#include "base/utf8.h"

namespace plimsoll {
namespace {

struct Oddity {
  const char* key;
  const char* text;
};
constexpr std::array<Oddity, kChatOddities> kOdd{{
    {"not_utf8", "not UTF-8"},
    {"not_json", "not JSON"},
    {"not_an_object", "not a JSON object"},
    {"line_too_long", "longer than line_bytes_max"},
    {"no_shape",
     "none of messages, conversations, instruction and output, prompt and completion, text"},
    {"bad_message", "a message that is no object with a role and content"},
    {"unknown_role", "unknown role"},
    {"no_messages", "no messages"},
    {"text_too_long", "a message longer than text_bytes_max"},
    {"template", "the chat template refused it"},
    {"duplicate_key", "a key that is there twice"},
    {"unknown_key", "keys that are not read"},
    {"bad_value", "a value that is not read"},
    {"preference", "a row of two answers"},
    {"blank_lines", "blank"},
    {"empty_turns", "an empty message"},
    {"no_assistant", "no message of the assistant"},
    {"nothing_trained", "no token to train on"},
    {"cut", "cut at max_length"},
    {"duplicates", "there was the same line shortly before"},
    {"label_false", "an answer that is labelled as bad"},
    {"not_trained", "a row that is not to be trained on"},
    {"nulls", "a null within a call of a tool, which templates print"},
    {"parts_printed", "parts of a content, which the template prints as they are"},
}};

struct RoleName {
  std::string_view given;
  std::string_view role;
};
constexpr std::array<RoleName, 15> kRoles{{{"user", "user"},
                                           {"assistant", "assistant"},
                                           {"system", "system"},
                                           {"tool", "tool"},
                                           {"developer", "developer"},
                                           {"function", "function"},
                                           {"human", "user"},
                                           {"prompter", "user"},
                                           {"gpt", "assistant"},
                                           {"model", "assistant"},
                                           {"bot", "assistant"},
                                           {"ai", "assistant"},
                                           {"observation", "tool"},
                                           {"tool_response", "tool"},
                                           {"function_response", "tool"}}};

// The strings at the top of an object that matter.
enum Field : std::size_t {
  kInstruction,
  kInput,
  kOutput,
  kResponse,
  kPrompt,
  kCompletion,
  kText,
  kSystem,
  kFieldCount
};
constexpr std::array<std::string_view, kFieldCount> kFieldNames{
    "instruction", "input", "output", "response", "prompt", "completion", "text", "system"};

// Takes what matters out of a line as it is read, and counts its keys. What it does not know makes
// the row one for Python.
class Handler final : public nlohmann::json_sax<nlohmann::json> {
 public:
  explicit Handler(const ChatKeys& ignored) : ignored_(ignored) {}

  bool null() override {
    if (depth_ == skipped_) {
      skipped_ = kNowhere;
    } else if ((depth_ == 1 || (in_list_ && depth_ == 3)) && skipped_ == kNowhere) {
      count(ChatKeys::kEmpty);
    } else {
      whole = whole || skipped_ == kNowhere;
    }
    return true;
  }
  bool boolean(bool) override { return scalar(nullptr); }
  bool number_integer(number_integer_t) override { return scalar(nullptr); }
  bool number_unsigned(number_unsigned_t) override { return scalar(nullptr); }
  bool number_float(number_float_t, const string_t&) override { return scalar(nullptr); }
  bool binary(binary_t&) override { return false; }
  bool string(string_t& value) override { return scalar(&value); }

  bool start_object(std::size_t) override {
    if (depth_ == 0) {
      object = true;
    } else if (skipped_ == kNowhere) {
      if (in_list_ && depth_ == 2) {
        messages.emplace_back();
        role_ = content_ = false;
      } else {
        whole = true;
      }
    }
    ++depth_;
    return true;
  }
  bool end_object() override {
    end_container();
    whole = whole || (in_list_ && depth_ == 2 && skipped_ == kNowhere && !(role_ && content_));
    return true;
  }
  bool start_array(std::size_t) override {
    if (skipped_ == kNowhere && depth_ > 0) {
      if (depth_ == 1 && is_list_ && !list) {
        in_list_ = list = true;
      } else {
        whole = true;
      }
    }
    ++depth_;
    return true;
  }
  bool end_array() override {
    end_container();
    in_list_ = in_list_ && depth_ != 1;
    return true;
  }
  bool key(string_t& name) override {
    ++keys;
    if (skipped_ != kNowhere) {
      count(skipping_);
    } else if (depth_ == 1 || (in_list_ && depth_ == 3)) {
      const int ignored = depth_ == 1 ? ignored_.of_row(name) : ignored_.of_message(name);
      if (ignored != ChatKeys::kNone) {
        skipped_ = depth_;
        skipping_ = ignored;
        count(ignored);
      } else {
        is_list_ = depth_ == 1 && (name == "messages" || name == "conversations");
        key_ = std::move(name);
      }
    }
    return true;
  }
  bool parse_error(std::size_t, const std::string&,
                   const nlohmann::detail::exception& error) override {
    words = error.what();
    return false;
  }

  bool object{false};
  bool list{false};
  bool whole{false};
  std::int64_t keys{0};
  std::array<std::optional<std::string>, kFieldCount> fields{};
  std::vector<ChatMessage> messages{};
  std::vector<std::pair<int, std::int64_t>> counted{};
  std::string words{};

 private:
  static constexpr int kNowhere = -1;

  // Behind the end of a value: what was skipped of its level ends with it.
  void end_container() {
    --depth_;
    skipped_ = depth_ == skipped_ ? kNowhere : skipped_;
  }

  void count(int which) {
    for (auto& [index, count] : counted) {
      if (index == which) {
        ++count;
        return;
      }
    }
    counted.emplace_back(which, 1);
  }

  // A value of another kind than text is none that is read here.
  bool scalar(std::string* value) {
    if (depth_ == skipped_) {
      skipped_ = kNowhere;
    } else if (skipped_ != kNowhere || depth_ == 0) {
      return true;
    } else if (depth_ == 1) {
      const auto found = std::find(kFieldNames.begin(), kFieldNames.end(), key_);
      if (value == nullptr || found == kFieldNames.end()) {
        whole = true;
        return true;
      }
      auto& field = fields[static_cast<std::size_t>(found - kFieldNames.begin())];
      whole = whole || field.has_value();  // It is there twice.
      field = std::move(*value);
    } else if (in_list_ && depth_ == 3 && value != nullptr && !role_ &&
               (key_ == "role" || key_ == "from")) {
      messages.back().role = std::move(*value);
      role_ = true;
    } else if (in_list_ && depth_ == 3 && value != nullptr && !content_ &&
               (key_ == "content" || key_ == "value")) {
      messages.back().content = std::move(*value);
      content_ = true;
    } else {
      whole = true;
    }
    return true;
  }

  const ChatKeys& ignored_;
  int depth_{0};
  int skipped_{kNowhere};  // The level of the key whose value is skipped.
  int skipping_{0};        // What that is counted as.
  bool in_list_{false};
  bool is_list_{false};  // The key under way names the messages.
  bool role_{false};
  bool content_{false};
  std::string key_{};
};

ChatRow bad_row(ChatOddity oddity, std::string detail = {}) {
  return {.kind = ChatRow::Kind::kBad, .oddity = oddity, .detail = std::move(detail)};
}

// Names roles as templates do. False at one that is unknown.
bool name_roles(ChatRow& row) {
  for (ChatMessage& message : row.messages) {
    const auto found = std::find_if(kRoles.begin(), kRoles.end(), [&](const RoleName& name) {
      return name.given == message.role;
    });
    if (found == kRoles.end()) {
      return false;
    }
    message.role = found->role;
    row.empty_turn = row.empty_turn || message.content.empty();
    row.assistant = row.assistant || message.role == "assistant";
  }
  return !row.messages.empty();
}

// Of the shapes without messages. False where the fields are none of them, and nothing else.
bool take_fields(Handler& read, ChatRow& row) {
  auto& fields = read.fields;
  const auto add = [&row](const char* role, std::string& content) {
    row.messages.push_back({role, std::move(content)});
  };
  const auto has = [&](std::size_t field) { return fields[field].has_value(); };
  const auto count = std::count_if(fields.begin(), fields.end(),
                                   [](const auto& field) { return field.has_value(); });
  if (has(kInstruction) && has(kOutput) != has(kResponse) &&
      count == 2 + static_cast<int>(has(kInput)) + static_cast<int>(has(kSystem))) {
    if (fields[kInstruction]->empty()) {
      return false;
    }
    if (has(kSystem) && !fields[kSystem]->empty()) {
      add("system", *fields[kSystem]);
    }
    if (has(kInput) && !fields[kInput]->empty()) {
      *fields[kInstruction] += "\n" + *fields[kInput];
    }
    add("user", *fields[kInstruction]);
    add("assistant", has(kOutput) ? *fields[kOutput] : *fields[kResponse]);
    return true;
  }
  if (count == 2 && has(kPrompt) && has(kCompletion)) {
    row.kind = ChatRow::Kind::kPrompt;
    add("user", *fields[kPrompt]);
    add("assistant", *fields[kCompletion]);
    return true;
  }
  if (count == 1 && has(kText)) {
    row.kind = ChatRow::Kind::kText;
    add("assistant", *fields[kText]);
    return true;
  }
  return false;
}

}  // namespace

const char* chat_oddity_key(ChatOddity oddity) noexcept {
  return kOdd[static_cast<std::size_t>(oddity)].key;
}
const char* chat_oddity_text(ChatOddity oddity) noexcept {
  return kOdd[static_cast<std::size_t>(oddity)].text;
}

std::vector<std::pair<std::string, std::string>> chat_roles() {
  std::vector<std::pair<std::string, std::string>> roles;
  roles.reserve(std::size(kRoles));
  for (const RoleName& name : kRoles) {
    roles.emplace_back(name.given, name.role);
  }
  return roles;
}

ChatKeys::ChatKeys(const std::vector<std::string>& of_rows,
                   const std::vector<std::string>& of_messages) {
  for (const std::string& name : of_rows) {
    of_rows_.emplace(name, static_cast<int>(names_.size()));
    names_.push_back(name);
  }
  for (const std::string& name : of_messages) {
    of_messages_.emplace(name, static_cast<int>(names_.size()));
    names_.push_back("messages." + name);
  }
}

ChatRow parse_chat_row(std::string_view line, const ChatKeys& keys) {
  if (!is_utf8(line)) {
    return bad_row(ChatOddity::kNotUtf8);
  }
  Handler read(keys);
  if (!nlohmann::json::sax_parse(line.begin(), line.end(), &read)) {
    return bad_row(ChatOddity::kNotJson, read.words.substr(0, 200));
  }
  if (!read.object) {
    return bad_row(ChatOddity::kNotAnObject);
  }
  ChatRow row{.kind = ChatRow::Kind::kMessages, .keys = read.keys};
  if (read.list) {
    row.messages = std::move(read.messages);
    read.whole = read.whole || std::any_of(read.fields.begin(), read.fields.end(),
                                           [](const auto& field) { return field.has_value(); });
  } else {
    read.whole = read.whole || !take_fields(read, row);
  }
  if (read.whole || !name_roles(row)) {
    return {.kind = ChatRow::Kind::kWhole, .keys = read.keys};
  }
  row.counted = std::move(read.counted);
  return row;
}

}  // namespace plimsoll
