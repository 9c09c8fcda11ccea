// SPDX-License-Identifier: Apache-2.0
//
// The options of a `cosir` run: one table of fields, several sources, each value with its origin.
//
// Sources in rising order: defaults, --config FILE (.toml or .json), the command line's own flags,
// --set key=value. cosir_fields() is the only list of keys: flags, files, run.toml, `--help` and
// the run's identity are all made from it.
// Reading order: CosirConfig, Field, CosirSettings, then config.cpp.
//
// Threads: thread-compatible.   Memory: a few kilobytes.
#pragma once

#include <cstdint>
#include <filesystem>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <variant>
#include <vector>

#include "plimsoll/result.h"

namespace plimsoll {

/// Every option of `plimsoll train cosir`. docs/recipes/cosir.md says what each one does.
struct CosirConfig {
  std::string data{};
  std::string out{};
  std::string memory_limit{};  ///< As find_limit() reads it; "" is its default.
  std::string disk_limit{};
  std::int64_t epochs{30};
  std::int64_t batch_size{2048};  ///< 0: "auto", until train_cosir() has planned it.
  std::int64_t seed{0};
  std::int64_t dim{0};  ///< 0: the features' own width when both agree, else 256.
  std::int64_t label_dim{2};
  std::string projections{"auto"};  ///< auto | true | false.
  double temperature{0.07};
  double loss_infonce{1.0};
  double loss_laplacian{0.7};
  double loss_angular{0.3};
  double loss_radius{0.3};
  double loss_rotation{0.3};
  double loss_boundary{0.0};
  double lr{1e-5};
  double projection_lr{1e-3};
  double weight_decay{0.05};
  std::string label_dtype{"float32"};    ///< float32 | bfloat16.
  std::string label_optimizer{"adamw"};  ///< adamw | adamw_fresh | adagrad.
  double label_lr{0.1};
  double label_weight_decay{0.05};
  std::string label_init{"normal"};  ///< normal | zeros | uniform.
  double label_init_scale{0.1};
  std::string label_schedule{"constant"};  ///< constant | cosine.
  std::string label_layout{"auto"};        ///< auto | any_order | sample_order.
  bool drop_last{false};
  std::int64_t holdout{-1};  ///< Groups; −1: 5,000 pairs' worth, at most a fifth of the groups.
  std::int64_t eval_pairs{5000};
  std::int64_t eval_every_n_epochs{5};  ///< 0: only before and after training.
  std::int64_t oracle_angles{12};
  std::int64_t phase2_epochs{0};
  double phase2_lr{1e-5};
  std::int64_t checkpoint_every_n_steps{500};
  std::int64_t keep_checkpoints{2};
  std::int64_t cleanup_every_n_steps{0};  ///< 0: after evaluations, and under pressure, only.
  std::int64_t queue_bytes{0};            ///< 0: chosen by the loader.
  std::int64_t store_bytes{0};            ///< 0: chosen within the limit.
  std::int64_t cache_bytes{0};            ///< 0: chosen within the limit.
  std::int64_t foreign_bytes{128LL << 20};
  std::int64_t loader_threads{2};
  std::int64_t compute_threads{0};  ///< 0: the number of cores; CosirSettings::resolve() fixes it.
  std::int64_t io_threads{4};
  std::int64_t stats_every_n_epochs{1};
  std::int64_t metrics_every_n_steps{10};
  bool tensorboard{true};
  std::string mlflow{};  ///< A folder for MLflow's file layout; "": none.
};

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
};

/// When a value may differ between a run and its resumption.
enum class FieldRole : std::uint8_t {
  kIdentity,  ///< Never: it decides the run's bits.
  kFree,      ///< Always: where bytes live, what is reported.
  kPlace,     ///< Paths: given anew at each start.
};

struct Field {
  const char* name;
  FieldKind kind;
  FieldRole role;
  std::variant<std::string CosirConfig::*, std::int64_t CosirConfig::*, double CosirConfig::*,
               bool CosirConfig::*>
      member;
  const char* help;
  double least{0.0};
  double most{0.0};
  const char* choices{""};  ///< kChoice: "adamw|adagrad".

  /// "a whole number from 1 to 1048576", "a size such as 64MiB", "one of adamw, adagrad".
  [[nodiscard]] std::string accepts() const;
  /// The value as a TOML literal.
  [[nodiscard]] std::string print(const CosirConfig& config) const;
};

/// All fields, in the order of run.toml.
[[nodiscard]] std::span<const Field> cosir_fields() noexcept;

/// The known key nearest to `key` by edit distance, or "" when none is near.
[[nodiscard]] std::string nearest_key(std::string_view key);

/// A CosirConfig under construction, and where each of its values came from.
class CosirSettings {
 public:
  CosirSettings();

  /// Reads a .toml or .json file: flat keys, or the same inside a table named `cosir`.
  /// With `keep_sources` (a run's own run.toml) values keep the sources recorded beside them.
  /// Errors: kNotFound; kInvalidArgument naming the file, the line (TOML) and the key.
  Result<void> read_file(const std::filesystem::path& path, bool keep_sources = false);

  /// Sets one key from text; `source` is what the user wrote it in: "--epochs", "--set".
  /// Errors: kInvalidArgument naming the key, what it accepts, and the nearest known key.
  Result<void> set(std::string_view key, std::string_view text, std::string_view source);

  /// Splits "key=value" and sets it.
  Result<void> set_pair(std::string_view pair, std::string_view source);

  /// Checks that data and out are given (`out` where it is wanted), makes places absolute and
  /// fixes compute_threads. Idempotent. Errors: kInvalidArgument.
  Result<void> resolve(bool wants_out = true);

  /// A run's own values, then `overrides` on top: what `plimsoll resume` trains with.
  /// Errors: kInvalidArgument naming the key when an override would change the run's identity.
  Result<void> override_with(std::span<const std::pair<std::string, std::string>> overrides,
                             std::string_view source);

  /// The text of run.toml: every value, with a comment that says where it came from.
  [[nodiscard]] std::string to_toml() const;

  /// (key, value) of every field, texts without quotes: for MLflow's params.
  [[nodiscard]] std::vector<std::pair<std::string, std::string>> items() const;

  /// (key, value) of the fields that decide the run's bits.
  [[nodiscard]] std::vector<std::pair<std::string, std::string>> identity() const;

  [[nodiscard]] const CosirConfig& config() const noexcept { return config_; }
  [[nodiscard]] const std::string& source_of(std::string_view key) const;

 private:
  Result<void> read_toml(const std::filesystem::path& path, const std::string& text,
                         bool keep_sources);
  Result<void> read_json(const std::filesystem::path& path, const std::string& text);

  CosirConfig config_{};
  std::vector<std::string> sources_{};  // One per field, in the order of cosir_fields().
};

}  // namespace plimsoll
