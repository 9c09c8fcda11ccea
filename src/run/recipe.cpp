// SPDX-License-Identifier: Apache-2.0
#include "run/recipe.h"

#include <fmt/format.h>

#include <algorithm>
#include <utility>
#include <vector>

#include "base/check.h"
#include "run/sealed_file.h"

namespace plimsoll {
namespace {

// One list for the program and for every module of Python: this library is there once. Reserved
// once, so that no recipe ever moves.
std::vector<Recipe>& list() {
  static std::vector<Recipe> recipes = [] {
    std::vector<Recipe> room;
    room.reserve(kRecipesMax);
    return room;
  }();
  return recipes;
}

bool is_name(std::string_view name) {
  return !name.empty() && std::all_of(name.begin(), name.end(), [](char c) {
    return (c >= 'a' && c <= 'z') || (c >= '0' && c <= '9') || c == '-';
  });
}

/// A run that was trained in C++ has checkpoints that nothing here reads. Its identity does not say
/// whether torch is deterministic.
Result<void> refuse_trained_in_cpp(const std::filesystem::path& root, const std::string& recipe) {
  const auto identity = read_sealed(root / "identity.json");  // None, or damaged: the run says so.
  if (!identity || identity->find("\"deterministic\"") != std::string::npos) {
    return {};
  }
  return fail(ErrorCode::kInvalidArgument,
              fmt::format("{}: a run of the recipe {} that was trained in C++, which this version "
                          "does not go on with",
                          root.string(), recipe),
              "go on with the version of Plimsoll that made it, or train anew in another folder");
}

}  // namespace

Result<void> add_recipe(Recipe recipe) {
  if (!is_name(recipe.name) || recipe.name.front() == '-') {
    return fail(ErrorCode::kInvalidArgument,
                fmt::format("'{}' is no name of a recipe", recipe.name),
                "lower-case letters, digits and hyphens, a letter or digit first");
  }
  if (!recipe.settings) {
    return fail(ErrorCode::kInvalidArgument,
                fmt::format("the recipe {} has no options", recipe.name));
  }
  const auto at = std::find_if(list().begin(), list().end(),
                               [&](const Recipe& one) { return one.name == recipe.name; });
  if (at != list().end()) {
    *at = std::move(recipe);
    return {};
  }
  if (list().size() == kRecipesMax) {
    return fail(ErrorCode::kOverBudget,
                fmt::format("{}: there are {} recipes already", recipe.name, kRecipesMax));
  }
  list().push_back(std::move(recipe));
  return {};
}

std::span<const Recipe> recipes() noexcept {
  return list();
}

const Recipe* find_recipe(std::string_view name) noexcept {
  const auto all = recipes();
  const auto at =
      std::find_if(all.begin(), all.end(), [&](const Recipe& one) { return one.name == name; });
  return at == all.end() ? nullptr : &*at;
}

Result<const Recipe*> recipe_named(std::string_view name) {
  if (const Recipe* known = find_recipe(name); known != nullptr) {
    return known;
  }
  std::string names;
  for (const Recipe& one : recipes()) {
    names += fmt::format("{}\"{}\"", names.empty() ? "" : ", ", one.name);
  }
  return fail(ErrorCode::kInvalidArgument,
              fmt::format("there is no recipe \"{}\"; there are {}", name, names));
}

Result<const Recipe*> recipe_of_run(const std::filesystem::path& root) {
  PLIMSOLL_TRY(const std::string name, recipe_name_of_run(root));
  if (const Recipe* known = find_recipe(name); known != nullptr) {
    PLIMSOLL_TRY_VOID(refuse_trained_in_cpp(root, name));
    return known;
  }
  return fail(
      ErrorCode::kInvalidArgument,
      fmt::format("{}: a run of the recipe '{}', which this program does not have",
                  (root / "run.toml").string(), name),
      "use the version of Plimsoll that made the run; a recipe in Python needs a Python with the "
      "package plimsoll, which `pip install '.[chat,vision]'` in its source folder installs");
}

Error work_missing(const Recipe& recipe, const char* what) {
  return make_error(ErrorCode::kInvalidArgument,
                    fmt::format("the recipe {} has no {}", recipe.name, what));
}

Result<std::unique_ptr<AnySettings>> new_settings(const Recipe& recipe,
                                                  const std::filesystem::path& config,
                                                  std::span<const std::vector<GivenKey>> given,
                                                  bool wants_out) {
  auto settings = recipe.settings();
  if (!config.empty()) {
    PLIMSOLL_TRY_VOID(settings->read_file(config));
  }
  for (const auto& keys : given) {
    PLIMSOLL_TRY_VOID(settings->set_all(keys));
  }
  PLIMSOLL_TRY_VOID(settings->resolve(wants_out));
  return settings;
}

Result<std::unique_ptr<AnySettings>> settings_of_run(const Recipe& recipe,
                                                     const std::filesystem::path& root) {
  auto settings = recipe.settings();
  PLIMSOLL_TRY_VOID(settings->read_file(root / "run.toml", true));
  const std::string source = settings->source_of("out");
  PLIMSOLL_TRY_VOID(settings->set("out", std::filesystem::absolute(root).string(), source));
  return settings;
}

}  // namespace plimsoll
