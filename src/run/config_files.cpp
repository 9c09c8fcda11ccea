// SPDX-License-Identifier: Apache-2.0
//
// Configuration files: TOML through toml++, JSON through nlohmann. Both become a list of keys with
// their places in the file, and that comes down to set_all().
#define TOML_EXCEPTIONS 0
#include <fmt/format.h>
#include <toml++/toml.h>

#include <algorithm>
#include <nlohmann/json.hpp>

#include "base/check.h"
#include "os/file.h"
#include "run/config.h"
#include "run/recipe.h"
#include "run/run_folder.h"
#include "run/sealed_file.h"

namespace plimsoll {
namespace {

constexpr std::int64_t kFileBytesMax = 1 << 20;
constexpr std::int64_t kDotsMost = 64;  // In a line: a header or key of so many names is no one's.
constexpr std::string_view kSourceMark = "  # from ";
constexpr std::string_view kRecipeKey = "recipe";
constexpr std::string_view kPython = "python";  // plimsoll.Run writes it; no recipe of ours.

/// What a file's value is, whatever the format.
enum class Literal : std::uint8_t { kText, kInteger, kReal, kSwitch, kList, kTable, kOther };

struct FileKey {
  std::string key{};
  std::string where{};     // "cosir.toml:3"; a JSON file's name alone.
  std::string recorded{};  // The source that run.toml says beside it.
  Literal literal{Literal::kOther};
  std::string text{};             // kText … kList; a list's members joined by commas.
  std::vector<FileKey> inside{};  // kTable.
};

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
    case FieldKind::kChoice:  // A choice may look like a number: precision = 32.
      return literal == Literal::kText || literal == Literal::kSwitch ||
             literal == Literal::kInteger;
    case FieldKind::kWidths:
      return literal == Literal::kText || literal == Literal::kList;
  }
  return false;
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

/// A file's keys on their way into settings: which recipe, which table, which kinds.
class Gathering {
 public:
  explicit Gathering(const RecipeOptions& options) : options_(options) {}

  /// Takes the keys of the outermost table, or of [recipe].
  Result<void> take(const std::vector<FileKey>& keys, bool outermost);

  [[nodiscard]] const std::vector<GivenKey>& given() const noexcept { return given_; }
  [[nodiscard]] const std::vector<std::string>& recorded() const noexcept { return recorded_; }

 private:
  Result<void> take_table(const FileKey& table, bool outermost);
  Result<void> take_value(const FileKey& value);
  [[nodiscard]] Error of_another(const FileKey& key, const std::string& recipe) const {
    return make_error(ErrorCode::kInvalidArgument,
                      fmt::format("{}: this belongs to the recipe {}, not to {}", key.where, recipe,
                                  options_.recipe),
                      "every run and every configuration file is one recipe's");
  }
  [[nodiscard]] static Error neither(const FileKey& key) {
    return make_error(
        ErrorCode::kInvalidArgument,
        fmt::format("{}: '{}' is neither text, a number nor true or false", key.where, key.key),
        "keys are flat, alone or inside the table of their recipe");
  }

