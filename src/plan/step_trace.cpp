// SPDX-License-Identifier: Apache-2.0
//
// See step_trace.h.
#include "plan/step_trace.h"

#include <algorithm>
#include <unordered_map>
#include <utility>

#include <fmt/format.h>

#include "base/check.h"

namespace plimsoll {
namespace {

// One object, by whose address such a trace is known.
constexpr char kTooLongAdvice[] = "name a batch size: it is not planned then";

// A block while the events are read.
struct Living {
  std::int64_t bytes{0};    // As asked for; for one from before, as the allocator counts it.
  std::int64_t counted{0};  // As the allocator counts it.
  std::uint32_t op{0};
  StepPhase born{StepPhase::kForward};
  std::int64_t order{0};   // Index of its event: blocks are numbered in this order.
  std::int32_t index{-1};  // In StepTrace::blocks, once it has one.
};

class Builder {
 public:
  Builder(const TracedSteps& steps, BlockBytes block_bytes)
      : steps_(steps), block_bytes_(block_bytes), static_bytes_(steps.live_at_begin) {}

  Result<StepTrace> build() {
    const auto events = steps_.events;
    const auto second = static_cast<std::size_t>(steps_.second_begins);
    for (std::size_t k = 0; k < events.size(); ++k) {
      if (k == second) {
        begin_second();
      }
      PLIMSOLL_TRY_VOID(take(events[k], static_cast<std::int64_t>(k), k >= second));
    }
    if (second >= events.size()) {
      begin_second();
    }
    trace_.size = steps_.size;
    trace_.static_bytes = static_bytes_;
    trace_.ops = steps_.ops;
    return std::move(trace_);
  }

 private:
  Result<void> take(const TraceEvent& event, std::int64_t order, bool second) {
    if (event.kind == TraceKind::kAllocate) {
      const std::int64_t counted = block_bytes_(event.bytes);
      const bool other = event.thread != steps_.thread;
      auto& table = other ? others_ : alive_;
      Living block{event.bytes, counted, event.op, event.phase, order, -1};
      if (other) {
        count_other(counted);
      } else if (second) {
        name(&block);
        trace_.events.push_back(block.index);
      }
      if (!table.emplace(event.address, block).second) {
        return fail(ErrorCode::kInternal, "trace of a step: one address allocated twice");
      }
      return {};
    }
    if (const auto other = others_.find(event.address); other != others_.end()) {
      count_other(-other->second.counted);
      others_.erase(other);
      return {};
    }
    const auto found = alive_.find(event.address);
    if (found != alive_.end()) {
      if (second) {
        trace_.events.push_back(-1 - found->second.index);
      }
      alive_.erase(found);
      return {};
    }
    // From before both steps. What only the second one frees is counted as if it stayed.
    static_bytes_ -= second ? 0 : event.bytes;
    if (static_bytes_ < 0) {
      return fail(ErrorCode::kInternal, "trace of a step: more was freed than was alive");
    }
    return {};
  }

  // Numbers the blocks that the second step finds, oldest first.
  void begin_second() {
    std::vector<Living*> found;
    found.reserve(alive_.size());
    for (auto& [address, block] : alive_) {
      found.push_back(&block);
    }
    std::sort(found.begin(), found.end(),
              [](const Living* x, const Living* y) { return x->order < y->order; });
    for (Living* block : found) {
      name(block);
    }
    trace_.carried = static_cast<std::int64_t>(trace_.blocks.size());
  }

  void name(Living* block) {
    block->index = static_cast<std::int32_t>(trace_.blocks.size());
    trace_.blocks.push_back({block->bytes, block->op, block->born});
  }

  void count_other(std::int64_t bytes) {
    others_bytes_ += bytes;
    trace_.other_threads_bytes = std::max(trace_.other_threads_bytes, others_bytes_);
  }

  const TracedSteps& steps_;
  BlockBytes block_bytes_;
  StepTrace trace_;
  std::unordered_map<std::uint64_t, Living> alive_;   // At most one entry an event.
  std::unordered_map<std::uint64_t, Living> others_;  // The same.
  std::int64_t static_bytes_;
  std::int64_t others_bytes_{0};
};

}  // namespace

Result<StepTrace> build_step_trace(const TracedSteps& steps, BlockBytes block_bytes) {
  return Builder(steps, block_bytes).build();
}

Error trace_too_long(std::int64_t rows, std::int64_t events_max) {
  return make_error(ErrorCode::kInvalidArgument,
                    fmt::format("two steps of {} rows allocate and free more often than the {} "
                                "times that a plan can follow",
                                rows, events_max),
                    kTooLongAdvice);
}

bool too_long_to_trace(const Error& error) noexcept {
  return error.advice == kTooLongAdvice;
}

bool aligned(const StepTrace& x, const StepTrace& y) {
  if (x.carried != y.carried || x.events != y.events || x.blocks.size() != y.blocks.size()) {
    return false;
  }
  for (std::size_t k = 0; k < x.blocks.size(); ++k) {
    if (x.blocks[k].born != y.blocks[k].born || x.ops[x.blocks[k].op] != y.ops[y.blocks[k].op]) {
      return false;
    }
  }
  return true;
}

}  // namespace plimsoll
