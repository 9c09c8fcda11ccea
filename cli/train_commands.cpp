// SPDX-License-Identifier: Apache-2.0
//
// train, plan, resume, eval, export. Every key of a recipe is an option: batch_size is
// --batch-size. Which recipe resume, eval and export go on with is written in the run.
#include <fmt/format.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <filesystem>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "cli/commands.h"
#include "run/recipe.h"

namespace plimsoll {
namespace {

/// What the user typed for train, plan, resume or eval.
struct TypedRun {
  std::string config{};
  std::string run{};
  std::vector<GivenKey> flags{};     // In order.
  std::vector<std::string> pairs{};  // --set key=value
  bool json{false};
  bool quiet{false};
  bool accept_other_processor{false};  // Of resume.
  PlanQuestion question{};             // Of plan.
  ExportQuestion wanted{};             // Of export.
};

constexpr const char* kBits = "What is trained (decides the bits)";
constexpr const char* kWhere = "Where and how it runs";

std::string flag_of(std::string_view key) {
  std::string flag = fmt::format("--{}", key);
  std::replace(flag.begin(), flag.end(), '_', '-');
  return flag;
}

/// Adds --some-key TEXT for some_key; "" as the group hides it from --help.
void add_key(CLI::App& command, const std::shared_ptr<TypedRun>& typed, const std::string& key,
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

void add_set(CLI::App& command, const std::shared_ptr<TypedRun>& typed) {
  command
      .add_option("--set", typed->pairs, "Option of any name, as batch_size=512; may be repeated")
      ->type_name("KEY=VALUE")
      ->expected(1)
      ->take_all();
}

/// Adds an option per key of a recipe, of the fields those that are `wanted`.
void add_keys(CLI::App& command, const std::shared_ptr<TypedRun>& typed,
              const AnySettings& defaults, bool (*wanted)(const Field&)) {
  const RecipeOptions& options = defaults.options();
  for (const Field& field : options.fields) {
    if (wanted(field)) {
      add_key(command, typed, field.name, help_of(field, defaults.literal(field.name)),
              field.role == FieldRole::kIdentity ? kBits : kWhere);
    }
  }
  add_set(command, typed);
}

void add_output(CLI::App& command, const std::shared_ptr<TypedRun>& typed) {
  command.add_flag("--json", typed->json, "Last line of standard output: the summary as JSON");
  command.add_flag("--quiet", typed->quiet, "Progress is not shown");
}

/// The keys of --set. Errors: what is not of the form key=value.
Result<std::vector<GivenKey>> pairs_of(const TypedRun& typed) {
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

int report_work(const Result<RecipeReport>& done, const TypedRun& typed) {
  if (!done) {
    return report(done.error());
  }
  if (!done->text.empty()) {  // Another rank's is empty: the first one tells.
    print(typed.json ? done->json : done->text);
  }
  return done->ended_by_memory ? kMemoryStatus : 0;
}

/// The settings of a new run. Errors: what was typed wrong.
Result<std::unique_ptr<AnySettings>> typed_settings(const Recipe& recipe, const TypedRun& typed,
                                                    bool wants_out) {
  auto pairs = pairs_of(typed);
  if (!pairs) {
    return tl::unexpected(std::move(pairs).error());
  }
  return new_settings(recipe, typed.config, std::vector{typed.flags, *pairs}, wants_out);
}

int train(const Recipe& recipe, const TypedRun& typed) {
  const auto settings = typed_settings(recipe, typed, true);
  if (!settings) {
    return report(settings.error(), kUsageStatus);
  }
  if (!recipe.train) {
    return report(work_missing(recipe, "train"));
  }
  return report_work(recipe.train(**settings, {.progress = {.quiet = typed.quiet}}), typed);
}

int plan(const Recipe& recipe, const TypedRun& typed) {
  const auto settings = typed_settings(recipe, typed, false);
  if (!settings) {
    return report(settings.error(), kUsageStatus);
  }
  if (const auto known = check_device(typed.question.device); !known) {
    return report(known.error(), kUsageStatus);
  }
  if (!recipe.plan) {
    return report(work_missing(recipe, "plan"));
  }
  return report_work(recipe.plan(**settings, typed.question), typed);
}

int resume(const Recipe& recipe, const TypedRun& typed) {
  const auto settings = settings_of_run(recipe, typed.run);
  if (!settings) {
    return report(settings.error());
  }
  const auto pairs = pairs_of(typed);
  if (!pairs) {
    return report(pairs.error(), kUsageStatus);
  }
  // Names a wrong key or value as train does, before the run is touched.
  const auto typed_only = recipe.settings();
  std::vector<std::pair<std::string, std::string>> overrides;
  for (const auto* given : {&typed.flags, &*pairs}) {
    if (const auto known = typed_only->set_all(*given); !known) {
      return report(known.error(), kUsageStatus);
    }
    for (const auto& one : *given) {
      overrides.emplace_back(one.key, one.text);
    }
  }
  if (const auto changed = (*settings)->override_with(overrides, "plimsoll resume"); !changed) {
    return report(changed.error(), kUsageStatus);
  }
  if (const auto resolved = (*settings)->resolve(); !resolved) {
    return report(resolved.error());
  }
  if (!recipe.train) {
    return report(work_missing(recipe, "train"));
  }
  const TrainOptions how{.resume = true,
                         .accept_other_processor = typed.accept_other_processor,
                         .progress = {.quiet = typed.quiet}};
  return report_work(recipe.train(**settings, how), typed);
}

Result<std::unique_ptr<AnySettings>> resolved_settings(const Recipe& recipe,
                                                       const std::filesystem::path& run) {
  auto settings = settings_of_run(recipe, run);
  if (settings) {
    if (auto resolved = (*settings)->resolve(); !resolved) {
      return tl::unexpected(std::move(resolved).error());
    }
  }
  return settings;
}

int evaluate(const Recipe& recipe, const TypedRun& typed) {
  const auto settings = resolved_settings(recipe, typed.run);
  if (!settings) {
    return report(settings.error());
  }
  if (!recipe.evaluate) {
    return report(work_missing(recipe, "evaluation"));
  }
  return report_work(recipe.evaluate(**settings), typed);
}

int export_run(const Recipe& recipe, const TypedRun& typed) {
  const auto settings = resolved_settings(recipe, typed.run);
  if (!settings) {
    return report(settings.error());
  }
  if (!recipe.export_model) {
    return report(work_missing(recipe, "export"));
  }
  return report_work(recipe.export_model(**settings, typed.wanted), typed);
}

/// Calls `work` with the recipe of the run that was named.
int by_recipe(const TypedRun& typed, int (*work)(const Recipe&, const TypedRun&)) {
  const auto recipe = recipe_of_run(typed.run);
  return recipe ? work(**recipe, typed) : report(recipe.error());
}

void add_train_of(CLI::App& train_command, int& status, const Recipe& recipe) {
  auto* command = train_command.add_subcommand(recipe.name, recipe.about);
  auto typed = std::make_shared<TypedRun>();
  add_config(*command, typed->config, recipe);
  add_keys(*command, typed, *recipe.settings(), [](const Field&) { return true; });
  add_output(*command, typed);
  command->footer(fmt::format(
      "\nLater sources win: defaults, --config, options, --set. A folder that is a run already is\n"
      "refused: `plimsoll resume RUN` goes on with it. Exit status 3: memory ended the run at a\n"
      "commit, and `plimsoll resume RUN` goes on.\nExamples:\n{}",
      recipe.train_examples));
  command->callback([typed, &status, &recipe] { status = train(recipe, *typed); });
}

void add_train(CLI::App& app, int& status) {
  auto* command = app.add_subcommand("train", "Train a recipe inside a memory limit");
  command->require_subcommand(1);
  std::string examples;
  for (const Recipe& recipe : recipes()) {
    add_train_of(*command, status, recipe);
    examples += "\n" + recipe.train_examples.substr(0, recipe.train_examples.find('\n'));
  }
  command->footer(
      "\nA recipe of your own is a Python file in place of a name.\nExamples:" + examples +
      "\n  plimsoll train ./mine.py --data data/ --out run/ --memory-limit 2GiB");
}

void add_plan_of(CLI::App& command, int& status, const Recipe& recipe) {
  auto* plan_of = command.add_subcommand(recipe.name, "Plan a run of `train " + recipe.name + "`");
  auto typed = std::make_shared<TypedRun>();
  add_config(*plan_of, typed->config, recipe);
  plan_of
      ->add_option("--device", typed->question.device.device,
                   "Device that the step must fit too: cpu, cuda, or simulated (as a CUDA device)")
      ->type_name("NAME")
      ->capture_default_str();
  plan_of
      ->add_option("--device-memory-limit", typed->question.device.memory_limit,
                   "Memory limit of the device's allocator: 8GiB; for cuda: what is free")
      ->type_name("SIZE");
  add_keys(*plan_of, typed, *recipe.settings(), [](const Field& field) {
    const std::string_view name(field.name);  // Of a device plan has its own.
    return name != "batch_size" && !name.starts_with("device");
  });
  plan_of->add_flag("--json", typed->json, "Result as one line of JSON instead of a table");
  if (!recipe.choices.empty()) {
    plan_of->add_flag("--choices", typed->question.choices,
                      "Choices that move memory are planned and timed too: " + recipe.choices);
  }
  if (recipe.effective_batch) {
    plan_of
        ->add_option("--effective-batch", typed->question.effective_batch,
                     fmt::format("Number of {} of an optimizer step in every choice; needs "
                                 "--choices. Choices that do not fit it at once use micro-batches",
                                 recipe.unit))
        ->type_name("NUMBER")
        ->check(CLI::Range(std::int64_t{1}, kNumberMost))
        ->needs("--choices");
  }
  plan_of->footer(
      "\nTraces small steps on real batches, replays them at larger sizes, and runs the answer "
      "once.\n"
      "`train " +
      recipe.name + " --batch-size auto` does the same and trains with it. Example:\n  " +
      recipe.plan_example);
  plan_of->callback([typed, &status, &recipe] { status = plan(recipe, *typed); });
}

void add_plan(CLI::App& app, int& status) {
  auto* command =
      app.add_subcommand("plan", "Say what a run needs, and the largest batch its limit admits");
  command->require_subcommand(1);
  std::string examples;
  for (const Recipe& recipe : recipes()) {
    if (!recipe.plan_example.empty()) {
      add_plan_of(*command, status, recipe);
      examples += "\n  " + recipe.plan_example;
    }
  }
  command->footer("\nExamples:" + examples);
}

/// Options that a resumption may change: of every recipe, as the run says later which it is of.
void add_resumption_keys(CLI::App& command, const std::shared_ptr<TypedRun>& typed) {
  for (const Recipe& recipe : recipes()) {
    const auto defaults = recipe.settings();
    for (const Field& field : defaults->options().fields) {
      const std::string key = field.name;
      // A wish for more epochs is answered with the reason why not.
      const bool answered = key == "epochs" || key == "phase2_epochs" || key == "max_epochs";
      // Looked up, since a key may be of one recipe's identity and free in another.
      const bool is_added = command.get_option_no_throw(flag_of(key)) != nullptr;
      if ((field.role != FieldRole::kIdentity || answered) && key != "out" && !is_added) {
        const bool first = &recipe == recipes().data();
        add_key(command, typed, key, help_of(field, defaults->literal(key)),
                answered ? ""
                : first  ? kWhere
                         : "Only of " + recipe.name);
      }
    }
  }
  add_set(command, typed);
}

void add_resume_and_eval(CLI::App& app, int& status) {
  auto* resume_command = app.add_subcommand("resume", "Go on with a run from its last checkpoint");
  auto resumed = std::make_shared<TypedRun>();
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
  resume_command->callback([resumed, &status] { status = by_recipe(*resumed, resume); });

  auto* eval_command =
      app.add_subcommand("eval", "Evaluate a run's last checkpoint on its held-out data");
  auto evaluated = std::make_shared<TypedRun>();
  eval_command->add_option("RUN", evaluated->run, "Folder of the run")->required();
  eval_command->add_flag("--json", evaluated->json, "Result as one line of JSON instead of tables");
  eval_command->footer("\nExample:\n  plimsoll eval run/ --json");
  eval_command->callback([evaluated, &status] { status = by_recipe(*evaluated, evaluate); });
}

void add_export(CLI::App& app, int& status) {
  auto* command = app.add_subcommand("export", "Write a run's model for other programs");
  auto typed = std::make_shared<TypedRun>();
  command->add_option("RUN", typed->run, "Folder of the run")->required();
  command->add_option("--out", typed->wanted.out, "Folder to make")->required()->type_name("DIR");
  command->add_flag("--merge", typed->wanted.merge,
                    "Adapters become part of the model's weights; else they are written alone");
  command->add_flag("--json", typed->json, "Result as one line of JSON instead of text");
  command->footer("\nExample:\n  plimsoll export run/ --merge --out tuned/");
  command->callback([typed, &status] { status = by_recipe(*typed, export_run); });
}

}  // namespace

void add_config(CLI::App& command, std::string& config, const Recipe& recipe) {
  std::string presets;
  for (const Preset& preset : recipe.settings()->options().presets) {
    presets += fmt::format("{}{}", presets.empty() ? "; or a preset: " : ", ", preset.name);
  }
  command.add_option("--config", config, "File of options, .toml or .json" + presets)
      ->type_name("FILE");
}

void add_train_commands(CLI::App& app, int& status) {
  add_train(app, status);
  add_plan(app, status);
  add_resume_and_eval(app, status);
  add_export(app, status);
}

}  // namespace plimsoll
