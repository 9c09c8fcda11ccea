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
#include "plimsoll/result.h"
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

/// Governor::step_boundary(): looks, and makes the moves. `wait`: before a stop also for what a
/// cache has to write before it can give memory back; nobody who grows may wait for this thread.
[[nodiscard]] Look look_and_act(Ledger& ledger, bool wait);

/// The moves of step_boundary() where the loop calls none: by who was told of a stop (watcher.h),
/// before it stops.
[[nodiscard]] PressureReport act_before_stop();

/// After a refusal: caches and queues shrink, and what they were promised but no longer lease goes
/// to whoever asks, as set_limit() has it; step_boundary() promises it again when there is room.
/// Returns whether another try may succeed. Waits some seconds for what has to be written first.
/// Requires: the calling thread holds no lock that a reclaimer may want.
bool yield_caches(Ledger& ledger, const Error& refusal) noexcept;

}  // namespace plimsoll
