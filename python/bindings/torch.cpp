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
#include "recipes/cosir.h"
#include "recipes/cosir_plan.h"
#include "recipes/run_folder.h"
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

CosirSettings new_settings(const std::string& recipe, const std::string& config,
                           const Pairs& options, const char* source) {
  if (recipe != "cosir") {
    throw Exception(make_error(ErrorCode::kInvalidArgument,
                               "recipe \"" + recipe + "\" is not there yet", "use \"cosir\""));
  }
  CosirSettings settings;
  if (!config.empty()) {
    settings.read_file(config).or_throw();
  }
  for (const auto& [key, text] : options) {
    settings.set(key, text, source).or_throw();
  }
  return settings;
}

std::string train(const std::string& recipe, const std::string& config, const Pairs& options,
                  bool quiet) {
  CosirSettings settings = new_settings(recipe, config, options, "plimsoll.train()");
  settings.resolve().or_throw();
  TrainOptions run;
  run.progress.quiet = quiet;
  return train_cosir(settings, run).or_throw().to_json();
}

CosirSettings settings_of(const std::string& run) {
  if (!RunFolder::is_run(run)) {
    throw Exception(make_error(ErrorCode::kNotFound, run + ": no run there"));
  }
  CosirSettings settings;
  settings.read_file(std::filesystem::path(run) / "run.toml", true).or_throw();
  settings.set("out", std::filesystem::absolute(run).string(), settings.source_of("out"))
      .or_throw();
  return settings;
}

std::string plan(const std::string& recipe, const std::string& config, const Pairs& options) {
  CosirSettings settings = new_settings(recipe, config, options, "plimsoll.plan()");
  settings.resolve(/*wants_out=*/false).or_throw();
  return plan_cosir(settings).or_throw().to_json();
}

std::string resume(const std::string& run, const Pairs& options, bool quiet) {
  CosirSettings settings = settings_of(run);
  settings.override_with(options, "plimsoll.resume()").or_throw();
  settings.resolve().or_throw();
  TrainOptions how;
  how.resume = true;
  how.progress.quiet = quiet;
  return train_cosir(settings, how).or_throw().to_json();
}

std::string evaluate(const std::string& run) {
  CosirSettings settings = settings_of(run);
  settings.resolve().or_throw();
  return eval_cosir(settings).or_throw();
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
  m.def("plan", &plan, nb::arg("recipe"), nb::arg("config"), nb::arg("options"),
        nb::call_guard<nb::gil_scoped_release>());
  m.def("resume", &resume, nb::arg("run"), nb::arg("options"), nb::arg("quiet"),
        nb::call_guard<nb::gil_scoped_release>());
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
