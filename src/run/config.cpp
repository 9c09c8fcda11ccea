// SPDX-License-Identifier: Apache-2.0
//
// Setting options from text, whatever the recipe. Files are read in config_files.cpp.
#include "run/config.h"

#include <fmt/format.h>

#include <algorithm>
#include <charconv>
#include <limits>
#include <optional>
#include <system_error>
#include <thread>

#include "base/check.h"
#include "base/utf8.h"
#include "plimsoll/bytes.h"
#include "run/run_folder.h"

namespace plimsoll {
namespace {

using Parsed = std::variant<std::string, std::int64_t, double, bool>;
constexpr std::size_t kWidthsLeast = 2;
constexpr std::size_t kWidthsMost = 8;

/// Levenshtein distance of two short words. Source: Wagner and Fischer (1974).
std::size_t edit_distance(std::string_view a, std::string_view b) {
  std::vector<std::size_t> row(b.size() + 1);
  for (std::size_t j = 0; j <= b.size(); ++j) {
    row[j] = j;
  }
  for (std::size_t i = 1; i <= a.size(); ++i) {
    std::size_t diagonal = row[0];
    row[0] = i;
    for (std::size_t j = 1; j <= b.size(); ++j) {
      const std::size_t replaced = diagonal + (a[i - 1] == b[j - 1] ? 0 : 1);
      diagonal = row[j];
      row[j] = std::min({row[j] + 1, row[j - 1] + 1, replaced});
    }
  }
  return row[b.size()];
}

template <class T>
bool read_number(std::string_view text, T& value) {
  const auto [end, status] = std::from_chars(text.data(), text.data() + text.size(), value);
  return status == std::errc{} && end == text.data() + text.size();
}

bool listed(std::string_view choices, std::string_view word) {
  while (!choices.empty()) {
    const auto bar = choices.find('|');
    if (choices.substr(0, bar) == word) {
      return true;
    }
    choices = bar == std::string_view::npos ? "" : choices.substr(bar + 1);
  }
  return false;
}

bool printable(std::string_view text) {
  return is_utf8(text) && std::none_of(text.begin(), text.end(), [](char c) {
           return static_cast<unsigned char>(c) < 0x20 || c == 0x7f;
         });
}

bool within(const Field& field, std::int64_t value) {
  return static_cast<double>(value) >= field.least && static_cast<double>(value) <= field.most;
}

/// "[1024, 512, 96]" → "1024,512,96"; nothing when a number or the count is out of range.
std::optional<Parsed> read_widths(const Field& field, std::string_view text) {
  if (text.size() >= 2 && ((text.front() == '[' && text.back() == ']') ||
                           (text.front() == '(' && text.back() == ')'))) {
    text = text.substr(1, text.size() - 2);
  }
  std::string widths;
  std::size_t count = 0;
  for (bool more = true; more; ++count) {
    const auto comma = text.find(',');
    std::string_view word = text.substr(0, comma);
    while (!word.empty() && word.front() == ' ') {
      word.remove_prefix(1);
    }
    while (!word.empty() && word.back() == ' ') {
      word.remove_suffix(1);
    }
    std::int64_t width = 0;
    if (count == kWidthsMost || !read_number(word, width) || !within(field, width)) {
      return std::nullopt;
    }
    widths += fmt::format("{}{}", count == 0 ? "" : ",", width);
    more = comma != std::string_view::npos;
    text = more ? text.substr(comma + 1) : "";
  }
  return count < kWidthsLeast ? std::nullopt : std::optional<Parsed>(std::move(widths));
}

std::optional<Parsed> read_bytes(const Field& field, std::string_view text) {
  std::int64_t value = -1;
  if (!(text == "-1" && field.least < 0)) {
    const auto size = parse_bytes(text);
    if (!size) {
      return std::nullopt;
    }
    value = *size;
  }
  return within(field, value) ? std::optional<Parsed>(value) : std::nullopt;
}

/// The value that `text` means; nothing when the field does not accept it.
std::optional<Parsed> parse(const Field& field, std::string_view text) {
  switch (field.kind) {
    case FieldKind::kText:
      return printable(text) ? std::optional<Parsed>(std::string(text)) : std::nullopt;
    case FieldKind::kLimit:
      // A percentage is of something known only later: any whole will do to check the form.
      return text.empty() || parse_bytes(text, 1LL << 40) ? std::optional<Parsed>(std::string(text))
                                                          : std::nullopt;
    case FieldKind::kChoice:
      return listed(field.choices, text) ? std::optional<Parsed>(std::string(text)) : std::nullopt;
    case FieldKind::kWidths:
      return read_widths(field, text);
    case FieldKind::kSwitch:
      return text == "true" || text == "false" ? std::optional<Parsed>(text == "true")
                                               : std::nullopt;
    case FieldKind::kReal: {
      double value = 0;
      const bool good = read_number(text, value) && value >= field.least && value <= field.most;
      return good ? std::optional<Parsed>(value) : std::nullopt;
    }
    case FieldKind::kBytes:
      return read_bytes(field, text);
    case FieldKind::kAuto:
      if (text == "auto") {
        return std::int64_t{0};
      }
      [[fallthrough]];
    case FieldKind::kInteger: {
      std::int64_t value = 0;
      const bool good = read_number(text, value) && within(field, value);
      return good ? std::optional<Parsed>(value) : std::nullopt;
    }
  }
  return std::nullopt;
}

std::string quote(std::string_view text) {
  std::string quoted{"\""};
  for (const char c : text) {
    if (c == '"' || c == '\\') {
      quoted += '\\';
    }
    quoted += c;
  }
  return quoted + '"';
}

std::string print_real(double value) {
  std::string text = fmt::format("{}", value);
  if (text.find_first_of(".e") == std::string::npos) {
    text += ".0";
  }
  return text;
}

std::string print_bytes(std::int64_t value) {
  if (value > 0 && value % (1LL << 20) == 0) {
    return fmt::format("\"{}MiB\"", value >> 20);
  }
  return fmt::format("{}", value);
}

/// Of a key that would make a run longer, why it cannot; "" for any other.
std::string_view why_no_longer(std::string_view key) {
  if (key == "epochs") {
    return ": the learning rate falls along a cosine that ends with the last epoch, so a longer "
           "run "
           "has other steps from the first on";
  }
  if (key == kGrowingKey) {
    return ": a run has its classifier of conditions from the first step on, and it can be trained "
           "longer, not shorter";
  }
  return key == "max_epochs"
             ? ": a finished stage keeps its model and not its optimizer, so it cannot go on"
             : "";
}

Result<void> check(const Field& field, std::string_view text, std::string_view source) {
  if (!parse(field, text)) {
    return fail(ErrorCode::kInvalidArgument, fmt::format("{}: {} must be {}, not '{}'", source,
                                                         field.name, field.accepts(), text));
  }
  return {};
}

}  // namespace

std::string Field::accepts() const {
  const auto from = static_cast<std::int64_t>(least);
  const auto to = static_cast<std::int64_t>(most);
  switch (kind) {
    case FieldKind::kText:
      return "text in UTF-8 without control characters";
    case FieldKind::kLimit:
      return "a size such as 768MiB or 6GB, or a share such as 25%";
    case FieldKind::kBytes:
      return fmt::format("a size such as 64MiB, or a number of bytes{}",
                         least < 0 ? ", or -1" : "");
    case FieldKind::kAuto:
    case FieldKind::kInteger:
      return fmt::format("a whole number from {} to {}{}", from, to,
                         kind == FieldKind::kAuto ? ", or auto" : "");
    case FieldKind::kReal:
      return fmt::format("a number from {} to {}", least, most);
    case FieldKind::kSwitch:
      return "true or false";
    case FieldKind::kWidths:
      return fmt::format("{} to {} whole numbers from {} to {}, such as 80,40,16", kWidthsLeast,
                         kWidthsMost, from, to);
    case FieldKind::kChoice: {
      std::string words = choices;
      for (std::size_t at = 0; (at = words.find('|', at)) != std::string::npos; at += 2) {
        words.replace(at, 1, ", ");
      }
      return "one of " + words;
    }
  }
  return "";
}

std::string nearest_word(std::string_view word, std::span<const std::string> words) {
  std::string nearest;
  std::size_t best = std::max<std::size_t>(2, word.size() / 3) + 1;
  for (const std::string& known : words) {
    if (const std::size_t distance = edit_distance(word, known); distance < best) {
      best = distance;
      nearest = known;
    }
  }
  return nearest;
}

Result<GivenKey> split_pair(std::string_view pair, std::string_view source) {
  const auto equals = pair.find('=');
  if (equals == std::string_view::npos || equals == 0) {
    return fail(ErrorCode::kInvalidArgument,
                fmt::format("{}: '{}' is not of the form key=value", source, pair));
  }
  return GivenKey{std::string(pair.substr(0, equals)), std::string(pair.substr(equals + 1)),
                  std::string(source)};
}

AnySettings::AnySettings(const RecipeOptions& options)
    : options_(&options), sources_(options.fields.size(), "default") {}

std::int64_t AnySettings::index_of(std::string_view key) const noexcept {
  const auto& fields = options_->fields;
  const auto at = std::find_if(fields.begin(), fields.end(),
                               [&](const Field& field) { return key == field.name; });
  return at == fields.end() ? -1 : at - fields.begin();
}

std::vector<std::string> AnySettings::known_keys() const {
  std::vector<std::string> keys;
  for (const Field& field : options_->fields) {
    keys.emplace_back(field.name);
  }
  return keys;
}

// in() only says where the value lies; nobody writes through what print() and value_of() are given.
FieldValue AnySettings::value_of(const Field& field) const {
  return field.in(const_cast<AnySettings*>(this)->place(), field);
}

std::string AnySettings::print(const Field& field) const {
  const FieldValue value = value_of(field);
  switch (field.kind) {
    case FieldKind::kText:
    case FieldKind::kLimit:
    case FieldKind::kChoice:
    case FieldKind::kWidths:
      return quote(*std::get<std::string*>(value));
    case FieldKind::kBytes:
      return print_bytes(*std::get<std::int64_t*>(value));
    case FieldKind::kAuto:
      if (*std::get<std::int64_t*>(value) == 0) {
        return "\"auto\"";
      }
      [[fallthrough]];
    case FieldKind::kInteger:
      return fmt::format("{}", *std::get<std::int64_t*>(value));
    case FieldKind::kReal:
      return print_real(*std::get<double*>(value));
    case FieldKind::kSwitch:
      return *std::get<bool*>(value) ? "true" : "false";
  }
  return "";
}

Result<void> AnySettings::set(std::string_view key, std::string_view text,
                              std::string_view source) {
  if (const auto index = index_of(key); index >= 0) {
    const Field& field = options_->fields[static_cast<std::size_t>(index)];
    PLIMSOLL_TRY_VOID(check(field, text, source));
    std::visit(
        [&](auto* value) {
          *value = std::get<std::remove_pointer_t<decltype(value)>>(*parse(field, text));
        },
        field.in(place(), field));
    sources_[static_cast<std::size_t>(index)] = source;
    return {};
  }
  const std::string near = nearest_word(key, known_keys());
  return fail(ErrorCode::kInvalidArgument,
              fmt::format("{}: unknown key '{}'{}", source, key,
                          near.empty() ? "" : fmt::format("; did you mean '{}'?", near)),
              options_->keys_advice);
}

Result<void> AnySettings::set_all(std::span<const GivenKey> given) {
  for (const GivenKey& one : given) {
    PLIMSOLL_TRY_VOID(set(one.key, one.text, one.source));
  }
  return {};
}

Result<void> AnySettings::set_pair(std::string_view pair, std::string_view source) {
  PLIMSOLL_TRY(GivenKey given, split_pair(pair, source));
  return set(given.key, given.text, given.source);
}

Result<void> AnySettings::resolve(bool wants_out) {
  const std::string_view other = options_->data_or;
  if (text_of("data").empty() && (other.empty() || text_of(other).empty())) {
    return fail(ErrorCode::kInvalidArgument, "no data given", options_->data_advice);
  }
  if (wants_out && text_of("out").empty()) {
    return fail(ErrorCode::kInvalidArgument, "no run folder given", "name one with --out RUN");
  }
  // A run may be resumed from another folder than the one it was started in.
  for (const Field& field : options_->fields) {
    if (field.role == FieldRole::kPlace) {
      if (auto& path = *std::get<std::string*>(field.in(place(), field)); !path.empty()) {
        path = std::filesystem::absolute(path).lexically_normal().string();
        if (!is_utf8(path)) {
          return fail(
              ErrorCode::kInvalidArgument,
              fmt::format("{}: the folder's path is not UTF-8, and run.toml is", field.name),
              "rename that folder, or choose another");
        }
      }
    }
  }
  const auto index = static_cast<std::size_t>(index_of("compute_threads"));
  const Field& field = options_->fields[index];
  auto& threads = *std::get<std::int64_t*>(field.in(place(), field));
  if (threads == 0) {
    threads = std::max(1U, std::thread::hardware_concurrency());
    sources_[index] += ", one per core";
  }
  return {};
}

Result<void> AnySettings::override_with(
    std::span<const std::pair<std::string, std::string>> overrides, std::string_view source) {
  std::vector<GivenKey> given;
  for (const auto& [key, text] : overrides) {
    given.push_back({key, text, std::string(source)});
  }
  const auto before = copy();
  auto done = set_all(given);
  if (done) {
    done = check_overrides(*before, source);
  }
  if (!done) {
    become(*before);
  }
  return done;
}

Result<void> AnySettings::check_overrides(const AnySettings& before, std::string_view source) {
  for (std::size_t i = 0; i < sources_.size(); ++i) {
    const Field& field = options_->fields[i];
    const std::string was = before.print(field);
    const std::string is = print(field);
    if (was == is) {
      sources_[i] = before.sources_[i];
      continue;
    }
    const bool longer = std::string_view(field.name) == kGrowingKey && was != "0" &&
                        *std::get<std::int64_t*>(value_of(field)) >
                            *std::get<std::int64_t*>(before.value_of(field));
    if (longer) {
      continue;
    }
    if (field.role == FieldRole::kIdentity || std::string_view(field.name) == "out") {
      return fail(ErrorCode::kInvalidArgument,
                  fmt::format("{}: {} is part of this run's identity ({}) and cannot become {}{}",
                              source, field.name, was, is, why_no_longer(field.name)),
                  "start a new run with `plimsoll train`; limits, caches, queues and loader "
                  "threads may change");
    }
  }
  return {};
}

std::string AnySettings::to_toml() const {
  std::string toml = "# Every option of this run and where it came from.\n";
  if (std::string_view(options_->recipe) != kFirstRecipe) {
    toml += fmt::format("recipe = \"{}\"\n", options_->recipe);
  }
  toml += fmt::format("[{}]\n", options_->recipe);
  for (std::size_t i = 0; i < sources_.size(); ++i) {
    const Field& field = options_->fields[i];
    toml += fmt::format("{:<40}  # from {}\n", fmt::format("{} = {}", field.name, print(field)),
                        sources_[i]);
  }
  return toml;
}

std::vector<std::pair<std::string, std::string>> AnySettings::items() const {
  std::vector<std::pair<std::string, std::string>> items;
  for (const Field& field : options_->fields) {
    items.emplace_back(field.name, text_of(field.name));
  }
  return items;
}

std::vector<std::pair<std::string, std::string>> AnySettings::identity() const {
  std::vector<std::pair<std::string, std::string>> items;
  if (std::string_view(options_->recipe) != kFirstRecipe) {
    items.emplace_back("recipe", quote(options_->recipe));
  }
  for (const Field& field : options_->fields) {
    if (field.role == FieldRole::kIdentity) {
      items.emplace_back(field.name, print(field));
    }
  }
  return items;
}

std::string AnySettings::literal(std::string_view key) const {
  const auto index = index_of(key);
  PLIMSOLL_CHECK(index >= 0, "literal() of an unknown key");
  return print(options_->fields[static_cast<std::size_t>(index)]);
}

std::string AnySettings::text_of(std::string_view key) const {
  const auto index = index_of(key);
  PLIMSOLL_CHECK(index >= 0, "text_of() an unknown key");
  const Field& field = options_->fields[static_cast<std::size_t>(index)];
  const FieldValue value = value_of(field);
  const auto* text = std::get_if<std::string*>(&value);
  return text != nullptr ? **text : print(field);
}

const std::string& AnySettings::source_of(std::string_view key) const {
  const auto index = index_of(key);
  PLIMSOLL_CHECK(index >= 0, "source_of() of an unknown key");
  return sources_[static_cast<std::size_t>(index)];
}

}  // namespace plimsoll
