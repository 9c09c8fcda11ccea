// SPDX-License-Identifier: Apache-2.0
//
// plimsoll._core: the torch-free library for Python. Errors become exceptions here.
//
// Reading order: bindings.h, this file, then core_memory.cpp, core_stores.cpp, core_data.cpp.
//
// Threads: see bindings.h.   Memory: the exception objects.
#include <exception>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include <nanobind/stl/string.h>
#include <nanobind/stl/string_view.h>
#include <nanobind/stl/vector.h>

#include "base/crc32c.h"
#include "bindings.h"
#include "cli/program.h"
#include "over_budget.h"
#include "plimsoll/bytes.h"
#include "plimsoll/result.h"

namespace plimsoll::python {
namespace {

struct Kept {
  std::weak_ptr<const std::string> text{};
  OverBudget raised{};
};
Kept& kept() {
  static Kept one;
  return one;
}

nb::object over_budget(const nb::handle& type, const Error& error) {
  nb::dict held;
  for (int tag = 0; tag < kTagCount; ++tag) {
    held[tag_name(static_cast<Tag>(tag))] = error.held_bytes[static_cast<std::size_t>(tag)];
  }
  std::string tag = tag_name(error.tag);
  std::string advice = error.advice;
  if (const auto raised = kept_over_budget(error)) {
    tag = raised->tag;
    advice = raised->advice;
    for (const auto& [name, bytes] : raised->held_bytes) {
      held[name.c_str()] = bytes;
    }
  }
  return type(error.to_string(), tag, error.requested_bytes, error.available_bytes,
              error.limit_bytes, held, advice, error.smallest_limit_bytes);
}

// Each code has exactly one exception class; see python/plimsoll/errors.py.
void raise(const Error& error) {
  try {
    const nb::object errors = nb::module_::import_("plimsoll.errors");
    nb::object type;
    nb::object value;
    switch (error.code) {
      case ErrorCode::kOverBudget:
        type = errors.attr("BudgetExceeded");
        value = over_budget(type, error);
        break;
      case ErrorCode::kNotFound:
        type = errors.attr("NotFoundError");
        value = type(error.to_string());
        break;
      case ErrorCode::kIo:
        type = nb::borrow(PyExc_OSError);
        value =
            error.os_errno != 0 ? type(error.os_errno, error.to_string()) : type(error.to_string());
        break;
      case ErrorCode::kInvalidArgument:
        type = nb::borrow(PyExc_ValueError);
        value = type(error.to_string());
        break;
      case ErrorCode::kCorrupt:
        type = errors.attr("CorruptError");
        value = type(error.to_string());
        break;
      case ErrorCode::kInternal:
        type = errors.attr("InternalError");
        value = type(error.to_string());
        break;
    }
    PyErr_SetObject(reinterpret_cast<PyObject*>(Py_TYPE(value.ptr())), value.ptr());
  } catch (nb::python_error& failure) {
    failure.restore();
  }
}

}  // namespace

void keep_over_budget(const Error& error, OverBudget raised) {
  kept() = {error.detail, std::move(raised)};
}

std::optional<OverBudget> kept_over_budget(const Error& error) {
  const auto text = kept().text.lock();
  return text != nullptr && text == error.detail ? std::optional(kept().raised) : std::nullopt;
}

/// From the main thread, one call at a time; without Python's lock.
void bind_program(nb::module_& m) {
  m.def(
      "run_program",
      [](const std::vector<nb::bytes>& given) {
        std::vector<std::string> arguments;
        for (const nb::bytes& word : given) {  // A path need not be text.
          arguments.emplace_back(word.c_str(), word.size());
        }
        const nb::gil_scoped_release unlocked;
        std::vector<char*> pointers;
        for (std::string& argument : arguments) {
          pointers.push_back(argument.data());
        }
        pointers.push_back(nullptr);
        return run_program(static_cast<int>(arguments.size()), pointers.data());
      },
      nb::arg("arguments"), "The program `plimsoll`; returns its exit status.");
}

// Registered once, by _core; nanobind shares translators between modules, so _torch has them too.
void bind_errors() {
  nb::register_exception_translator([](const std::exception_ptr& pointer, void*) {
    try {
      std::rethrow_exception(pointer);
    } catch (const Exception& exception) {
      raise(exception.error());
    }
  });
}

}  // namespace plimsoll::python

NB_MODULE(_core, m) {
  namespace nb = nanobind;
  using namespace plimsoll::python;
  // Objects alive when the interpreter ends are ordinary: the system takes their memory.
  nb::set_leak_warnings(false);
  m.doc() =
      "The torch-free library. Private: use the package `plimsoll`, whose classes wrap "
      "these.\n\nArrays must be contiguous and of the exact dtype (TypeError otherwise); results "
      "are written into arrays that the caller brings. Errors are those of plimsoll.errors, "
      "ValueError and OSError.";
  bind_errors();
  m.attr("version") = PLIMSOLL_VERSION;
  m.attr("torch_version") = PLIMSOLL_TORCH_VERSION;  // That _torch was built for; "" without it.
  m.def(
      "parse_bytes",
      [](std::string_view text, std::int64_t whole_bytes) {
        return plimsoll::parse_bytes(text, whole_bytes).or_throw();
      },
      nb::arg("text"), nb::arg("whole_bytes") = 0,
      "Bytes from \"512MiB\", \"6GB\" or \"25%\" (of whole_bytes). Errors: ValueError.");
  m.def("format_bytes", &plimsoll::format_bytes, nb::arg("bytes"), "\"768.0 MiB\".");
  m.def(
      "crc32c",
      [](const BytesIn& bytes, std::uint32_t seed) {
        const nb::gil_scoped_release unlocked;
        return plimsoll::crc32c(bytes_of(bytes), seed);
      },
      nb::arg("bytes").noconvert(), nb::arg("seed") = 0,
      "CRC-32C of the bytes, continuing from one returned earlier (0 to begin).");
  bind_program(m);
  bind_memory(m);
  bind_stores(m);
  bind_data(m);
  bind_graphs(m);
  bind_tokens(m);
  bind_images(m);
  bind_runs(m);
  bind_ranks(m);
  bind_recipes(m);
  bind_watch(m);
  bind_search(m);
}
