// SPDX-License-Identifier: Apache-2.0
//
// plimsoll._torch: the tensor arena and the recipes, linked to the user's torch.
//
// Importing it installs the arena; a Governor attaches to it. Types and exceptions come from
// plimsoll._core, which this module imports first.
// Reading order: bindings.h, plimsoll/torch.h, run/recipe.h, this file.
//
// Threads: attach() and detach() want no torch operator running. Recipes run without Python's lock;
//          the signal handlers are theirs meanwhile (run/control.h).
// Memory:  none of its own.
#include <memory>
#include <span>
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
#include "recipes/registry.h"
#include "run/control.h"
#include "run/recipe.h"
#include "torch/tensor_arena.h"
#include "torch_plan.h"

namespace plimsoll::python {
namespace {

using Pairs = std::vector<std::pair<std::string, std::string>>;

DictOf<std::int64_t> arena_stats() {
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

/// Returns what `work` returns. Python hears a signal that came meanwhile, also one that came
/// after the last moment at which `work` could give up.
template <class Work>
RecipeReport report_of(Work&& work) {
  auto done = [&] {
    const StopSignals signals;
    return work();
  }();
  StopSignals::pass_on();
  return std::move(done).or_throw();
}

/// What was done. Of a run that gave up before its first step, as Ctrl-C asked, Python is told of
/// Ctrl-C.
RecipeReport or_interrupt(Result<RecipeReport> done) {
  if (!done && was_given_up(done.error())) {
    StopSignals::pass_on();
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
  return report_of([&] {
           return recipe.plan(*settings, {.choices = choices,
                                          .effective_batch = effective_batch,
                                          .device = {device, device_memory_limit}});
         })
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
  return report_of([&] { return recipe.evaluate(*settings); }).json;
}

std::string export_model(const std::string& run, const std::string& out, bool merge) {
  const Recipe& recipe = *recipe_of_run(run).or_throw();
  const auto settings = settings_of_run(recipe, run).or_throw();
  settings->resolve().or_throw();
  if (!recipe.export_model) {
    throw Exception(work_missing(recipe, "export"));
  }
  return recipe.export_model(*settings, {.out = out, .merge = merge}).or_throw().json;
}

void bind_arena(nb::module_& m) {
  m.def(
      "attach", [](const Governor& governor) { TensorArena::attach(governor).or_throw(); },
      nb::arg("governor"),
      "From now on new tensors are leased from `governor`.\n\nRequires: no torch operator is "
      "running.\nErrors:   ValueError in a forked child.");
  m.def("detach", &TensorArena::detach,
        "New tensors pass through to torch's own allocator; those alive keep their leases.");
  m.def("installed", &TensorArena::installed, "Whether the arena is torch's CPU allocator.");
  m.def(
      "owns",
      [](std::uintptr_t address) {
        return TensorArena::owns(reinterpret_cast<const void*>(address));
      },
      nb::arg("address"),
      "Whether the byte at this address (tensor.data_ptr()) lies in the arena.");
  m.def("arena_stats", &arena_stats,
        "live_bytes, live_peak_bytes, cached_bytes, leased_bytes, allocations, foreign_frees, …");
  m.def("reset_peak", &TensorArena::reset_peak, "Starts the peaks again from what is live.");
  m.def(
      "clean_up",
      []() -> DictOf<nb::any> {
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
      },
      "Governor.clean_up(). Errors: OSError.");
  m.def(
      "refuse",
      [](std::int64_t first, std::int64_t count) { tensor_arena_pages().refuse(first, count); },
      nb::arg("first"), nb::arg("count"),
      "For tests: the `first`-th allocation from now and the `count - 1` after it are refused.");
  m.def("purge", &TensorArena::purge, nb::call_guard<nb::gil_scoped_release>(),
        "Gives free pages back to the system; returns the bytes.");
  m.def(
      "make_deterministic",
      [](int compute_threads) { make_deterministic(compute_threads).or_throw(); },
      nb::arg("compute_threads"),
      "Fixes what makes torch's results depend on the run. Errors: ValueError without MKL_CBWR.");
}

void bind_recipes(nb::module_& m) {
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
  bind_program(m, "The program `plimsoll`; returns its exit status.");
}

}  // namespace
}  // namespace plimsoll::python

NB_MODULE(_torch, m) {
  namespace nb = nanobind;
  using namespace plimsoll::python;
  nb::set_leak_warnings(false);
  m.doc() =
      "The tensor arena and the recipes, linked to the installed torch. Importing it installs the "
      "arena.\n\nPrivate: plimsoll.Governor attaches the arena; plimsoll.train(), resume() and "
      "evaluate() wrap the recipes. Where plimsoll was built without torch, importing this raises "
      "ImportError saying how.";
  nb::module_::import_("torch");
  nb::module_::import_("plimsoll._core");
  static_cast<void>(plimsoll::TensorArena::install());  // Where it could not be, attach() says why.
  plimsoll::add_recipes();
  bind_arena(m);
  bind_recipes(m);
  bind_plan(m);
}
