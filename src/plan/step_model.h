// SPDX-License-Identifier: Apache-2.0
//
// StepModel: a step's blocks with their sizes as formulas, replayed at any size.
//
// From traces of the same step at a few sizes. Every block gets the simplest of: a constant, a
// line, a parabola in the rows; for graphs also a sum in graphs, nodes and edges. Replaying the
// event list keeps lifetimes, so it sees the peak move from one operator to another, which a line
// through measured peaks cannot. Source: xMem (arXiv 2510.21048) for the idea of
// replaying an allocator over a step's events. Reading order: step_trace.h, this file,
// batch_plan.h.
//
// Threads: immutable once made.   Memory: 65 bytes a block and 4 an event, at most 17.3 MiB.
#pragma once

#include <array>
#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "plan/step_trace.h"
#include "plimsoll/result.h"

namespace plimsoll {

/// The bytes of one block as a function of the step's size.
struct SizeFormula {
  /// Factors of 1, rows, rows², nodes, edges.
  std::array<double, 5> factors{};
  /// No such formula fits the traces: `factors` is a line above all of them.
  bool envelope{false};
  /// It fits one trace more than it has factors.
  bool confirmed{false};

  [[nodiscard]] std::int64_t at(const StepSize& size) const noexcept;
};

/// Who holds the bytes at the peak. Sums to the peak.
struct PeakParts {
  std::int64_t static_bytes{0};      ///< Alive before and after: parameters, states, teacher.
  std::int64_t gradient_bytes{0};    ///< Made in backward, alive when it ends.
  std::int64_t activation_bytes{0};  ///< Made in forward, alive when backward begins.
  std::int64_t optimizer_bytes{0};   ///< Made by the optimizer and kept.
  std::int64_t temporary_bytes{0};   ///< The rest.
  std::int64_t other_threads_bytes{0};
};

struct ReplayedPeak {
  std::int64_t bytes{0};
  PeakParts parts{};
  std::string op;  ///< The operator whose allocation made the peak; "" when none did.
  StepPhase phase{StepPhase::kForward};
};

class StepModel {
 public:
  /// Requires: traces of different sizes, all aligned(). Errors: kInvalidArgument otherwise.
  static Result<StepModel> fit(std::span<const StepTrace> traces);

  /// The highest sum of live blocks during the step, in the allocator's own bytes.
  [[nodiscard]] ReplayedPeak replay(const StepSize& size, BlockBytes block_bytes) const;

  /// Bytes of every block at a size, as asked for.
  [[nodiscard]] std::vector<std::int64_t> block_sizes(const StepSize& size) const;

  /// One of the traced steps: the order of its events is that of all.
  [[nodiscard]] const StepTrace& shape() const noexcept { return shape_; }

  /// Whether a traced step is, event by event and byte by byte, the one predicted for its size.
  [[nodiscard]] bool predicts(const StepTrace& trace) const;

  /// Whether every formula fits one trace more than it needs.
  [[nodiscard]] bool confirmed() const noexcept;

  [[nodiscard]] std::int64_t rows_least() const noexcept { return rows_least_; }
  [[nodiscard]] std::int64_t rows_most() const noexcept { return rows_most_; }

 private:
  enum class Part : std::uint8_t { kGradient, kActivation, kOptimizer, kTemporary };

  void classify();

  StepTrace shape_;  // One of the traces: its blocks' order, operators and events.
  std::vector<SizeFormula> formulas_;  // One a block.
  std::vector<Part> parts_;            // One a block.
  std::int64_t rows_least_{0};
  std::int64_t rows_most_{0};
};

}  // namespace plimsoll
