// SPDX-License-Identifier: Apache-2.0
//
// What counts against the limit: the process, its descendants, and shared memory. Measured.
//
// The limit is of the process tree. Leases pay for what the governor grants; everything else is
// seen by looking, at most as often as that costs 1 % of a core. Beside the leases and what was
// there before them, foreign_bytes are set aside for it.
//
// Reading order: limits.h, pressure.h, governor.h, this file; src/os/tree_meter.h has how it is
// read.
//
// Threads: plain values; the functions are thread-safe.   Memory: fixed.
#pragma once

#include <cstdint>
#include <string>

#include "plimsoll/governor.h"
#include "plimsoll/limits.h"

namespace plimsoll {

/// Beside what the process itself has resident, and a part of that.
struct TreeMemory {
  std::int64_t children_bytes{0};   ///< Anonymous and shared memory of all descendants; what they
                                    ///< share with this process or each other counts once.
  std::int64_t in_flight_bytes{0};  ///< Shared memory that is held and resident in no process:
                                    ///< batches on their way from a worker, or never touched.
  std::int64_t mapped_bytes{0};     ///< Of Resident::file: private mappings of files, as weights
                                    ///< are loaded from safetensors.
  int children{0};
};

/// What one look saw.
struct Measured {
  Resident resident{};  ///< Of this process alone.
  TreeMemory tree{};
  std::int64_t unexplained_bytes{0};  ///< Of the tree, without a lease and not there before the
                                      ///< governor: anonymous and shared memory, mapped weights.
  /// All that is held, code and other mapped files included.
  [[nodiscard]] std::int64_t held_bytes() const noexcept {
    return resident.total() + tree.children_bytes + tree.in_flight_bytes;
  }
  /// What step_boundary() reports as resident.
  [[nodiscard]] Resident of_tree() const noexcept;
};

/// By the last look of the process's governor; all zero without one.
[[nodiscard]] Measured last_look();

/// How much of `unexplained_bytes` is beyond what was set aside: the ledger's free bytes are fewer
/// by so many.
[[nodiscard]] std::int64_t crowded_bytes(const LedgerState& ledger, const Measured& seen) noexcept;

/// Who holds what, in a sentence: what a warning or a stop says.
[[nodiscard]] std::string explain_held(const LedgerState& ledger, const Measured& seen);

/// One line for each kind of memory that has no lease, in the columns of LedgerState::to_string().
[[nodiscard]] std::string measured_lines(const Measured& seen);

}  // namespace plimsoll
