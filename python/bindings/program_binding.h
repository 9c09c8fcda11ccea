// SPDX-License-Identifier: Apache-2.0
//
// The program `plimsoll` as a function of Python: in _torch, and in _core without what needs torch.
//
// Threads: from the main thread, one call at a time; without Python's lock.   Memory: the
// program's.
#pragma once

#include <string>
#include <vector>

#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include "bindings.h"
#include "cli/program.h"

namespace plimsoll::python {

inline void bind_program(nb::module_& m, const char* doc) {
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
      nb::arg("arguments"), doc);
}

}  // namespace plimsoll::python
