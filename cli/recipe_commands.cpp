// SPDX-License-Identifier: Apache-2.0
//
// recipes, config: which recipes there are, and a file of all options of one.
#include <fmt/format.h>

#include <CLI/CLI.hpp>
#include <memory>
#include <string>

#include "cli/commands.h"
#include "run/recipe.h"

namespace plimsoll {
namespace {

constexpr const char* kEmpty = "\"\"";

/// Every option with its value, a comment above each. What is empty is commented out.
std::string commented_file(const AnySettings& settings, const std::string& of) {
  const RecipeOptions& options = settings.options();
  std::string text = fmt::format(
      "# Options of `plimsoll train {} --config FILE`, {}. What the command line\n"
      "# says wins over this file. \"decides the bits\": a run goes on only with the same value.\n",
      options.recipe, of.empty() ? "at their defaults" : "as in " + of);
  for (const Field& field : options.fields) {
    const std::string value = settings.literal(field.name);
    text += fmt::format("\n# {}{}{}.\n# Accepts {}.\n{}{} = {}\n", field.help,
                        *field.choices != '\0' ? fmt::format(": {}", field.choices) : "",
                        field.role == FieldRole::kIdentity ? "; decides the bits" : "",
                        field.accepts(), value == kEmpty ? "# " : "", field.name, value);
  }
  return text;
}

void add_config_of(CLI::App& command, int& status, const Recipe& recipe) {
  auto* config_of =
      command.add_subcommand(recipe.name, "Options of `plimsoll train " + recipe.name + "`");
  config_of->footer(fmt::format("\nExample:\n  plimsoll config {0} > {0}.toml", recipe.name));
  const auto config = std::make_shared<std::string>();
  add_config(*config_of, *config, recipe);
  config_of->callback([&recipe, &status, config] {
    const auto settings = recipe.settings();
    if (!config->empty()) {
      if (const auto read = settings->read_file(*config); !read) {
        status = report(read.error(), kUsageStatus);
        return;
      }
    }
    std::string text = commented_file(*settings, *config);
    text.pop_back();  // print() ends the line.
    print(text);
    status = 0;
  });
}

}  // namespace

void add_recipe_commands(CLI::App& app, int& status) {
  auto* list = app.add_subcommand("recipes", "List what `plimsoll train` can train");
  list->footer(
      "\nA line each: the name of the recipe, a tab, what it trains.\nExamples:\n  plimsoll "
      "recipes\n  plimsoll recipes copy chat ./mine   its files, to be changed: plimsoll train "
      "./mine/recipe.py");
  list->callback([&status] {
    for (const Recipe& recipe : recipes()) {
      print(recipe.name + "\t" + recipe.about);
    }
    status = 0;
  });
  auto* config =
      app.add_subcommand("config", "Print a file of all options of a recipe, with comments");
  config->require_subcommand(1);
  for (const Recipe& recipe : recipes()) {
    add_config_of(*config, status, recipe);
  }
  config->footer(
      "\nExample:\n  plimsoll config cosir > cosir.toml\n"
      "  plimsoll train cosir --config cosir.toml --data data/ --out run/");
}

}  // namespace plimsoll
