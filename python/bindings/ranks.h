// SPDX-License-Identifier: Apache-2.0
//
// RankMemory as both modules have it, and waits in it that a signal's handler ends.
//
// Threads: waits run without Python's lock, and its handlers of signals ten times a second.
// Memory:  none of its own.
#pragma once

#include <utility>

#include "bindings.h"
#include "memory/rank_memory.h"

namespace plimsoll::python {

using PyRankMemory = Guarded<RankMemory>;

/// wait(memory, wait_on), which a handler of a signal, or a pending call, that raises ends. Throws
/// what it returns as an error.
template <class Wait>
auto interruptibly(PyRankMemory& memory, Wait&& wait) {
  bool raised = false;
  auto done = memory.use([&](RankMemory& self) {
    return wait(self, [&] {
      const nb::gil_scoped_acquire locked;
      // And what a governor's watcher wants to say.
      raised = PyErr_CheckSignals() != 0 || Py_MakePendingCalls() != 0;
      return !raised;
    });
  });
  if (raised) {
    throw nb::python_error();
  }
  return std::move(done).or_throw();
}

}  // namespace plimsoll::python
