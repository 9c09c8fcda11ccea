// SPDX-License-Identifier: Apache-2.0
//
// StepTrace: what one training step allocates and frees, block by block, in order.
//
// It is made from the events of two equal steps in a row. The first is there so that whatever the
// second finds alive from its predecessor (gradients that zero_grad() will free, the last batch)
// has a size as asked for and an operator, like every other block.
// Reading order: trace_ring.h, this file, step_model.h.
//
// Threads: values; pure functions.
// Memory:  16 bytes a block and 4 an event. A ring has room for 262,144 events, so a trace is 5 MiB
// at
//          most; making one takes a hash table of the blocks alive besides.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "plan/trace_ring.h"
#include "plimsoll/result.h"

namespace plimsoll {

/// How large a step is. Graphs: `rows` are graphs, with their nodes and edges beside them.
struct StepSize {
  std::int64_t rows{0};
  std::int64_t nodes{0};
  std::int64_t edges{0};
  friend bool operator==(const StepSize&, const StepSize&) = default;
};

/// The bytes that a block of so many bytes takes from the allocator (arena_block_bytes()).
using BlockBytes = std::int64_t (*)(std::int64_t);

struct StepBlock {
  std::int64_t bytes{0};  ///< As asked for.
  std::uint32_t op{0};    ///< Index into StepTrace::ops.
  StepPhase born{StepPhase::kForward};
};
static_assert(sizeof(StepBlock) == 16);

struct StepTrace {
  StepSize size{};
  std::int64_t static_bytes{0};  ///< Alive before and after both steps, as the allocator counts.
  std::int64_t other_threads_bytes{0};  ///< Highest sum of what other threads held meanwhile.
  std::int64_t carried{0};              ///< blocks[0 … carried) are alive when the step begins.
  std::vector<StepBlock> blocks;
  std::vector<std::int32_t> events;  ///< k allocates blocks[k]; −1 − k frees it.
  std::vector<std::string> ops;      ///< Names; ops[0] is "".
  std::int64_t live_peak_bytes{0};   ///< What the allocator itself counted in the second step.
  std::int64_t leased_peak_bytes{0};
  double seconds{0.0};  ///< Of the second step.
};

/// What build_step_trace() is made from, beside the events.
struct TracedSteps {
  StepSize size{};
  std::span<const TraceEvent> events;
  std::int64_t second_begins{0};  ///< Index of the first event of the second step.
  std::int64_t live_at_begin{0};  ///< The allocator's live bytes before the first event.
  std::uint16_t thread{0};        ///< The thread that trains.
  std::vector<std::string> ops;
};

/// Pairs frees with allocations. Blocks of other threads are summed up, not listed.
/// Errors: kInternal when a block is freed that is not alive (events were lost).
Result<StepTrace> build_step_trace(const TracedSteps& steps, BlockBytes block_bytes);

/// Of a step with more events than a ring takes.
[[nodiscard]] Error trace_too_long(std::int64_t rows, std::int64_t events_max);
[[nodiscard]] bool too_long_to_trace(const Error& error) noexcept;

/// Whether two steps allocate and free in the same order, in the same operators.
[[nodiscard]] bool aligned(const StepTrace& x, const StepTrace& y);

}  // namespace plimsoll
