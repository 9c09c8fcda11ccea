// SPDX-License-Identifier: Apache-2.0
//
// train, resume, eval. Every key of the recipe is an option: batch_size is --batch-size.
#include <fmt/format.h>

#include <CLI/CLI.hpp>
#include <filesystem>
#include <map>
#include <memory>

#include "cli/commands.h"
#include "recipes/config.h"
#include "recipes/run_folder.h"
#include "recipes/summary.h"
#ifdef PLIMSOLL_HAVE_TORCH
#include "recipes/cosir.h"
#include "recipes/cosir_plan.h"
#endif

namespace plimsoll {
namespace {

/// What the user typed for train, resume or eval.
struct Typed {
  std::string config{};
  std::string run{};
  std::vector<std::pair<std::string, std::string>> flags{};  // Key and text, in order.
  std::vector<std::string> pairs{};                          // --set key=value
  bool json{false};
  bool quiet{false};
};

std::string flag_of(const Field& field) {
  std::string flag = fmt::format("--{}", field.name);
  for (char& c : flag) {
    c = c == '_' ? '-' : c;
  }
  return flag;
}

/// Adds an option per field; `wanted` chooses which.
void add_fields(CLI::App& command, const std::shared_ptr<Typed>& typed,
                bool (*wanted)(const Field&)) {
  const CosirConfig defaults;
  for (const Field& field : cosir_fields()) {
    if (!wanted(field)) {
      continue;
    }
    const std::string name = field.name;
    std::string help = field.help;
    if (*field.choices != '\0') {
      help += fmt::format(": {}", field.choices);
    }
    if (const auto preset = field.print(defaults); preset != "\"\"") {
      help += fmt::format(" [{}]", preset);
    }
    command
        .add_option_function<std::string>(
            flag_of(field),
            [typed, name](const std::string& text) { typed->flags.emplace_back(name, text); }, help)
        ->type_name("")
        ->take_last()
        ->group(field.role == FieldRole::kIdentity ? "What is trained (decides the bits)"
                                                   : "Where and how it runs");
  }
  command.add_option("--set", typed->pairs, "Any key as key=value; may be repeated")
      ->type_name("KEY=VALUE")
      ->expected(1)
      ->take_all();
}

void add_output(CLI::App& command, const std::shared_ptr<Typed>& typed) {
  command.add_flag("--json", typed->json, "End standard output with one line of JSON");
  command.add_flag("--quiet", typed->quiet, "No progress");
}

/// Flags, then --set, on top of what `settings` holds.
Result<void> apply(const Typed& typed, CosirSettings& settings) {
  for (const auto& [key, text] : typed.flags) {
    std::string flag = "--" + key;
    for (char& c : flag) {
      c = c == '_' ? '-' : c;
    }
    if (auto set = settings.set(key, text, flag); !set) {
      return set;
    }
  }
  for (const auto& pair : typed.pairs) {
    if (auto set = settings.set_pair(pair, "--set"); !set) {
      return set;
    }
  }
  return {};
}

#ifdef PLIMSOLL_HAVE_TORCH
int run_training(const CosirSettings& settings, const Typed& typed, bool resume) {
  const TrainOptions options{.resume = resume, .progress = {.quiet = typed.quiet}};
  const auto summary = train_cosir(settings, options);
  if (!summary) {
    return report(summary.error());
  }
  print(typed.json ? summary->to_json() : summary->to_text());
  return 0;
}

int run_evaluation(const CosirSettings& settings, const Typed& /*typed*/) {
  const auto recall = eval_cosir(settings);
  if (!recall) {
    return report(recall.error());
  }
  print(*recall);
  return 0;
}
int run_planning(const CosirSettings& settings, const Typed& typed) {
  const auto plan = plan_cosir(settings);
  if (!plan) {
    return report(plan.error());
  }
  print(typed.json ? plan->to_json() : plan->to_text());
  return 0;
}
#else
int without_torch() {
  return report(make_error(ErrorCode::kNotFound, "this program was built without LibTorch",
                           "install torch into .venv (tools/setup.sh does) and build again with "
                           "-DPLIMSOLL_WITH_TORCH=ON"));
}
int run_training(const CosirSettings& /*settings*/, const Typed& /*typed*/, bool /*resume*/) {
  return without_torch();
}
int run_evaluation(const CosirSettings& /*settings*/, const Typed& /*typed*/) {
  return without_torch();
}
int run_planning(const CosirSettings& /*settings*/, const Typed& /*typed*/) {
  return without_torch();
}
#endif

/// The settings of a new run. Errors: what was typed wrong.
Result<CosirSettings> new_settings(const Typed& typed, bool wants_out) {
  CosirSettings settings;
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
  return settings;
}

int train(const Typed& typed) {
  const auto settings = new_settings(typed, true);
  return settings ? run_training(*settings, typed, false) : report(settings.error(), kUsageStatus);
}

int plan(const Typed& typed) {
  const auto settings = new_settings(typed, false);
  return settings ? run_planning(*settings, typed) : report(settings.error(), kUsageStatus);
}

/// A run's own settings. Errors: as read_file(); kNotFound when there is no run.
Result<CosirSettings> settings_of(const std::string& run) {
  const std::filesystem::path root = run;
  if (!RunFolder::is_run(root)) {
    return fail(ErrorCode::kNotFound, fmt::format("{}: no run there (no run.toml)", run),
                "`plimsoll train` makes one");
  }
  CosirSettings settings;
  if (auto read = settings.read_file(root / "run.toml", true); !read) {
    return tl::unexpected(std::move(read).error());
  }
  const std::string source = settings.source_of("out");
  if (auto moved = settings.set("out", std::filesystem::absolute(root).string(), source); !moved) {
    return tl::unexpected(std::move(moved).error());
  }
  return settings;
}

int resume(const Typed& typed) {
  auto settings = settings_of(typed.run);
  if (!settings) {
    return report(settings.error());
  }
  CosirSettings typed_only;  // Names a wrong key or value as train does, before the run is touched.
  if (const auto applied = apply(typed, typed_only); !applied) {
    return report(applied.error(), kUsageStatus);
  }
  auto overrides = typed.flags;
  for (const auto& pair : typed.pairs) {
    const auto equals = pair.find('=');
    overrides.emplace_back(pair.substr(0, equals), pair.substr(equals + 1));
  }
  if (const auto changed = settings->override_with(overrides, "plimsoll resume"); !changed) {
    return report(changed.error(), kUsageStatus);
  }
  if (const auto resolved = settings->resolve(); !resolved) {
    return report(resolved.error());
  }
  return run_training(*settings, typed, true);
}

int evaluate(const Typed& typed) {
  auto settings = settings_of(typed.run);
  if (!settings) {
    return report(settings.error());
  }
  if (const auto resolved = settings->resolve(); !resolved) {
    return report(resolved.error());
  }
  return run_evaluation(*settings, typed);
}

int not_there_yet(const std::string& recipe) {
  return report(make_error(ErrorCode::kInvalidArgument,
                           fmt::format("the recipe '{}' is not there yet", recipe),
                           "`plimsoll train cosir` is"),
                kUsageStatus);
}

}  // namespace

void add_train_commands(CLI::App& app, int& status) {
  auto* train_command = app.add_subcommand("train", "Train a recipe inside a memory limit");
  train_command->require_subcommand(1);
  auto* cosir = train_command->add_subcommand(
      "cosir", "One trainable condition vector per image-text pair, for retrieval");
  auto typed = std::make_shared<Typed>();
  cosir->add_option("--config", typed->config, "Options from FILE.toml or FILE.json")
      ->type_name("FILE");
  add_fields(*cosir, typed, [](const Field&) { return true; });
  add_output(*cosir, typed);
  cosir->footer(
      "\nLater sources win: defaults, --config, options, --set.\nExamples:\n"
      "  plimsoll train cosir --data data/ --out run/ --memory-limit 768MiB --epochs 1\n"
      "  plimsoll train cosir --config cosir.toml --set label_dim=128 --json");
  cosir->callback([typed, &status] { status = train(*typed); });
  for (const char* name : {"can-kd", "chat", "vision"}) {
    auto* later = train_command->add_subcommand(name, "Not there yet");
    later->allow_extras();
    later->callback([name, &status] { status = not_there_yet(name); });
  }

  auto* plan_command =
      app.add_subcommand("plan", "Say what a run needs, and the largest batch its limit admits");
  plan_command->require_subcommand(1);
  auto* plan_of = plan_command->add_subcommand("cosir", "Plan a run of `train cosir`");
  auto planned = std::make_shared<Typed>();
  plan_of->add_option("--config", planned->config, "Options from FILE.toml or FILE.json")
      ->type_name("FILE");
  add_fields(*plan_of, planned,
             [](const Field& field) { return std::string_view(field.name) != "batch_size"; });
  plan_of->add_flag("--json", planned->json, "One line of JSON instead of the table");
  plan_of->footer(
      "\nTraces small steps on real batches, replays them at larger sizes, and runs the answer "
      "once.\n"
      "`train cosir --batch-size auto` does the same and trains with it. Example:\n"
      "  plimsoll plan cosir --data data/ --memory-limit 768MiB --label-dim 128");
  plan_of->callback([planned, &status] { status = plan(*planned); });

  auto* resume_command = app.add_subcommand("resume", "Go on with a run from its last checkpoint");
  auto resumed = std::make_shared<Typed>();
  resume_command->add_option("RUN", resumed->run, "The run folder")->required();
  add_fields(*resume_command, resumed, [](const Field& field) {
    return field.role != FieldRole::kIdentity && std::string_view(field.name) != "out";
  });
  add_output(*resume_command, resumed);
  resume_command->footer(
      "\nThe result has the same bits as the run nobody stopped. Example:\n"
      "  plimsoll resume run/ --memory-limit 2GiB");
  resume_command->callback([resumed, &status] { status = resume(*resumed); });

  auto* eval_command =
      app.add_subcommand("eval", "Evaluate a run's last checkpoint on its held-out pairs");
  auto evaluated = std::make_shared<Typed>();
  eval_command->add_option("RUN", evaluated->run, "The run folder")->required();
  eval_command->add_flag("--json", evaluated->json, "One line of JSON (also the default form)");
  eval_command->footer("\nExample:\n  plimsoll eval run/ --json");
  eval_command->callback([evaluated, &status] { status = evaluate(*evaluated); });
}

}  // namespace plimsoll
