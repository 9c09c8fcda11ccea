// SPDX-License-Identifier: Apache-2.0
//
// What the bindings of a TokenSet and of an ImageSet share, and those of their writers.
//
// Threads: a SharedSet's calls run side by side; a writer's queue (Guarded).   Memory: none.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <utility>

#include <nanobind/stl/string.h>

#include "bindings.h"

namespace plimsoll::python {

/// A set that Python and batches from it own together.
template <class Set>
class SharedSet {
 public:
  SharedSet(Set set, const char* name) : set_(std::make_shared<Set>(std::move(set))), name_(name) {}
  /// Errors: kInvalidArgument when closed.
  [[nodiscard]] std::shared_ptr<Set> get() const {
    if (!set_) {
      throw Exception(make_error(ErrorCode::kInvalidArgument,
                                 std::string(name_) + ": it was closed", "open it again"));
    }
    return set_;
  }
  void close() { set_.reset(); }

 private:
  std::shared_ptr<Set> set_;
  const char* name_;  // Static.
};

/// The class of a set, with what every set has.
template <class Set>
nb::class_<SharedSet<Set>> bind_row_set(nb::module_& m, const char* name, const char* doc) {
  using Shared = SharedSet<Set>;
  return nb::class_<Shared>(m, name, doc)
      .def_static(
          "open",
          [name](const std::string& path) {
            const nb::gil_scoped_release unlocked;
            return Shared(Set::open(path).or_throw(), name);
          },
          nb::arg("path"), "Errors: NotFoundError, CorruptError, OSError.")
      .def("close", &Shared::close, "Lets go of the file.")
      .def_prop_ro(
          "rows", [](const Shared& set) { return set.get()->rows(); }, "Rows in all.")
      .def_prop_ro(
          "about", [](const Shared& set) { return set.get()->info().about; },
          "Summary of the import, as JSON.")
      .def(
          "verify",
          [](const Shared& shared) {
            const auto set = shared.get();
            const nb::gil_scoped_release unlocked;
            set->verify(nullptr).or_throw();
          },
          "Errors: CorruptError, OSError.");
}

/// The class of a writer of such sets, with what every writer has.
template <class Writer, class Set>
nb::class_<Guarded<Writer>> bind_row_writer(nb::module_& m, const char* name, const char* doc) {
  using Handle = Guarded<Writer>;
  return nb::class_<Handle>(m, name, doc)
      .def_prop_ro(
          "whole",
          [](Handle& writer) { return writer.use([](Writer& self) { return self.whole(); }); },
          "The set is there already.")
      .def_prop_ro(
          "position",
          [](Handle& writer) { return writer.use([](Writer& self) { return self.position(); }); },
          "Position given to the last commit.")
      .def_prop_ro(
          "rows",
          [](Handle& writer) { return writer.use([](Writer& self) { return self.info().rows; }); },
          "Rows written.")
      .def(
          "append_rows",
          [](Handle& writer, const SharedSet<Set>& from, std::int64_t begin, std::int64_t end) {
            const auto set = from.get();
            return writer.use(
                [&](Writer& self) { return self.append_rows(*set, begin, end).or_throw(); });
          },
          nb::arg("from_"), nb::arg("begin"), nb::arg("end"),
          "Adds rows of another set; returns their bytes. Errors: ValueError, CorruptError, "
          "BudgetExceeded, OSError.")
      .def(
          "commit",
          [](Handle& writer, const std::string& position) {
            writer.use([&](Writer& self) { self.commit(position).or_throw(); });
          },
          nb::arg("position"), "Errors: OSError.")
      .def(
          "finish",
          [](Handle& writer, const std::string& about, const std::string& fingerprint) {
            writer.use([&](Writer& self) { self.finish(about, fingerprint).or_throw(); });
          },
          nb::arg("about"), nb::arg("fingerprint"), "Errors: ValueError, OSError.")
      .def("close", &Handle::close, "Leaves work under way as the last commit has it.");
}

}  // namespace plimsoll::python
