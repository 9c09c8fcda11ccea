// SPDX-License-Identifier: Apache-2.0
//
// plimsoll._core: recipes, which are written in Python, in the list of run/recipe.h; and what
// plimsoll.train(), plan(), resume(), evaluate() and export() call.
//
// Flags, files, help and run.toml are made of a recipe's fields.
// python/plimsoll/recipes/__init__.py is what a recipe's author sees. Reading order: run/recipe.h,
// run/field_table.h, this file.
//
// Threads: a recipe's functions are called with Python's lock.
// Memory:  what is added stays until the process ends, at most kRecipesMax recipes by name.
#include <cstdint>
#include <map>
#include <memory>
#include <span>
#include <string>
#include <utility>
#include <variant>
#include <vector>

#include <nanobind/stl/map.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/variant.h>
#include <nanobind/stl/vector.h>

#include "bindings.h"
#include "over_budget.h"
#include "run/control.h"
#include "run/field_table.h"
#include "run/recipe.h"

namespace plimsoll::python {
namespace {

using Pairs = std::vector<std::pair<std::string, std::string>>;
using Value = std::variant<bool, std::int64_t, double, std::string>;

struct PythonConfig : RunConfig {
  std::map<std::string, Value, std::less<>> own{};
};

/// A field as Python describes it.
struct PythonField {
  std::string name{};
  std::string kind{};  // As FieldKind has them: kind_of().
  bool identity{true};
  Value preset{};
  std::string help{};
  double least{0};
  double most{0};
  std::string choices{};
};

/// Everything that the fields of one recipe point at. Never destroyed.
struct PythonOptions {
  std::string name{};
  std::string data_help{};
  std::string data_advice{};
  std::string keys_advice{};
  std::string data_or{};
  bool threads_decide_bits{true};
  std::map<std::string, std::int64_t>
      common{};  // Defaults of its own of options that every run has.
  std::map<std::string, std::string> preset_texts{};
  std::vector<PythonField> own{};
  std::vector<Field> fields{};
  std::vector<Preset> presets{};
  RecipeOptions options{};
};

FieldValue value_in(void* config, const Field& self) {
  return std::visit([](auto& value) -> FieldValue { return &value; },
                    static_cast<PythonConfig*>(config)->own.find(self.name)->second);
}

class PythonSettings final : public AnySettings {
 public:
  explicit PythonSettings(const PythonOptions& known) : AnySettings(known.options) {
    for (const auto& [name, value] : known.common) {
      member_of(name) = value;
    }
    for (const PythonField& field : known.own) {
      config_.own.emplace(field.name, field.preset);
    }
  }
  [[nodiscard]] const PythonConfig& config() const { return config_; }

 private:
  std::int64_t& member_of(const std::string& name) {
    if (name == "seed") {
      return config_.seed;
    }
    if (name == "checkpoint_every_n_steps") {
      return config_.checkpoint_every_n_steps;
    }
    if (name == "foreign_bytes") {
      return config_.foreign_bytes;
    }
    throw Exception(make_error(ErrorCode::kInvalidArgument,
                               name + ": a recipe has no default of its own of this option"));
  }

  [[nodiscard]] void* place() noexcept override { return &config_; }
  [[nodiscard]] std::unique_ptr<AnySettings> copy() const override {
    return std::make_unique<PythonSettings>(*this);
  }
  void become(const AnySettings& other) override {
    *this = static_cast<const PythonSettings&>(other);
  }

