// SPDX-License-Identifier: Apache-2.0
//
// plimsoll._core: what other programs ask of a run, and the tools that look after stores.
//
// Reading order: bindings.h, recipes/control.h, recipes/store_export.h, this file.
//
// Threads: from any; without Python's lock. Ctrl-C ends a store's tool between two parts.
// Memory:  that of the tool, inside its memory_limit.
#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include "bindings.h"
#include "plimsoll/governor.h"
#include "recipes/control.h"
#include "recipes/describe.h"
#include "recipes/limit_requests.h"
#include "recipes/run_folder.h"
#include "recipes/store_compact.h"
#include "recipes/store_export.h"
#include "recipes/store_import.h"

namespace plimsoll::python {
namespace {

/// Calls `work` with a progress function that Ctrl-C ends. Throws what it returns as an error.
template <class Work>
auto interruptible(Work&& work) {
  bool interrupted = false;
  const auto go_on = [&](std::int64_t, std::int64_t) {
    const nb::gil_scoped_acquire locked;
    interrupted = PyErr_CheckSignals() != 0;
    return !interrupted;
  };
  auto done = [&] {
    const nb::gil_scoped_release unlocked;
    return work(go_on);
  }();
  if (interrupted) {
    throw nb::python_error();
  }
  return std::move(done).or_throw();
}

Governor governor_of(const std::string& memory_limit) {
  return Governor::create({.memory_limit = memory_limit}).or_throw();
}

std::int64_t export_rows(const std::string& directory, const std::string& out,
                         const std::string& format, const std::string& column, std::int64_t since,
                         std::int64_t step, const std::string& memory_limit) {
  const ExportOptions options{.directory = directory,
                              .out = out,
                              .format = format,
                              .column = column,
                              .since = since,
                              .step = step};
  return interruptible(
      [&](const auto& go_on) { return export_store(governor_of(memory_limit), options, go_on); });
}

std::int64_t import_rows(const std::vector<std::string>& files, const std::string& out,
                         const std::string& format, const std::string& optimizer,
                         const std::string& dtype, const std::string& memory_limit) {
  const auto optimizers = optimizers_by_name();
  const auto named = optimizers.find(optimizer);
  if (named == optimizers.end() || (dtype != "float32" && dtype != "bfloat16")) {
    std::string names;
    for (const auto& [name, ignored] : optimizers) {
      names += (names.empty() ? "" : ", ") + name;
    }
    throw Exception(make_error(ErrorCode::kInvalidArgument,
                               named == optimizers.end()
                                   ? "optimizer must be one of " + names + ", not " + optimizer
                                   : "dtype must be float32 or bfloat16, not " + dtype));
  }
  const ImportOptions options{
      .files = {files.begin(), files.end()},
      .out = out,
      .format = format,
      .optimizer = named->second,
      .dtype = dtype == "bfloat16" ? RowDType::kBFloat16 : RowDType::kFloat32};
  return interruptible(
      [&](const auto& go_on) { return import_store(governor_of(memory_limit), options, go_on); });
}

std::pair<std::int64_t, std::int64_t> compact(const std::string& directory, std::int64_t rows_max,
                                              const std::string& memory_limit) {
  const Compacted done = interruptible([&](const auto& go_on) {
    return compact_store(governor_of(memory_limit), directory, go_on, rows_max);
  });
  return {done.bytes_before, done.bytes};
}

}  // namespace

void bind_runs(nb::module_& m) {
  const auto unlocked = nb::call_guard<nb::gil_scoped_release>();
  m.def(
      "run_status",
      [](const std::string& run) { return RunFolder::view(run).or_throw().to_json(); },
      nb::arg("run"), unlocked);
  m.def(
      "run_stop", [](const std::string& run) { return ask_to_stop(run).or_throw(); },
      nb::arg("run"), unlocked);
  m.def(
      "run_pause", [](const std::string& run) { return ask_to_pause(run).or_throw(); },
      nb::arg("run"), unlocked);
  m.def(
      "run_continue", [](const std::string& run) { return ask_to_continue(run).or_throw(); },
      nb::arg("run"), unlocked);
  m.def(
      "run_limit",
      [](const std::string& run, const std::string& size) {
        return ask_for_limit(run, size).or_throw();
      },
      nb::arg("run"), nb::arg("size"), unlocked);
  m.def(
      "store_directory", [](const std::string& path) { return store_directory(path).string(); },
      nb::arg("path"));
  m.def(
      "store_verify",
      [](const std::string& directory) {
        interruptible([&](const auto& go_on) { return verify_store(directory, go_on); });
      },
      nb::arg("directory"));
  m.def("store_export", &export_rows, nb::arg("directory"), nb::arg("out"), nb::arg("format"),
        nb::arg("column"), nb::arg("since"), nb::arg("step"), nb::arg("memory_limit"));
  m.def("store_import", &import_rows, nb::arg("files"), nb::arg("out"), nb::arg("format"),
        nb::arg("optimizer"), nb::arg("dtype"), nb::arg("memory_limit"));
  m.def("store_compact", &compact, nb::arg("directory"), nb::arg("rows_max"),
        nb::arg("memory_limit"));
}

}  // namespace plimsoll::python