  const RecipeOptions& options_;
  std::vector<GivenKey> given_{};
  std::vector<std::string> recorded_{};  // One per given key.
};

Result<void> Gathering::take(const std::vector<FileKey>& keys, bool outermost) {
  for (const FileKey& key : keys) {
    if (outermost && key.key == kRecipeKey && key.literal == Literal::kText) {
      if (key.text != options_.recipe) {
        return tl::unexpected(of_another(key, key.text));
      }
    } else if (key.literal != Literal::kTable) {
      PLIMSOLL_TRY_VOID(take_value(key));
    }
  }
  for (const FileKey& key : keys) {  // A key inside a table wins over the same outside.
    if (key.literal == Literal::kTable) {
      PLIMSOLL_TRY_VOID(take_table(key, outermost));
    }
  }
  return {};
}

Result<void> Gathering::take_table(const FileKey& table, bool outermost) {
  if (outermost && table.key == options_.recipe) {
    return take(table.inside, false);
  }
  if (outermost && find_recipe(table.key) != nullptr) {
    return tl::unexpected(of_another(table, table.key));
  }
  return tl::unexpected(neither(table));
}

/// Refuses a literal of the wrong kind: "5" where 5 is meant. An unknown key is named by set().
Result<void> Gathering::take_value(const FileKey& value) {
  const std::string& key = value.key;
  if (value.literal == Literal::kOther) {
    return tl::unexpected(neither(value));
  }
  for (const Field& field : options_.fields) {
    if (key == field.name && !fits(field.kind, value.literal)) {
      if (value.literal == Literal::kList) {
        return tl::unexpected(neither(value));
      }
      return fail(ErrorCode::kInvalidArgument,
                  fmt::format("{}: {} must be {}{}", value.where, key, field.accepts(),
                              value.literal == Literal::kText ? ", without quotes" : ""));
    }
  }
  given_.push_back({key, value.text, value.where});
  recorded_.push_back(value.recorded);
  return {};
}

/// A scalar's literal and text; kOther for anything else.
std::pair<Literal, std::string> scalar(const toml::node& node) {
  if (const auto* string = node.as_string()) {
    return {Literal::kText, string->get()};
  }
  if (const auto* integer = node.as_integer()) {
    return {Literal::kInteger, fmt::format("{}", integer->get())};
  }
  if (const auto* real = node.as_floating_point()) {
    return {Literal::kReal, fmt::format("{}", real->get())};
  }
  if (const auto* boolean = node.as_boolean()) {
    return {Literal::kSwitch, boolean->get() ? "true" : "false"};
  }
  return {Literal::kOther, ""};
}

std::pair<Literal, std::string> scalar(const nlohmann::json& node) {
  if (node.is_string()) {
    return {Literal::kText, node.get<std::string>()};
  }
  return {node.is_boolean()          ? Literal::kSwitch
          : node.is_number_integer() ? Literal::kInteger
          : node.is_number()         ? Literal::kReal
                                     : Literal::kOther,
          node.dump()};
}

/// The members of a list as one text, or kOther when one of them is no scalar.
template <class List>
std::pair<Literal, std::string> joined(const List& list) {
  std::string text;
  for (const auto& member : list) {
    const auto [literal, word] = scalar(member);
    if (literal == Literal::kOther) {
      return {Literal::kOther, ""};
    }
    text += (text.empty() ? "" : ",") + word;
  }
  return {Literal::kList, text};
}

std::vector<FileKey> keys_of(const toml::table& table, const std::string& name,
                             const std::string& text, bool keep_sources) {
  std::vector<FileKey> keys;
  for (const auto& [key, node] : table) {
    const auto line = key.source().begin.line;
    FileKey one{.key = std::string(key.str()), .where = fmt::format("{}:{}", name, line)};
    one.recorded = keep_sources ? recorded_source(text, line) : "";
    if (const auto* inner = node.as_table()) {
      one.literal = Literal::kTable;
      one.inside = keys_of(*inner, name, text, keep_sources);
    } else if (const auto* list = node.as_array()) {
      std::tie(one.literal, one.text) = joined(*list);
    } else {
      std::tie(one.literal, one.text) = scalar(node);
    }
    keys.push_back(std::move(one));
  }
  return keys;
}

std::vector<FileKey> keys_of(const nlohmann::json& object, const std::string& name) {
  std::vector<FileKey> keys;
  for (const auto& [key, node] : object.items()) {
    FileKey one{.key = key, .where = name};
    if (node.is_object()) {
      one.literal = Literal::kTable;
      one.inside = keys_of(node, name);
    } else if (node.is_array()) {
      std::tie(one.literal, one.text) = joined(node);
    } else {
      std::tie(one.literal, one.text) = scalar(node);
    }
    keys.push_back(std::move(one));
  }
  return keys;
}

/// toml++ bounds how deep values are nested, but not dotted names, and recurses along both. No name
/// and no value of ours has so many dots in its line.
Result<void> check_depth(const std::string& name, std::string_view text) {
  for (std::size_t line = 1; !text.empty(); ++line) {
    const auto end = text.find('\n');
    const std::string_view whole = text.substr(0, end);
    const std::size_t begin = std::min(whole.find_first_not_of(" \t"), whole.size());
    if (!whole.substr(begin).starts_with('#') &&
        std::count(whole.begin(), whole.end(), '.') > kDotsMost) {
      return fail(ErrorCode::kInvalidArgument,
                  fmt::format("{}:{}: more than {} dots in a line", name, line, kDotsMost),
                  "keys are flat, alone or inside the table of their recipe");
    }
    text = end == std::string_view::npos ? "" : text.substr(end + 1);
  }
  return {};
}

/// Errors: what is not TOML, with file and line.
Result<toml::table> table_of(const std::string& name, const std::string& text) {
  PLIMSOLL_TRY_VOID(check_depth(name, text));
  auto parsed = toml::parse(text, name);
  if (!parsed) {
    return fail(ErrorCode::kInvalidArgument,
                fmt::format("{}:{}: {}", name, parsed.error().source().begin.line,
                            parsed.error().description()));
  }
  return std::move(parsed).table();
}

Result<std::vector<FileKey>> parse_toml(const std::string& name, const std::string& text,
                                        bool keep_sources) {
  PLIMSOLL_TRY(const toml::table table, table_of(name, text));
  return keys_of(table, name, text, keep_sources);
}

Result<std::vector<FileKey>> parse_json(const std::string& name, const std::string& text) {
  const auto root = nlohmann::json::parse(text, nullptr, false);
  if (root.is_discarded() || !root.is_object()) {
    JsonErrorPosition where;
    nlohmann::json::sax_parse(text, &where);
    return fail(ErrorCode::kInvalidArgument,
                where.position > 0
                    ? fmt::format("{}: not JSON at byte {}", name, where.position)
                    : fmt::format("{}: the outermost value must be an object", name));
  }
  return keys_of(root, name);
}

/// Errors: kInvalidArgument naming those that there are.
Result<std::string> preset_text(const RecipeOptions& options, const std::string& name) {
  std::string names;
  for (const Preset& preset : options.presets) {
    if (name == preset.name) {
      return std::string(preset.toml);
    }
    names += fmt::format("{}{}", names.empty() ? "" : ", ", preset.name);
  }
  return fail(
      ErrorCode::kInvalidArgument,
      fmt::format(
          "{}: not a configuration file by its name{}", name,
          names.empty() ? "" : fmt::format(", and no preset of {}: {}", options.recipe, names)),
      "name it .toml or .json");
}

}  // namespace