  PythonConfig config_{};
};

FieldKind kind_of(const PythonField& field) {
  const std::map<std::string, FieldKind, std::less<>> kinds{
      {"text", FieldKind::kText},       {"path", FieldKind::kText}, {"size", FieldKind::kBytes},
      {"integer", FieldKind::kInteger}, {"real", FieldKind::kReal}, {"switch", FieldKind::kSwitch},
      {"choice", FieldKind::kChoice},   {"auto", FieldKind::kAuto}, {"widths", FieldKind::kWidths}};
  const auto at = kinds.find(field.kind);
  if (at == kinds.end()) {
    throw Exception(make_error(ErrorCode::kInvalidArgument,
                               field.name + ": '" + field.kind + "' is no kind of option"));
  }
  return at->second;
}

/// Completes the table of fields: those that every run has, then the recipe's own.
const PythonOptions* furnished(std::unique_ptr<PythonOptions> known) {
  using F = FieldTable<PythonConfig>;
  known->fields = {F::data(known->data_help.c_str()),
                   F::out(),
                   F::memory_limit(),
                   F::disk_limit(),
                   F::seed(),
                   F::checkpoint_every_n_steps(),
                   F::keep_checkpoints(),
                   F::foreign_bytes(),
                   known->threads_decide_bits
                       ? F::compute_threads(FieldRole::kIdentity,
                                            "Number of threads that compute, part of the result's "
                                            "bits; 0: one per core")
                       : F::compute_threads(FieldRole::kFree,
                                            "Number of threads that compute; 0: one per core. The "
                                            "result's bits do not depend on it"),
                   F::tensorboard()};
  for (const PythonField& field : known->own) {
    const FieldRole role = field.kind == "path" ? FieldRole::kPlace
                           : field.identity     ? FieldRole::kIdentity
                                                : FieldRole::kFree;
    known->fields.push_back({field.name.c_str(), kind_of(field), role, value_in, field.help.c_str(),
                             field.least, field.most, field.choices.c_str()});
  }
  for (const auto& [name, toml] : known->preset_texts) {
    known->presets.push_back({name.c_str(), toml.c_str()});
  }
  known->options = {.recipe = known->name.c_str(),
                    .fields = known->fields,
                    .data_advice = known->data_advice.c_str(),
                    .keys_advice = known->keys_advice.c_str(),
                    .presets = known->presets,
                    .data_or = known->data_or.c_str()};
  return known.release();
}

nb::dict values_of(const AnySettings& settings) {
  const PythonConfig& config = static_cast<const PythonSettings&>(settings).config();
  nb::dict values;
  values["data"] = config.data;
  values["out"] = config.out;
  values["memory_limit"] = config.memory_limit;
  values["disk_limit"] = config.disk_limit;
  values["seed"] = config.seed;
  values["checkpoint_every_n_steps"] = config.checkpoint_every_n_steps;
  values["keep_checkpoints"] = config.keep_checkpoints;
  values["tensorboard"] = config.tensorboard;
  values["foreign_bytes"] = config.foreign_bytes;
  values["compute_threads"] = config.compute_threads;
  for (const auto& [name, value] : config.own) {
    values[name.c_str()] = value;
  }
  return values;
}

/// A BudgetExceeded with all its figures; its text has the advice.
Error over_budget(const nb::handle raised, const std::string& text) {
  Error error = make_error(ErrorCode::kOverBudget, text);
  const auto tag = nb::cast<std::string>(raised.attr("tag"));
  const auto held = nb::cast<std::map<std::string, std::int64_t>>(raised.attr("held_bytes"));
  for (int i = 0; i < kTagCount; ++i) {
    const std::string name = tag_name(static_cast<Tag>(i));
    error.tag = name == tag ? static_cast<Tag>(i) : error.tag;
    const auto found = held.find(name);
    error.held_bytes[static_cast<std::size_t>(i)] = found == held.end() ? 0 : found->second;
  }
  error.requested_bytes = nb::cast<std::int64_t>(raised.attr("requested_bytes"));
  error.available_bytes = nb::cast<std::int64_t>(raised.attr("available_bytes"));
  error.limit_bytes = nb::cast<std::int64_t>(raised.attr("limit_bytes"));
  error.smallest_limit_bytes = nb::cast<std::int64_t>(raised.attr("smallest_limit_bytes"));
  keep_over_budget(error, {tag, held, nb::cast<std::string>(raised.attr("advice"))});
  return error;
}

/// What a recipe raised in its function `name`, if it is an expected failure; otherwise it goes on
/// as it is.
Error error_of(nb::python_error& raised, const char* name) {
  const nb::object errors = nb::module_::import_("plimsoll.errors");
  const std::string text = nb::cast<std::string>(nb::str(raised.value()));
  const auto is = [&](const char* type) { return raised.matches(errors.attr(type)); };
  if (is("BudgetExceeded")) {
    return over_budget(raised.value(), text);
  }
  if (is("NotFoundError")) {
    return make_error(ErrorCode::kNotFound, nb::cast<std::string>(raised.value().attr("args")[0]));
  }
  if (is("CorruptError")) {
    return make_error(ErrorCode::kCorrupt, text);
  }
  if (raised.matches(PyExc_KeyboardInterrupt)) {
    return given_up(name).value();
  }
  if (raised.matches(PyExc_ValueError) || raised.matches(PyExc_ImportError)) {
    return make_error(ErrorCode::kInvalidArgument, text);
  }
  if (raised.matches(PyExc_OSError)) {
    return make_error(ErrorCode::kIo, text);
  }
  if (nb::cast<std::string>(raised.type().attr("__name__")) == "OutOfMemoryError") {  // torch's.
    return make_error(ErrorCode::kOverBudget, text);
  }
  throw;  // A fault of the recipe's: its traceback is what helps.
}

/// Calls `work.NAME(settings, more…)`, which gives (json, text, ended by memory).
template <class... More>
Result<RecipeReport> call(nb::handle work, const char* name, const AnySettings& settings,
                          More&&... more) {
  const nb::gil_scoped_acquire locked;
  try {
    auto [json, text, ended] = nb::cast<std::tuple<std::string, std::string, bool>>(
        work.attr(name)(values_of(settings), std::forward<More>(more)...));
    return RecipeReport{std::move(json), std::move(text), ended};
  } catch (nb::python_error& raised) {
    return tl::unexpected(error_of(raised, name));
  }
}

void add(const std::string& name, const std::string& about, const std::string& unit,
         const std::string& examples, const std::string& data_help, const std::string& data_advice,
         const std::string& keys_advice, const std::string& data_or,
         const std::string& plan_example, const std::string& choices, bool effective_batch,
         std::map<std::string, std::string> presets, bool threads_decide,
         std::map<std::string, std::int64_t> common, std::vector<PythonField> own,
         nb::object work) {
  const PythonOptions* known =
      furnished(std::make_unique<PythonOptions>(PythonOptions{.name = name,
                                                              .data_help = data_help,
                                                              .data_advice = data_advice,
                                                              .keys_advice = keys_advice,
                                                              .data_or = data_or,
                                                              .threads_decide_bits = threads_decide,
                                                              .common = std::move(common),
                                                              .preset_texts = std::move(presets),
                                                              .own = std::move(own)}));
  static_cast<void>(PythonSettings(*known));  // Throws where `common` names another option.
  const nb::handle does = work.release();     // For as long as the list is there.
  Recipe recipe{.name = name,
                .about = about,
                .unit = unit,
                .train_examples = examples,
                .choices = choices,
                .effective_batch = effective_batch};
  recipe.settings = [known] { return std::make_unique<PythonSettings>(*known); };
  recipe.train = [does](const AnySettings& settings, const TrainOptions& how) {
    return call(does, "train", settings, settings.to_toml(), how.resume, how.accept_other_processor,
                how.progress.quiet);
  };
  const auto has = [&](const char* what) { return nb::cast<bool>(does.attr(what)); };
  if (has("evaluates")) {
    recipe.evaluate = [does](const AnySettings& settings) {
      return call(does, "evaluate", settings);
    };
  }
  if (has("plans")) {
    recipe.plan_example = plan_example;
    recipe.plan = [does](const AnySettings& settings, const PlanQuestion& asked) {
      return call(does, "plan", settings, asked.device.device, asked.device.memory_limit,
                  asked.choices, asked.effective_batch);
    };
  }
  if (has("exports")) {
    recipe.export_model = [does](const AnySettings& settings, const ExportQuestion& asked) {
      return call(does, "export", settings, asked.out, asked.merge);
    };
  }
  add_recipe(std::move(recipe)).or_throw();
}

/// An option's value as run.toml has it.
std::string literal(const std::string& recipe, const std::string& key, const std::string& text,
                    const std::string& source) {
  const auto settings = recipe_named(recipe).or_throw()->settings();
  settings->set(key, text, source).or_throw();
  return settings->literal(key);
}

/// The settings of plimsoll.train() or plan(), whose name is `source`.
std::unique_ptr<AnySettings> settings_for(const Recipe& recipe, const std::string& config,
                                          const Pairs& options, const char* source,
                                          bool wants_out) {
  std::vector<GivenKey> given;
  for (const auto& [key, text] : options) {
    given.push_back({key, text, source});
  }
  return new_settings(recipe, config, std::span(&given, 1), wants_out).or_throw();
}

/// What was done. Of work that Ctrl-C ended, Python is told of Ctrl-C.
RecipeReport or_interrupt(Result<RecipeReport> done) {
  if (!done && was_given_up(done.error())) {
    const nb::gil_scoped_acquire locked;
    PyErr_SetNone(PyExc_KeyboardInterrupt);
    throw nb::python_error();
  }
  return std::move(done).or_throw();
}

std::string train(const std::string& name, const std::string& config, const Pairs& options,
                  bool quiet) {
  const Recipe& recipe = *recipe_named(name).or_throw();
  const auto settings = settings_for(recipe, config, options, "plimsoll.train()", true);
  return or_interrupt(recipe.train(*settings, {.progress = {.quiet = quiet}})).json;
}

std::string plan(const std::string& name, const std::string& config, const Pairs& options,
                 const std::string& device, const std::string& device_memory_limit, bool choices,
                 std::int64_t effective_batch) {
  const Recipe& recipe = *recipe_named(name).or_throw();
  const auto settings = settings_for(recipe, config, options, "plimsoll.plan()", false);
  if (!recipe.plan) {
    throw Exception(work_missing(recipe, "plan"));
  }
  return or_interrupt(recipe.plan(*settings, {.choices = choices,
                                              .effective_batch = effective_batch,
                                              .device = {device, device_memory_limit}}))
      .json;
}

std::string resume(const std::string& run, const Pairs& options, bool quiet,
                   bool accept_other_processor) {
  const Recipe& recipe = *recipe_of_run(run).or_throw();
  const auto settings = settings_of_run(recipe, run).or_throw();
  settings->override_with(options, "plimsoll.resume()").or_throw();
  settings->resolve().or_throw();
  return or_interrupt(recipe.train(*settings, {.resume = true,
                                               .accept_other_processor = accept_other_processor,
                                               .progress = {.quiet = quiet}}))
      .json;
}

std::string evaluate(const std::string& run) {
  const Recipe& recipe = *recipe_of_run(run).or_throw();
  const auto settings = settings_of_run(recipe, run).or_throw();
  settings->resolve().or_throw();
  if (!recipe.evaluate) {
    throw Exception(work_missing(recipe, "evaluation"));
  }
  return or_interrupt(recipe.evaluate(*settings)).json;
}

std::string export_model(const std::string& run, const std::string& out, bool merge) {
  const Recipe& recipe = *recipe_of_run(run).or_throw();
  const auto settings = settings_of_run(recipe, run).or_throw();
  settings->resolve().or_throw();
  if (!recipe.export_model) {
    throw Exception(work_missing(recipe, "export"));
  }
  return or_interrupt(recipe.export_model(*settings, {.out = out, .merge = merge})).json;
}

}  // namespace

Error reader_error(nb::python_error& raised) {
  if (raised.matches(PyExc_KeyboardInterrupt)) {
    throw;
  }
  return error_of(raised, "import");
}

void bind_recipes(nb::module_& m) {
  nb::class_<PythonField>(m, "RecipeField", "An option of a recipe that is written in Python.")
      .def(nb::init<std::string, std::string, bool, Value, std::string, double, double,
                    std::string>(),
           nb::arg("name"), nb::arg("kind"), nb::arg("identity"), nb::arg("preset"),
           nb::arg("help"), nb::arg("least"), nb::arg("most"), nb::arg("choices"),
           "kind: \"text\", \"path\", \"size\", \"integer\", \"auto\" (it, or 0 as that word), "
           "\"real\", \"switch\", \"choice\" or \"widths\" (whole numbers, by commas).");
  m.def("add_recipe", &add, nb::arg("name"), nb::arg("about"), nb::arg("unit"), nb::arg("examples"),
        nb::arg("data_help"), nb::arg("data_advice"), nb::arg("keys_advice"), nb::arg("data_or"),
        nb::arg("plan_example"), nb::arg("choices"), nb::arg("effective_batch"), nb::arg("presets"),
        nb::arg("threads_decide_bits"), nb::arg("common"), nb::arg("fields"), nb::arg("work"),
        "`common` has defaults of its own for seed, checkpoint_every_n_steps and foreign_bytes. "
        "`work` has train(), and as `evaluates`, `plans` and `exports` say evaluate(), plan() and "
        "export(). `presets` are TOML texts by name. See plimsoll.recipes. Errors: ValueError; "
        "BudgetExceeded for more than 64 recipes.");
  m.def("option_literal", &literal, nb::arg("recipe"), nb::arg("key"), nb::arg("text"),
        nb::arg("source"),
        "The value of an option of `recipe` as run.toml has it. Errors: ValueError naming `source` "
        "and the key.");
  m.def("train", &train, nb::arg("recipe"), nb::arg("config"), nb::arg("options"), nb::arg("quiet"),
        nb::call_guard<nb::gil_scoped_release>(),
        "Returns the summary as JSON. Errors: ValueError, BudgetExceeded, OSError.");
  m.def("plan", &plan, nb::arg("recipe"), nb::arg("config"), nb::arg("options"), nb::arg("device"),
        nb::arg("device_memory_limit"), nb::arg("choices"), nb::arg("effective_batch"),
        nb::call_guard<nb::gil_scoped_release>(),
        "Returns the plan as JSON. Errors: ValueError, BudgetExceeded, OSError.");
  m.def("resume", &resume, nb::arg("run"), nb::arg("options"), nb::arg("quiet"),
        nb::arg("accept_other_processor"), nb::call_guard<nb::gil_scoped_release>(),
        "Returns the summary as JSON. Errors: NotFoundError, ValueError, CorruptError.");
  m.def("evaluate", &evaluate, nb::arg("run"), nb::call_guard<nb::gil_scoped_release>(),
        "Returns {\"step\", \"epoch\", \"recall\", …} as JSON. Errors: NotFoundError, ValueError, "
        "CorruptError.");
  m.def("export_model", &export_model, nb::arg("run"), nb::arg("out"), nb::arg("merge"),
        nb::call_guard<nb::gil_scoped_release>(),
        "Returns what was written as JSON. Errors: NotFoundError, ValueError, CorruptError, "
        "OSError.");
}

}  // namespace plimsoll::python
