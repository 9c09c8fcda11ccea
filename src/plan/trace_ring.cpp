// SPDX-License-Identifier: Apache-2.0
//
// See trace_ring.h.
#include "plan/trace_ring.h"

namespace plimsoll {

const char* phase_name(StepPhase phase) noexcept {
  switch (phase) {
    case StepPhase::kForward:
      return "forward";
    case StepPhase::kBackward:
      return "backward";
    case StepPhase::kOptimizer:
      return "optimizer";
  }
  return "";
}

TraceScope& TraceScope::current() noexcept {
  static thread_local TraceScope scope;
  return scope;
}

TraceRing::TraceRing(std::int64_t events_max) : events_max_(events_max) {
  events_.reserve(static_cast<std::size_t>(events_max));
}

void TraceRing::record(TraceKind kind, const void* address, std::int64_t bytes) noexcept {
  if (static_cast<std::int64_t>(events_.size()) == events_max_) {
    ++events_lost_;
    return;
  }
  const TraceScope& scope = TraceScope::current();
  events_.push_back({reinterpret_cast<std::uintptr_t>(address), bytes, scope.op, this_thread(),
                     kind, scope.phase});
}

std::uint16_t TraceRing::this_thread() noexcept {
  static std::atomic<std::uint32_t> asked{0};
  static thread_local const auto number = static_cast<std::uint16_t>(asked.fetch_add(1) + 1);
  return number;
}

}  // namespace plimsoll
