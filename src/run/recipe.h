// SPDX-License-Identifier: Apache-2.0
//
// Recipe: a training run that the program and Python can start by its name.
//
// The program, Python and the files of runs know recipes through this list alone; none is named
// elsewhere. Python adds them (python/plimsoll/recipes/__init__.py).
// Reading order: config.h (options), this file.
//
// Threads: recipes are added while a program starts, on one thread; then the list is constant.
// Memory:  kRecipesMax recipes at most, a few hundred bytes each.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <string>
#include <string_view>

#include "plan/device_choice.h"
#include "plimsoll/result.h"
#include "run/config.h"
#include "run/train_options.h"

namespace plimsoll {

inline constexpr std::size_t kRecipesMax = 64;

/// What a call came to.
struct RecipeReport {
  std::string json{"{}"};       ///< One line.
  std::string text{};           ///< The same for a reader; empty: another rank tells.
  bool ended_by_memory{false};  ///< A run's last commit stands, and it goes on when resumed.
};

/// What `plimsoll plan` is asked beside the recipe's own options.
struct PlanQuestion {
  bool choices{false};              ///< Also plan and time what moves memory.
  std::int64_t effective_batch{0};  ///< With choices: of an optimizer step, in units; 0: none.
  DeviceChoice device{};            ///< Must hold the step too.
};

/// What `plimsoll export` is asked.
struct ExportQuestion {
  std::string out{};  ///< Folder to make.
  bool merge{false};  ///< Adapters become part of the weights.
};

struct Recipe {
  std::string name{};            ///< "can-kd": a word of the command line, and of run.toml.
  std::string about{};           ///< What it trains; no full stop.
  std::string unit{"rows"};      ///< What a batch has so many of.
  std::string train_examples{};  ///< Lines of `--help`, two blanks before each.
  std::string plan_example{};
  std::string choices{};        ///< What --choices weighs: "gradient caching"; "": nothing.
  bool effective_batch{false};  ///< Whether a plan knows --effective-batch.
  /// New settings, all at their defaults.
  std::function<std::unique_ptr<AnySettings>()> settings{};

  // Each is given resolved settings of the kind that settings() makes. An empty one cannot be done
  // by this recipe; see work_missing().
  std::function<Result<RecipeReport>(const AnySettings&, const TrainOptions&)> train{};
  std::function<Result<RecipeReport>(const AnySettings&)> evaluate{};
  std::function<Result<RecipeReport>(const AnySettings&, const PlanQuestion&)> plan{};
  std::function<Result<RecipeReport>(const AnySettings&, const ExportQuestion&)> export_model{};
};

/// Adds a recipe to the list. One of the same name takes the place of that one.
/// Errors: kInvalidArgument for a name that is not lower-case letters, digits and hyphens, or
///         without settings; kOverBudget for more than kRecipesMax.
Result<void> add_recipe(Recipe recipe);

/// In the order in which they were added.
[[nodiscard]] std::span<const Recipe> recipes() noexcept;

/// Null when there is none of that name.
[[nodiscard]] const Recipe* find_recipe(std::string_view name) noexcept;

/// Errors: kInvalidArgument, naming those that there are.
Result<const Recipe*> recipe_named(std::string_view name);

/// What the run.toml of the run in `root` calls its recipe.
/// Errors: kNotFound when there is no run; kInvalidArgument for a run of a Python program;
/// kCorrupt.
Result<std::string> recipe_name_of_run(const std::filesystem::path& root);

/// The recipe of the run in `root`. Errors: the same; kInvalidArgument for one not in the list, and
/// for a run that was trained in C++.
Result<const Recipe*> recipe_of_run(const std::filesystem::path& root);

/// Why `what` ("train", "evaluate", "plan", "export") of a recipe is empty.
[[nodiscard]] Error work_missing(const Recipe& recipe, const char* what);

/// The settings of a new run: `config` (a file; "" is none), then each of `given` in order.
/// Errors: what was given wrong.
Result<std::unique_ptr<AnySettings>> new_settings(const Recipe& recipe,
                                                  const std::filesystem::path& config,
                                                  std::span<const std::vector<GivenKey>> given,
                                                  bool wants_out);

/// A run's own settings, from its run.toml; `out` is `root`. Errors: as AnySettings::read_file().
Result<std::unique_ptr<AnySettings>> settings_of_run(const Recipe& recipe,
                                                     const std::filesystem::path& root);

}  // namespace plimsoll
