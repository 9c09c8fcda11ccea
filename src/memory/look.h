// SPDX-License-Identifier: Apache-2.0
//
// What the governor does between steps, for whoever else does it: the watcher.
//
// Reading order: ledger.h, this file, governor.cpp, watcher.h.
//
// Threads: thread-safe: one thread at a time has the ledger's turn.   Memory: none.
#pragma once

#include <memory>

#include "plimsoll/pressure.h"
#include "plimsoll/tree_memory.h"

namespace plimsoll {

class Ledger;

/// The ledger of the process's governor; nullptr when there is none.
[[nodiscard]] std::shared_ptr<Ledger> current_ledger() noexcept;

/// A look, and what it means.
struct Look {
  Measured seen{};
  PressureReport report{};
};

/// Sees, and changes nothing: `stop` is never set.
[[nodiscard]] Look look(Ledger& ledger);

/// Governor::step_boundary(): looks, and makes the moves.
[[nodiscard]] Look look_and_act(Ledger& ledger);

}  // namespace plimsoll
