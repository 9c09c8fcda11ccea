// SPDX-License-Identifier: Apache-2.0
//
// train, plan, resume, eval. Every key of a recipe is an option: batch_size is --batch-size. Which
// recipe resume and eval go on with is written in the run.
#include <fmt/format.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <cstdio>
#include <filesystem>
#include <map>
#include <memory>

#include "cli/commands.h"
#include "cli/training.h"
#include "recipes/can_kd/config.h"
#include "recipes/cosir_config.h"
#include "recipes/run_folder.h"

namespace plimsoll {
namespace {

constexpr const char* kBits = "What is trained (decides the bits)";
constexpr const char* kWhere = "Where and how it runs";

std::string flag_of(std::string_view key) {
  std::string flag = fmt::format("--{}", key);
  std::replace(flag.begin(), flag.end(), '_', '-');
  return flag;
}

/// Adds --some-key TEXT for some_key; "" as the group hides it from --help.
void add_key(CLI::App& command, const std::shared_ptr<Typed>& typed, const std::string& key,
             const std::string& help, const std::string& group) {
  const std::string flag = flag_of(key);
  command
      .add_option_function<std::string>(
          flag,
          [typed, key, flag](const std::string& text) {
            typed->flags.push_back({key, text, flag});
          },
          help)
      ->type_name("")
      ->take_last()
      ->group(group);
}

/// "Weight: neighbours act alike: a|b [0.7]".
std::string help_of(const Field& field, const std::string& preset) {
  std::string help = field.help;
  if (*field.choices != '\0') {
    help += fmt::format(": {}", field.choices);
  }
  return preset.empty() || preset == "\"\"" ? help : help + fmt::format(" [{}]", preset);
}

void add_set(CLI::App& command, const std::shared_ptr<Typed>& typed) {
  command
      .add_option("--set", typed->pairs, "Option of any name, as batch_size=512; may be repeated")
      ->type_name("KEY=VALUE")
      ->expected(1)
      ->take_all();
}

/// Adds an option per key of a recipe, of the fields those that are `wanted`.
void add_keys(CLI::App& command, const std::shared_ptr<Typed>& typed, const AnySettings& defaults,
              bool (*wanted)(const Field&)) {
  const RecipeOptions& options = defaults.options();
  for (const Field& field : options.fields) {
    if (wanted(field)) {
      add_key(command, typed, field.name, help_of(field, defaults.literal(field.name)),
              field.role == FieldRole::kIdentity ? kBits : kWhere);
    }
  }
  for (const Shorthand& shorthand : options.shorthands) {
    add_key(command, typed, shorthand.form.name, help_of(shorthand.form, ""),
            "Several of these at once");
  }
  for (const IgnoredKey& ignored : options.ignored) {
    if (command.get_option_no_throw(flag_of(ignored.name)) == nullptr) {  // `plan` has a --device.
      add_key(command, typed, ignored.name, ignored.reason, "");
    }
  }
  add_set(command, typed);
}

void add_output(CLI::App& command, const std::shared_ptr<Typed>& typed) {
  command.add_flag("--json", typed->json, "Last line of standard output: the summary as JSON");
  command.add_flag("--quiet", typed->quiet, "Progress is not shown");
}

/// The keys of --set. Errors: what is not of the form key=value.
Result<std::vector<GivenKey>> pairs_of(const Typed& typed) {
  std::vector<GivenKey> given;
  for (const auto& pair : typed.pairs) {
    auto one = split_pair(pair, "--set");
    if (!one) {
      return tl::unexpected(std::move(one).error());
    }
    given.push_back(std::move(*one));
  }
  return given;
}

/// Flags, then --set, on top of what `settings` holds.
Result<void> apply(const Typed& typed, AnySettings& settings) {
  if (auto set = settings.set_all(typed.flags); !set) {
    return set;
  }
  auto pairs = pairs_of(typed);
  return pairs ? settings.set_all(std::move(*pairs)) : tl::unexpected(std::move(pairs).error());
}

void print_notes(const AnySettings& settings) {
  for (const auto& note : settings.notes()) {
    std::fprintf(stderr, "plimsoll: %s\n", note.c_str());
  }
}

/// The settings of a new run. Errors: what was typed wrong.
template <class AnyRecipe>
Result<AnyRecipe> new_settings(const Typed& typed, bool wants_out) {
  AnyRecipe settings;
  if (!typed.config.empty()) {
    if (auto read = settings.read_file(typed.config); !read) {
      return tl::unexpected(std::move(read).error());
    }
  }
  if (auto applied = apply(typed, settings); !applied) {
    return tl::unexpected(std::move(applied).error());
  }
  if (auto resolved = settings.resolve(wants_out); !resolved) {
    return tl::unexpected(std::move(resolved).error());
  }
  print_notes(settings);
  return settings;
}

template <class AnyRecipe>
int train(const Typed& typed) {
  const auto settings = new_settings<AnyRecipe>(typed, true);
  return settings ? run_training(*settings, typed, false) : report(settings.error(), kUsageStatus);
}

template <class AnyRecipe>
int plan(const Typed& typed) {
  const auto settings = new_settings<AnyRecipe>(typed, false);
  return settings ? run_planning(*settings, typed) : report(settings.error(), kUsageStatus);
}

/// A run's own settings. Errors: as read_file().
template <class AnyRecipe>
Result<AnyRecipe> settings_of(const std::filesystem::path& root) {
  AnyRecipe settings;
  if (auto read = settings.read_file(root / "run.toml", true); !read) {
    return tl::unexpected(std::move(read).error());
  }
  const std::string source = settings.source_of("out");
  if (auto moved = settings.set("out", std::filesystem::absolute(root).string(), source); !moved) {
    return tl::unexpected(std::move(moved).error());
  }
  return settings;
}

template <class AnyRecipe>
int resume(const Typed& typed) {
  auto settings = settings_of<AnyRecipe>(typed.run);
  if (!settings) {
    return report(settings.error());
  }
  AnyRecipe typed_only;  // Names a wrong key or value as train does, before the run is touched.
  if (const auto applied = apply(typed, typed_only); !applied) {
    return report(applied.error(), kUsageStatus);
  }
  const auto pairs = pairs_of(typed);
  if (!pairs) {
    return report(pairs.error(), kUsageStatus);
  }
  std::vector<std::pair<std::string, std::string>> overrides;
  for (const auto* given : {&typed.flags, &*pairs}) {
    for (const auto& one : *given) {
      overrides.emplace_back(one.key, one.text);
    }
  }
  if (const auto changed = settings->override_with(overrides, "plimsoll resume"); !changed) {
    return report(changed.error(), kUsageStatus);
  }
  if (const auto resolved = settings->resolve(); !resolved) {
    return report(resolved.error());
  }
  print_notes(*settings);
  return run_training(*settings, typed, true);
}

template <class AnyRecipe>
int evaluate(const Typed& typed) {
  auto settings = settings_of<AnyRecipe>(typed.run);
  if (!settings) {
    return report(settings.error());
  }
  if (const auto resolved = settings->resolve(); !resolved) {
    return report(resolved.error());
  }
  return run_evaluation(*settings, typed);
}

/// Calls what belongs to the recipe of the run that was named.
int by_recipe(const Typed& typed, int (*cosir)(const Typed&), int (*can_kd)(const Typed&)) {
  const auto recipe = recipe_of_run(typed.run);
  if (!recipe) {
    return report(recipe.error());
  }
  return *recipe == "can-kd" ? can_kd(typed) : cosir(typed);
}

template <class AnyRecipe>
void add_recipe(CLI::App& train_command, int& status, const char* about, const char* examples) {
  const AnyRecipe defaults;
  auto* command = train_command.add_subcommand(defaults.options().recipe, about);
  auto typed = std::make_shared<Typed>();
  command->add_option("--config", typed->config, "File of options, .toml or .json")
      ->type_name("FILE");
  add_keys(*command, typed, defaults, [](const Field&) { return true; });
  add_output(*command, typed);
  command->footer(fmt::format(
      "\nLater sources win: defaults, --config, options, --set. A folder that is a run already is\n"
      "refused: `plimsoll resume RUN` goes on with it. Exit status 3: memory ended the run at a\n"
      "commit, and `plimsoll resume RUN` goes on.\nExamples:\n{}",
      examples));
  command->callback([typed, &status] { status = train<AnyRecipe>(*typed); });
}

void add_train(CLI::App& app, int& status) {
  auto* command = app.add_subcommand("train", "Train a recipe inside a memory limit");
  command->require_subcommand(1);
  add_recipe<CosirSettings>(
      *command, status, "One trainable condition vector per image-text pair, for retrieval",
      "  plimsoll train cosir --data data/ --out run/ --memory-limit 768MiB --epochs 1\n"
      "  plimsoll train cosir --config cosir.toml --set label_dim=128 --json");
  add_recipe<CanKdSettings>(
      *command, status, "Intrusion detection on CAN-bus graphs: a teacher, and a student of it",
      "  plimsoll train can-kd --data data/ --out run/ --memory-limit 1GiB --preset small\n"
      "  plimsoll resume run/ --stage fusion --json       the next stage of the same run\n"
      "  plimsoll train can-kd --config can_kd.json --preset gat,student --teacher-path teacher/");
  command->footer(
      "\nExamples:\n  plimsoll train cosir --data data/ --out run/ --memory-limit 768MiB\n"
      "  plimsoll train can-kd --data graphs/ --out run/ --memory-limit 1GiB --preset small");
}

template <class AnyRecipe>
void add_plan_of(CLI::App& command, int& status, const std::string& example) {
  const AnyRecipe defaults;
  const std::string recipe = defaults.options().recipe;
  auto* plan_of = command.add_subcommand(recipe, "Plan a run of `train " + recipe + "`");
  auto typed = std::make_shared<Typed>();
  plan_of->add_option("--config", typed->config, "File of options, .toml or .json")
      ->type_name("FILE");
  plan_of
      ->add_option("--device", typed->device,
                   "Device that the step must fit too: cpu, cuda, or simulated (as a CUDA device)")
      ->type_name("NAME")
      ->capture_default_str();
  plan_of
      ->add_option("--device-memory-limit", typed->device_memory_limit,
                   "Memory limit of the device's allocator: 8GiB; for cuda: what is free")
      ->type_name("SIZE");
  add_keys(*plan_of, typed, defaults,
           [](const Field& field) { return std::string_view(field.name) != "batch_size"; });
  plan_of->add_flag("--json", typed->json, "Result as one line of JSON instead of a table");
  plan_of->add_flag(
      "--choices", typed->choices,
      recipe == recipe_options<CanKdConfig>().recipe
          ? "Choices that move memory are planned and timed too: checkpointing, precision, "
            "where the teacher is"
          : "Choices that move memory are planned and timed too: gradient caching");
  if (recipe == recipe_options<CanKdConfig>().recipe) {
    plan_of
        ->add_option(
            "--effective-batch", typed->effective_batch,
            "Number of graphs of an optimizer step in every choice; needs --choices. Choices "
            "that do not fit it at once use micro-batches")
        ->type_name("GRAPHS")
        ->check(CLI::PositiveNumber)
        ->needs("--choices");
  }
  plan_of->footer(
      "\nTraces small steps on real batches, replays them at larger sizes, and runs the answer "
      "once.\n"
      "`train " +
      recipe + " --batch-size auto` does the same and trains with it. Example:\n  " + example);
  plan_of->callback([typed, &status] { status = plan<AnyRecipe>(*typed); });
}

void add_plan(CLI::App& app, int& status) {
  auto* command =
      app.add_subcommand("plan", "Say what a run needs, and the largest batch its limit admits");
  command->require_subcommand(1);
  add_plan_of<CosirSettings>(
      *command, status, "plimsoll plan cosir --data data/ --memory-limit 768MiB --label-dim 128");
  add_plan_of<CanKdSettings>(
      *command, status, "plimsoll plan can-kd --data data/ --memory-limit 1GiB --stage curriculum");
  command->footer("\nExample:\n  plimsoll plan cosir --data data/ --memory-limit 768MiB");
}

/// Options of every recipe that a resumption may change; which recipe it is, the run says later.
void add_resumption_keys(CLI::App& command, const std::shared_ptr<Typed>& typed) {
  const CosirSettings cosir;
  const CanKdSettings can_kd;
  const auto add = [&](const AnySettings& defaults, const char* group) {
    for (const Field& field : defaults.options().fields) {
      const std::string key = field.name;
      // A wish for more epochs is answered with the reason why not.
      const bool answered = key == "epochs" || key == "phase2_epochs" || key == "max_epochs";
      // Looked up, since a key may be of one recipe's identity and free in the other.
      const bool is_added = command.get_option_no_throw(flag_of(key)) != nullptr;
      if ((field.role != FieldRole::kIdentity || answered) && key != "out" && !is_added) {
        add_key(command, typed, key, help_of(field, defaults.literal(key)), answered ? "" : group);
      }
    }
  };
  add(cosir, kWhere);
  add(can_kd, "Only of can-kd");
  add_set(command, typed);
}

void add_resume_and_eval(CLI::App& app, int& status) {
  auto* resume_command = app.add_subcommand("resume", "Go on with a run from its last checkpoint");
  auto resumed = std::make_shared<Typed>();
  resume_command->add_option("RUN", resumed->run, "Folder of the run")->required();
  add_resumption_keys(*resume_command, resumed);
  add_output(*resume_command, resumed);
  resume_command->add_flag("--accept-other-processor", resumed->accept_other_processor,
                           "Go on although processor or kernels differ: the bits will too");
  resume_command->footer(
      "\nThe result has the same bits as the run nobody stopped. A run that was killed before its\n"
      "first checkpoint begins again. Exit status 3: memory ended the run at a commit; resume it\n"
      "with the limit that it names. Example:\n"
      "  plimsoll resume run/ --memory-limit 2GiB");
  resume_command->callback([resumed, &status] {
    status = by_recipe(*resumed, resume<CosirSettings>, resume<CanKdSettings>);
  });

  auto* eval_command =
      app.add_subcommand("eval", "Evaluate a run's last checkpoint on its held-out data");
  auto evaluated = std::make_shared<Typed>();
  eval_command->add_option("RUN", evaluated->run, "Folder of the run")->required();
  eval_command->add_flag("--json", evaluated->json, "Result as one line of JSON instead of tables");
  eval_command->footer("\nExample:\n  plimsoll eval run/ --json");
  eval_command->callback([evaluated, &status] {
    status = by_recipe(*evaluated, evaluate<CosirSettings>, evaluate<CanKdSettings>);
  });
}

}  // namespace

void add_train_commands(CLI::App& app, int& status) {
  add_train(app, status);
  add_plan(app, status);
  add_resume_and_eval(app, status);
}

}  // namespace plimsoll