Result<void> AnySettings::read_file(const std::filesystem::path& path, bool keep_sources) {
  const auto name = path.string();
  std::vector<FileKey> keys;
  if (path.extension() == ".toml" || path.extension() == ".json") {
    PLIMSOLL_TRY(const std::string text, keep_sources ? read_sealed(path, kFileBytesMax)
                                                      : read_small_file(path, kFileBytesMax));
    PLIMSOLL_TRY(keys, path.extension() == ".toml" ? parse_toml(name, text, keep_sources)
                                                   : parse_json(name, text));
  } else {
    PLIMSOLL_TRY(const std::string text, preset_text(*options_, name));
    PLIMSOLL_TRY(keys, parse_toml("preset " + name, text, false));
  }
  Gathering gathering(*options_);
  PLIMSOLL_TRY_VOID(gathering.take(keys, true));
  const std::vector<GivenKey>& given = gathering.given();
  PLIMSOLL_TRY_VOID(set_all(given));
  for (std::size_t i = 0; i < given.size(); ++i) {
    if (const auto& source = gathering.recorded()[i]; !source.empty()) {
      sources_[static_cast<std::size_t>(index_of(given[i].key))] = source;
    }
  }
  return {};
}

Result<std::string> recipe_name_of_run(const std::filesystem::path& root) {
  PLIMSOLL_TRY_VOID(must_be_run(root));
  const auto path = root / "run.toml";
  PLIMSOLL_TRY(const std::string text, read_sealed(path, kFileBytesMax));
  auto table = table_of(path.string(), text);
  if (!table) {
    table.error().code = ErrorCode::kCorrupt;  // No user wrote this file.
    return tl::unexpected(std::move(table).error());
  }
  const std::string recipe = (*table)[kRecipeKey].value_or(std::string(kFirstRecipe));
  if (recipe == kPython) {
    return fail(ErrorCode::kInvalidArgument,
                fmt::format("{} is the run of a Python program, started in {} by: {}",
                            root.string(), (*table)["directory"].value_or(std::string()),
                            (*table)["command"].value_or(std::string())),
                "start that program again, and it goes on from the last commit");
  }
  return recipe;
}

}  // namespace plimsoll
