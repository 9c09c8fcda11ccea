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
    {"blank_lines", "blank"},
    {"empty_turns", "an empty message"},
    {"no_assistant", "no message of the assistant"},
    {"nothing_trained", "no token to train on"},
    {"cut", "cut at max_length"},
    {"duplicates", "there was the same line shortly before"},
}};

struct RoleName {
  std::string_view given;
  std::string_view role;
};
constexpr std::array<RoleName, 12> kRoles{{{"user", "user"},
                                           {"assistant", "assistant"},
                                           {"system", "system"},
                                           {"tool", "tool"},
                                           {"developer", "developer"},
                                           {"function", "function"},
                                           {"human", "user"},
                                           {"gpt", "assistant"},
                                           {"model", "assistant"},
                                           {"bot", "assistant"},
                                           {"observation", "tool"},
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

// Takes what matters out of a line as it is read; nothing else is kept.
class Handler final : public nlohmann::json_sax<nlohmann::json> {
 public:
  bool null() override { return scalar(std::nullopt, true); }
  bool boolean(bool) override { return scalar(std::nullopt); }
  bool number_integer(number_integer_t) override { return scalar(std::nullopt); }
  bool number_unsigned(number_unsigned_t) override { return scalar(std::nullopt); }
  bool number_float(number_float_t, const string_t&) override { return scalar(std::nullopt); }
  bool binary(binary_t&) override { return false; }
  bool string(string_t& value) override { return scalar(std::move(value)); }

  bool start_object(std::size_t) override {
    if (depth_ == 0) {
      object = true;
    } else if (depth_ == 1 && key_ == "tools") {
      rich = true;
    } else if (in_list_ && depth_ == 2) {
      messages.emplace_back();
      role_ = content_ = false;
    } else if (in_list_ && depth_ == 3) {
      rich = true;
      content_ = content_ || key_ == "content";
    }
    ++depth_;
    return true;
  }
  bool end_object() override {
    --depth_;
    if (in_list_ && depth_ == 2) {
      // Without content: a call of a tool, which the template may know.
      bad = bad || !role_ || !(content_ || rich);
    }
    return true;
  }
  bool start_array(std::size_t) override {
    if (depth_ == 1 && (key_ == "messages" || key_ == "conversations")) {
      in_list_ = list = true;
      messages.clear();
    } else if (depth_ == 1 && key_ == "tools") {
      rich = true;
    } else if (in_list_ && depth_ == 2) {
      bad = true;
    } else if (in_list_ && depth_ == 3) {
      rich = true;
      content_ = content_ || key_ == "content";
    }
    ++depth_;
    return true;
  }
  bool end_array() override {
    --depth_;
    in_list_ = in_list_ && depth_ != 1;
    return true;
  }
  bool key(string_t& name) override {
    if (depth_ == 1 || (in_list_ && depth_ == 3)) {
      key_ = std::move(name);
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
  bool bad{false};
  bool rich{false};
  std::array<std::optional<std::string>, kFieldCount> fields{};
  std::vector<ChatMessage> messages{};
  std::string words{};

 private:
  // Of other kinds than texts there is no value.
  bool scalar(std::optional<std::string> value, bool null = false) {
    if (depth_ == 1) {
      for (std::size_t field = 0; value && field < kFieldCount; ++field) {
        if (key_ == kFieldNames[field]) {
          fields[field] = std::move(value);
          break;
        }
      }
      rich = rich || (value && key_ == "tools");
    } else if (in_list_ && depth_ == 2) {
      bad = true;
    } else if (in_list_ && depth_ == 3) {
      if ((key_ == "role" || key_ == "from") && value) {
        messages.back().role = *std::move(value);
        role_ = true;
      } else if ((key_ == "content" || key_ == "value") && value) {
        messages.back().content = *std::move(value);
        content_ = true;
      } else if (!null || key_ == "content") {
        rich = true;  // A name, a switch, null in place of a text, …: for the template to say.
        content_ = content_ || key_ == "content";
      }
    }
    return true;
  }

  int depth_{0};
  bool in_list_{false};
  bool role_{false};
  bool content_{false};
  std::string key_{};
};

ChatRow bad_row(ChatOddity oddity, std::string detail = {}) {
  return {.kind = ChatRow::Kind::kBad, .oddity = oddity, .detail = std::move(detail)};
}

// Names roles as templates do. False at one that is unknown, which `detail` then is.
bool name_roles(ChatRow& row) {
  for (ChatMessage& message : row.messages) {
    const auto found = std::find_if(kRoles.begin(), kRoles.end(), [&](const RoleName& name) {
      return name.given == message.role;
    });
    if (found == kRoles.end()) {
      row.detail = message.role.substr(0, 40);
      return false;
    }
    message.role = found->role;
    row.empty_turn = row.empty_turn || message.content.empty();
    row.assistant = row.assistant || message.role == "assistant";
  }
  return true;
}

ChatRow row_of_fields(Handler& read) {
  auto& fields = read.fields;
  auto& answer = fields[kOutput] ? fields[kOutput] : fields[kResponse];
  ChatRow row{.kind = ChatRow::Kind::kMessages};
  const auto add = [&row](const char* role, std::string& content) {
    row.messages.push_back({role, std::move(content)});
  };
  if (fields[kInstruction] && answer) {
    if (fields[kSystem] && !fields[kSystem]->empty()) {
      add("system", *fields[kSystem]);
    }
    if (fields[kInput] && !fields[kInput]->empty()) {
      *fields[kInstruction] += "\n" + *fields[kInput];
    }
    add("user", *fields[kInstruction]);
    add("assistant", *answer);
  } else if (fields[kPrompt] && fields[kCompletion]) {
    row.kind = ChatRow::Kind::kPrompt;
    add("user", *fields[kPrompt]);
    add("assistant", *fields[kCompletion]);
  } else if (fields[kText]) {
    row.kind = ChatRow::Kind::kText;
    add("assistant", *fields[kText]);
  } else {
    return bad_row(ChatOddity::kNoShape);
  }
  return row;
}

}  // namespace

const char* chat_oddity_key(ChatOddity oddity) noexcept {
  return kOdd[static_cast<std::size_t>(oddity)].key;
}
const char* chat_oddity_text(ChatOddity oddity) noexcept {
  return kOdd[static_cast<std::size_t>(oddity)].text;
}

std::vector<std::string> chat_row_keys() {
  std::vector<std::string> keys{"messages", "conversations", "tools"};
  keys.insert(keys.end(), kFieldNames.begin(), kFieldNames.end());
  return keys;
}

ChatRow parse_chat_row(std::string_view line) {
  if (!is_utf8(line)) {
    return bad_row(ChatOddity::kNotUtf8);
  }
  Handler read;
  if (!nlohmann::json::sax_parse(line.begin(), line.end(), &read)) {
    return bad_row(ChatOddity::kNotJson, read.words.substr(0, 200));
  }
  if (!read.object) {
    return bad_row(ChatOddity::kNotAnObject);
  }
  ChatRow row{.kind = ChatRow::Kind::kMessages};
  if (read.list) {
    if (read.bad) {
      return bad_row(ChatOddity::kBadMessage);
    }
    row.messages = std::move(read.messages);
    row.rich = read.rich;
    if (row.messages.empty()) {
      return bad_row(ChatOddity::kNoMessages);
    }
  } else {
    row = row_of_fields(read);
  }
  if (row.kind != ChatRow::Kind::kBad && !name_roles(row)) {
    return bad_row(ChatOddity::kUnknownRole, row.detail);
  }
  return row;
}

}  // namespace plimsoll
