// SPDX-License-Identifier: Apache-2.0
//
// TraceRing records which blocks a step allocates and frees, and inside which operator.
//
// An allocator writes events into it under its own mutex; whoever runs the operators says on its
// thread which one is running (TraceScope). The ring never grows: a step of more events than it
// has room for is a trace that overflowed, and is not used.
// Reading order: this file, step_trace.h.
//
// Threads: record() wants the allocator's mutex; TraceScope is of its own thread.
// Memory:  24 bytes an event (6 MiB), taken at construction and not leased: it is there only while
// a
//          step is traced, from the heap, and so counted as resident but not in any pool.
#pragma once

#include <atomic>
#include <cstdint>
#include <span>
#include <vector>

namespace plimsoll {

enum class TraceKind : std::uint8_t { kAllocate, kFree };

/// Which part of a step an operator belongs to.
enum class StepPhase : std::uint8_t { kForward, kBackward, kOptimizer };

/// "forward", "backward" or "optimizer".
[[nodiscard]] const char* phase_name(StepPhase phase) noexcept;

/// The operator that runs on this thread: an index into the tracer's names, 0 for none.
struct TraceScope {
  std::uint32_t op{0};
  StepPhase phase{StepPhase::kForward};

  /// This thread's own.
  static TraceScope& current() noexcept;
};

struct TraceEvent {
  std::uint64_t address{0};
  std::int64_t bytes{0};  ///< kAllocate: asked for. kFree: as the allocator had counted it.
  std::uint32_t op{0};
  std::uint16_t thread{0};
  TraceKind kind{TraceKind::kAllocate};
  StepPhase phase{StepPhase::kForward};
};
static_assert(sizeof(TraceEvent) == 24);

class TraceRing {
 public:
  static constexpr std::int64_t kEventsDefault = 1 << 18;  ///< 6 MiB.

  explicit TraceRing(std::int64_t events_max = kEventsDefault);

  void record(TraceKind kind, const void* address, std::int64_t bytes) noexcept;

  /// In the order in which the allocator saw them.
  [[nodiscard]] std::span<const TraceEvent> events() const noexcept { return events_; }
  [[nodiscard]] std::int64_t events_max() const noexcept { return events_max_; }
  /// Events that found no room. Not 0: the trace says nothing about the step.
  [[nodiscard]] std::int64_t events_lost() const noexcept { return events_lost_; }

  /// A number of the calling thread, different from every other living thread's among the first
  /// 65,535 that ever asked.
  static std::uint16_t this_thread() noexcept;

 private:
  std::vector<TraceEvent> events_;
  std::int64_t events_max_;
  std::int64_t events_lost_{0};
};

}  // namespace plimsoll
