// SPDX-License-Identifier: Apache-2.0
//
// Configuration files: TOML through toml++, JSON through nlohmann; both come down to set().
#define TOML_EXCEPTIONS 0
#include <fmt/format.h>
#include <toml++/toml.h>

#include <nlohmann/json.hpp>

#include "base/check.h"
#include "os/file.h"
#include "recipes/config.h"

namespace plimsoll {
namespace {

constexpr std::int64_t kFileBytesMax = 1 << 20;
constexpr std::string_view kSourceMark = "  # from ";
constexpr const char* kTableName = "cosir";

/// What a file's literal is, whatever the format.
enum class Literal : std::uint8_t { kText, kInteger, kReal, kSwitch };

bool fits(FieldKind kind, Literal literal) {
  switch (kind) {
    case FieldKind::kText:
      return literal == Literal::kText;
    case FieldKind::kLimit:
    case FieldKind::kAuto:
    case FieldKind::kBytes:
      return literal == Literal::kText || literal == Literal::kInteger;
    case FieldKind::kInteger:
      return literal == Literal::kInteger;
    case FieldKind::kReal:
      return literal == Literal::kReal || literal == Literal::kInteger;
    case FieldKind::kSwitch:
      return literal == Literal::kSwitch;
    case FieldKind::kChoice:
      return literal == Literal::kText || literal == Literal::kSwitch;
  }
  return false;
}

/// Refuses a literal of the wrong kind: "5" where 5 is meant.
Result<void> check_kind(std::string_view key, Literal literal, std::string_view where) {
  for (const Field& field : cosir_fields()) {
    if (key == field.name && !fits(field.kind, literal)) {
      return fail(ErrorCode::kInvalidArgument,
                  fmt::format("{}: {} must be {}{}", where, key, field.accepts(),
                              literal == Literal::kText ? ", without quotes" : ""));
    }
  }
  return {};  // An unknown key is named by set().
}

/// The source that to_toml() recorded at the end of this line, or "".
std::string recorded_source(std::string_view text, std::size_t line) {
  for (std::size_t n = 1; n < line && !text.empty(); ++n) {
    const auto end = text.find('\n');
    text = end == std::string_view::npos ? "" : text.substr(end + 1);
  }
  text = text.substr(0, text.find('\n'));
  const auto mark = text.rfind(kSourceMark);
  return mark == std::string_view::npos ? "" : std::string(text.substr(mark + kSourceMark.size()));
}

/// Remembers where JSON stopped being JSON; accepts everything before it.
struct JsonErrorPosition final : nlohmann::json_sax<nlohmann::json> {
  bool null() override { return true; }
  bool boolean(bool /*value*/) override { return true; }
  bool number_integer(number_integer_t /*value*/) override { return true; }
  bool number_unsigned(number_unsigned_t /*value*/) override { return true; }
  bool number_float(number_float_t /*value*/, const string_t& /*text*/) override { return true; }
  bool string(string_t& /*value*/) override { return true; }
  bool binary(binary_t& /*value*/) override { return true; }
  bool start_object(std::size_t /*elements*/) override { return true; }
  bool key(string_t& /*value*/) override { return true; }
  bool end_object() override { return true; }
  bool start_array(std::size_t /*elements*/) override { return true; }
  bool end_array() override { return true; }
  bool parse_error(std::size_t at, const std::string& /*token*/,
                   const nlohmann::detail::exception& /*error*/) override {
    position = at;
    return false;
  }
  std::size_t position{0};
};

}  // namespace

Result<void> CosirSettings::read_file(const std::filesystem::path& path, bool keep_sources) {
  PLIMSOLL_TRY(const std::string text, read_small_file(path, kFileBytesMax));
  if (path.extension() == ".toml") {
    return read_toml(path, text, keep_sources);
  }
  if (path.extension() == ".json") {
    return read_json(path, text);
  }
  return fail(ErrorCode::kInvalidArgument,
              fmt::format("{}: not a configuration file by its name", path.string()),
              "name it .toml or .json");
}

Result<void> CosirSettings::read_toml(const std::filesystem::path& path, const std::string& text,
                                      bool keep_sources) {
  const auto name = path.string();
  auto parsed = toml::parse(text, name);
  if (!parsed) {
    return fail(ErrorCode::kInvalidArgument,
                fmt::format("{}:{}: {}", name, parsed.error().source().begin.line,
                            parsed.error().description()));
  }
  const toml::table& root = parsed.table();
  const auto read_table = [&](const toml::table& table, bool nested) -> Result<void> {
    for (const auto& [key, node] : table) {
      if (!nested && key == kTableName && node.is_table()) {
        continue;
      }
      const auto where = fmt::format("{}:{}", name, key.source().begin.line);
      std::string value;
      Literal literal{};
      if (const auto* string = node.as_string()) {
        value = string->get();
        literal = Literal::kText;
      } else if (const auto* integer = node.as_integer()) {
        value = fmt::format("{}", integer->get());
        literal = Literal::kInteger;
      } else if (const auto* real = node.as_floating_point()) {
        value = fmt::format("{}", real->get());
        literal = Literal::kReal;
      } else if (const auto* boolean = node.as_boolean()) {
        value = boolean->get() ? "true" : "false";
        literal = Literal::kSwitch;
      } else {
        return fail(
            ErrorCode::kInvalidArgument,
            fmt::format("{}: '{}' is neither text, a number nor true or false", where, key.str()),
            "keys are flat, alone or inside [cosir]");
      }
      PLIMSOLL_TRY_VOID(check_kind(key.str(), literal, where));
      std::string source = keep_sources ? recorded_source(text, key.source().begin.line) : "";
      PLIMSOLL_TRY_VOID(set(key.str(), value, where));
      if (!source.empty()) {
        PLIMSOLL_TRY_VOID(set(key.str(), value, source));
      }
    }
    return {};
  };
  PLIMSOLL_TRY_VOID(read_table(root, false));
  if (const auto* inner = root[kTableName].as_table()) {
    PLIMSOLL_TRY_VOID(read_table(*inner, true));
  }
  return {};
}

Result<void> CosirSettings::read_json(const std::filesystem::path& path, const std::string& text) {
  const auto name = path.string();
  const auto root = nlohmann::json::parse(text, nullptr, false);
  if (root.is_discarded() || !root.is_object()) {
    JsonErrorPosition where;
    nlohmann::json::sax_parse(text, &where);
    return fail(ErrorCode::kInvalidArgument,
                where.position > 0
                    ? fmt::format("{}: not JSON at byte {}", name, where.position)
                    : fmt::format("{}: the outermost value must be an object", name));
  }
  const auto read_object = [&](const nlohmann::json& object, bool nested) -> Result<void> {
    for (const auto& [key, node] : object.items()) {
      if (!nested && key == kTableName && node.is_object()) {
        continue;
      }
      if (node.is_structured() || node.is_null()) {
        return fail(ErrorCode::kInvalidArgument,
                    fmt::format("{}: '{}' is neither text, a number nor true or false", name, key),
                    "keys are flat, alone or inside \"cosir\"");
      }
      const Literal literal = node.is_string()           ? Literal::kText
                              : node.is_boolean()        ? Literal::kSwitch
                              : node.is_number_integer() ? Literal::kInteger
                                                         : Literal::kReal;
      PLIMSOLL_TRY_VOID(check_kind(key, literal, name));
      PLIMSOLL_TRY_VOID(
          set(key, node.is_string() ? node.get_ref<const std::string&>() : node.dump(), name));
    }
    return {};
  };
  PLIMSOLL_TRY_VOID(read_object(root, false));
  if (root.contains(kTableName) && root[kTableName].is_object()) {
    PLIMSOLL_TRY_VOID(read_object(root[kTableName], true));
  }
  return {};
}

}  // namespace plimsoll
