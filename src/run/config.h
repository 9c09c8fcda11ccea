// SPDX-License-Identifier: Apache-2.0
//
// Options of a run: one table of fields per recipe, several sources, each value with its origin.
//
// Sources in rising order: defaults, --config (a .toml or .json file, or a preset's name), the
// command line's own flags, --set key=value. A recipe's table is the only list of its keys: flags,
// files, run.toml, `--help` and the run's identity are all made from it.
// Reading order: Field, RecipeOptions, AnySettings, Settings, then the config.h of a recipe,
// field_table.h (how tables are written), config.cpp.
//
// Threads: thread-compatible.   Memory: a few kilobytes.
#pragma once

#include <cstdint>
#include <filesystem>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <variant>
#include <vector>

#include "plimsoll/result.h"

namespace plimsoll {

/// How the text of a value is read.
enum class FieldKind : std::uint8_t {
  kText,     ///< Any text.
  kLimit,    ///< Text that parse_bytes() accepts, percentages too; kept as text.
  kBytes,    ///< A size ("64MiB") or a whole number of bytes.
  kInteger,  ///< A whole number within [least, most].
  kAuto,     ///< The same, or "auto", which is kept as 0.
  kReal,     ///< A finite number within [least, most].
  kSwitch,   ///< true or false.
  kChoice,   ///< One of `choices`.
  kWidths,   ///< "1024,512,96": 2 to 8 whole numbers within [least, most]; kept as text.
};

/// When a value may differ between a run and its resumption.
enum class FieldRole : std::uint8_t {
  kIdentity,  ///< Never: it decides the run's bits.
  kFree,      ///< Always: where bytes live, what is reported.
  kPlace,     ///< Paths: given anew at each start.
};

/// Where a field's value lies.
using FieldValue = std::variant<std::string*, std::int64_t*, double*, bool*>;

struct Field {
  const char* name;
  FieldKind kind;
  FieldRole role;
  /// Of the recipe's config; field_table.h writes it.
  FieldValue (*in)(void* config, const Field& self);
  const char* help;
  double least{0.0};
  double most{0.0};
  const char* choices{""};  ///< kChoice: "adamw|adagrad".

  /// "a whole number from 1 to 1048576", "a size such as 64MiB", "one of adamw, adagrad".
  [[nodiscard]] std::string accepts() const;
};

/// A file of options that comes with a recipe.
struct Preset {
  const char* name;  ///< "small": what --config says.
  const char* toml;  ///< The file's text.
};

/// All there is to know of a recipe's options.
struct RecipeOptions {
  const char* recipe;             ///< "cosir"; also the name of its table in files.
  std::span<const Field> fields;  ///< In the order of run.toml.
  const char* data_advice;        ///< How to get what --data names.
  const char* keys_advice;        ///< Where all keys are listed.
  std::span<const Preset> presets{};
  const char* data_or{""};  ///< Name of a field that may be given in place of data.
};

/// What every run has. A recipe's config derives from it and may have other defaults; the fields
/// are in field_table.h.
struct RunConfig {
  std::string data{};
  std::string out{};
  std::string memory_limit{};  ///< As find_limit() reads it; "" is its default.
  std::string disk_limit{};
  std::int64_t seed{0};
  std::int64_t checkpoint_every_n_steps{500};  ///< 0: one at the end of each epoch.
  std::int64_t keep_checkpoints{2};
  std::int64_t cleanup_every_n_steps{0};  ///< 0: after evaluations, and under pressure, only.
  std::int64_t foreign_bytes{128LL << 20};
  std::int64_t compute_threads{0};  ///< 0: the number of cores; AnySettings::resolve() fixes it.
  bool tensorboard{true};
};

/// The options of the recipe that Config belongs to; specialised beside each config.
template <class Config>
[[nodiscard]] const RecipeOptions& recipe_options() noexcept;

/// The recipe of a run that names none in its run.toml.
inline constexpr const char* kFirstRecipe = "cosir";

/// The word of `words` nearest to `word` by edit distance, or "" when none is near.
[[nodiscard]] std::string nearest_word(std::string_view word, std::span<const std::string> words);

/// One key as it was given: what for, and where.
struct GivenKey {
  std::string key;
  std::string text;
  std::string source;  ///< "--epochs", "--set", "run.toml:3".
};

/// Splits "key=value". Errors: kInvalidArgument.
Result<GivenKey> split_pair(std::string_view pair, std::string_view source);

/// Settings of whichever recipe: a config under construction, and where each value came from.
class AnySettings {
 public:
  virtual ~AnySettings() = default;

