// SPDX-License-Identifier: Apache-2.0
//
// plimsoll._torch: the tensor arena and the recipes, linked to the user's torch.
//
// Importing it installs the arena; a Governor attaches to it. Types and exceptions come from
// plimsoll._core, which this module imports first.
// Reading order: bindings.h, plimsoll/torch.h, recipes/cosir.h, this file.
//
// Threads: attach() and detach() want no torch operator running. Recipes run without Python's lock;
//          the signal handlers are theirs meanwhile (recipes/control.h).
// Memory:  none of its own.
#include <cstdio>
#include <filesystem>
#include <string>
#include <utility>
#include <vector>

#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include "bindings.h"
#include "plimsoll/governor.h"
#include "plimsoll/torch.h"
#include "program_binding.h"
#include "recipes/can_kd/can_kd.h"
#include "recipes/cosir.h"
#include "recipes/cosir_plan.h"
#include "torch/tensor_arena.h"
#include "torch_plan.h"

namespace plimsoll::python {
namespace {

using Pairs = std::vector<std::pair<std::string, std::string>>;

nb::dict arena_stats() {
  const ArenaStats stats = TensorArena::stats();
  nb::dict out;
  out["live_bytes"] = stats.live_bytes;
  out["live_peak_bytes"] = stats.live_peak_bytes;
  out["cached_bytes"] = stats.cached_bytes;
  out["leased_bytes"] = stats.leased_bytes;
  out["leased_peak_bytes"] = stats.leased_peak_bytes;
  out["allocations"] = stats.allocations;
  out["foreign_frees"] = stats.foreign_frees;
  out["purges"] = stats.purges;
  out["refusals"] = stats.refusals;
  return out;
}

template <class AnyRecipe>
AnyRecipe new_settings(const std::string& config, const Pairs& options, const char* source) {
  AnyRecipe settings;
  if (!config.empty()) {
    settings.read_file(config).or_throw();
  }
  std::vector<GivenKey> given;
  for (const auto& [key, text] : options) {
    given.push_back({key, text, source});
  }
  settings.set_all(std::move(given)).or_throw();
  return settings;
}

TrainOptions how(bool resume, bool quiet, bool accept_other_processor = false) {
  TrainOptions options;
  options.resume = resume;
  options.accept_other_processor = accept_other_processor;
  options.progress.quiet = quiet;
  return options;
}

void print_notes(const AnySettings& settings, bool quiet) {
  for (const auto& note : settings.notes()) {
    if (!quiet) {
      std::fprintf(stderr, "plimsoll: %s\n", note.c_str());
    }
  }
}

void check_recipe(const std::string& recipe) {
  if (recipe != "cosir") {
    throw Exception(make_error(ErrorCode::kInvalidArgument, "there is no recipe \"" + recipe + "\"",
                               "use \"cosir\" or \"can-kd\""));
  }
}

std::string train(const std::string& recipe, const std::string& config, const Pairs& options,
                  bool quiet) {
  constexpr const char* kSource = "plimsoll.train()";
  if (recipe == "can-kd") {
    auto settings = new_settings<CanKdSettings>(config, options, kSource);
    settings.resolve().or_throw();
    print_notes(settings, quiet);
    return train_can_kd(settings, how(false, quiet)).or_throw().to_json();
  }
  check_recipe(recipe);
  auto settings = new_settings<CosirSettings>(config, options, kSource);
  settings.resolve().or_throw();
  return train_cosir(settings, how(false, quiet)).or_throw().to_json();
}

template <class AnyRecipe>
AnyRecipe settings_of(const std::string& run) {
  AnyRecipe settings;
  settings.read_file(std::filesystem::path(run) / "run.toml", true).or_throw();
  settings.set("out", std::filesystem::absolute(run).string(), settings.source_of("out"))
      .or_throw();
  return settings;
}

std::string plan(const std::string& recipe, const std::string& config, const Pairs& options,
                 const std::string& device, const std::string& device_memory_limit, bool choices,
                 std::int64_t effective_batch) {
  constexpr const char* kSource = "plimsoll.plan()";
  if (recipe == "can-kd") {
    auto settings = new_settings<CanKdSettings>(config, options, kSource);
    settings.resolve(/*wants_out=*/false).or_throw();
    return plan_can_kd(settings, choices, {device, device_memory_limit}, effective_batch)
        .or_throw()
        .to_json();
  }
  check_recipe(recipe);
  auto settings = new_settings<CosirSettings>(config, options, kSource);
  settings.resolve(/*wants_out=*/false).or_throw();
  return plan_cosir(settings, choices, {device, device_memory_limit}).or_throw().to_json();
}

template <class AnyRecipe>
AnyRecipe resumed(const std::string& run, const Pairs& options, bool quiet) {
  auto settings = settings_of<AnyRecipe>(run);
  settings.override_with(options, "plimsoll.resume()").or_throw();
  settings.resolve().or_throw();
  print_notes(settings, quiet);
  return settings;
}

std::string resume(const std::string& run, const Pairs& options, bool quiet,
                   bool accept_other_processor) {
  const TrainOptions how_to = how(true, quiet, accept_other_processor);
  if (recipe_of_run(run).or_throw() == "can-kd") {
    return train_can_kd(resumed<CanKdSettings>(run, options, quiet), how_to).or_throw().to_json();
  }
  return train_cosir(resumed<CosirSettings>(run, options, quiet), how_to).or_throw().to_json();
}

std::string evaluate(const std::string& run) {
  if (recipe_of_run(run).or_throw() == "can-kd") {
    auto settings = settings_of<CanKdSettings>(run);
    settings.resolve().or_throw();
    return eval_can_kd(settings).or_throw().json;
  }
  auto settings = settings_of<CosirSettings>(run);
  settings.resolve().or_throw();
  return eval_cosir(settings).or_throw().json;
}

void bind_arena(nb::module_& m) {
  m.def(
      "attach", [](const Governor& governor) { TensorArena::attach(governor).or_throw(); },
      nb::arg("governor"));
  m.def("detach", &TensorArena::detach);
  m.def("installed", &TensorArena::installed);
  m.def(
      "owns",
      [](std::uintptr_t address) {
        return TensorArena::owns(reinterpret_cast<const void*>(address));
      },
      nb::arg("address"));
  m.def("arena_stats", &arena_stats);
  m.def("reset_peak", &TensorArena::reset_peak);
  m.def("clean_up", [] {
    const CleanUp done = [] {
      nb::gil_scoped_release unlocked;
      return clean_up().or_throw();
    }();
    nb::dict out;
    out["arena_bytes"] = done.arena_bytes;
    out["resident_before_bytes"] = done.resident_before_bytes;
    out["resident_after_bytes"] = done.resident_after_bytes;
    out["freed_bytes"] = done.freed_bytes();
    out["seconds"] = done.seconds;
    return out;
  });
  m.def(
      "refuse",
      [](std::int64_t first, std::int64_t count) { tensor_arena_pages().refuse(first, count); },
      nb::arg("first"), nb::arg("count"));
  m.def("purge", &TensorArena::purge, nb::call_guard<nb::gil_scoped_release>());
  m.def(
      "make_deterministic",
      [](int compute_threads) { make_deterministic(compute_threads).or_throw(); },
      nb::arg("compute_threads"));
}

void bind_recipes(nb::module_& m) {
  m.def("train", &train, nb::arg("recipe"), nb::arg("config"), nb::arg("options"), nb::arg("quiet"),
        nb::call_guard<nb::gil_scoped_release>());
  m.def("plan", &plan, nb::arg("recipe"), nb::arg("config"), nb::arg("options"), nb::arg("device"),
        nb::arg("device_memory_limit"), nb::arg("choices"), nb::arg("effective_batch"),
        nb::call_guard<nb::gil_scoped_release>());
  m.def("resume", &resume, nb::arg("run"), nb::arg("options"), nb::arg("quiet"),
        nb::arg("accept_other_processor"), nb::call_guard<nb::gil_scoped_release>());
  m.def("evaluate", &evaluate, nb::arg("run"), nb::call_guard<nb::gil_scoped_release>());
  bind_program(m);
}

}  // namespace
}  // namespace plimsoll::python

NB_MODULE(_torch, m) {
  namespace nb = nanobind;
  using namespace plimsoll::python;
  nb::set_leak_warnings(false);
  nb::module_::import_("torch");
  nb::module_::import_("plimsoll._core");
  plimsoll::TensorArena::install().or_throw();
  bind_arena(m);
  bind_recipes(m);
  bind_plan(m);
}
