// SPDX-License-Identifier: Apache-2.0
//
// Stop: why a run ends before its last step. Its last commit stands, and `plimsoll resume` goes on.
//
// Threads: a value.   Memory: one string.
#pragma once

#include <cstdint>
#include <optional>
#include <string>

namespace plimsoll {

struct Stop {
  enum class Cause : std::uint8_t {
    kAsked,   ///< By a signal or `plimsoll stop`.
    kMemory,  ///< There was too little of it; `why` names a limit to resume with.
  };
  Cause cause{Cause::kAsked};
  std::string why{};  ///< "SIGINT", ".stop", "memory pressure; resume with --memory-limit 2GiB".

  /// "asked", "memory": as summaries call the cause.
  [[nodiscard]] const char* cause_name() const noexcept {
    return cause == Cause::kMemory ? "memory" : "asked";
  }
};

/// Exit status 3: the run goes on when it is resumed.
[[nodiscard]] inline bool ended_by_memory(const std::optional<Stop>& stop) noexcept {
  return stop && stop->cause == Stop::Cause::kMemory;
}

/// What every run's summary begins with.
struct RunEnd {
  std::optional<Stop> stop{};  ///< None: finished.
  std::string run{};           ///< The run folder.
  std::int64_t step{0};
  std::int64_t limit_bytes{0};
  std::string limit_source{};  ///< LimitReport::explain().
  std::int64_t peak_resident_bytes{0};
  std::int64_t leased_peak_bytes{0};
  double seconds{0.0};
  std::string state_sha256{};  ///< Over all that was trained.

  /// "finished" or "stopped".
  [[nodiscard]] const char* status() const noexcept { return stop ? "stopped" : "finished"; }
};

}  // namespace plimsoll