  /// Reads a .toml or .json file: flat keys, or the same inside a table named as the recipe. A word
  /// without a suffix is the name of a preset.
  /// With `keep_sources` (a run's own run.toml) values keep the sources recorded beside them.
  /// Errors: kNotFound; kInvalidArgument naming the file, the line (TOML) and the key, or the
  ///         recipe that the file belongs to instead.
  Result<void> read_file(const std::filesystem::path& path, bool keep_sources = false);

  /// Sets one key from text; `source` is what the user wrote it in: "--epochs", "--set".
  /// Errors: kInvalidArgument naming the key, what it accepts, and the nearest known key.
  Result<void> set(std::string_view key, std::string_view text, std::string_view source);

  /// Sets keys as they come. Errors: as set(); those before the wrong one are set.
  Result<void> set_all(std::span<const GivenKey> given);

  /// Splits "key=value" and sets it.
  Result<void> set_pair(std::string_view pair, std::string_view source);

  /// A run's own values, then `overrides` on top: what `plimsoll resume` trains with. Values that
  /// are as they were keep their sources.
  /// Errors: kInvalidArgument naming the key when an override would change the run's identity;
  ///         nothing has changed then.
  Result<void> override_with(std::span<const std::pair<std::string, std::string>> overrides,
                             std::string_view source);

  /// Checks that data and out are given (`out` where it is wanted), makes places absolute and
  /// fixes compute_threads. Idempotent. Errors: kInvalidArgument.
  Result<void> resolve(bool wants_out = true);

  /// The text of run.toml: every value, with a comment that says where it came from.
  [[nodiscard]] std::string to_toml() const;

  /// (key, value) of every field, texts without quotes.
  [[nodiscard]] std::vector<std::pair<std::string, std::string>> items() const;

  /// (key, value) of the fields that decide the run's bits, and the recipe unless it is the first.
  [[nodiscard]] std::vector<std::pair<std::string, std::string>> identity() const;

  /// The value of a field as a TOML literal. Requires: a known field, here and below.
  [[nodiscard]] std::string literal(std::string_view key) const;
  /// The same, a text without its quotes.
  [[nodiscard]] std::string text_of(std::string_view key) const;
  [[nodiscard]] const std::string& source_of(std::string_view key) const;

  [[nodiscard]] const RecipeOptions& options() const noexcept { return *options_; }

 protected:
  explicit AnySettings(const RecipeOptions& options);
  AnySettings(const AnySettings&) = default;
  AnySettings& operator=(const AnySettings&) = default;

 private:
  [[nodiscard]] virtual std::unique_ptr<AnySettings> copy() const = 0;
  virtual void become(const AnySettings& other) = 0;  // Of the same kind.
  Result<void> check_overrides(const AnySettings& before, std::string_view source);
  [[nodiscard]] virtual void* place() noexcept = 0;  // The config that the fields' in() takes.
  [[nodiscard]] std::string print(const Field& field) const;
  [[nodiscard]] FieldValue value_of(const Field& field) const;
  [[nodiscard]] std::int64_t index_of(std::string_view key) const noexcept;
  [[nodiscard]] std::vector<std::string> known_keys() const;

  const RecipeOptions* options_;
  std::vector<std::string> sources_{};  // One per field, in the order of options_->fields.
};

/// Settings of the recipe whose options Config holds.
template <class Config>
class Settings final : public AnySettings {
 public:
  Settings() : AnySettings(recipe_options<Config>()) {}

  [[nodiscard]] const Config& config() const noexcept { return config_; }

 private:
  [[nodiscard]] void* place() noexcept override { return &config_; }
  [[nodiscard]] std::unique_ptr<AnySettings> copy() const override {
    return std::make_unique<Settings>(*this);
  }
  void become(const AnySettings& other) override { *this = static_cast<const Settings&>(other); }

  Config config_{};
};

}  // namespace plimsoll
