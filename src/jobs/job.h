// SPDX-License-Identifier: Apache-2.0
//
// Job: a command that waits for its turn, and what became of it.
//
// A job is one sealed JSON file (docs/formats/queue.md). Times are seconds since 1970, since they
// outlive the process that wrote them.
//
// Threads: values.
// Memory:  a record is at most kRecordBytesMost as JSON.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "plimsoll/result.h"
#include "watch/restarts.h"

namespace plimsoll {

enum class JobState : std::uint8_t { kWaiting, kRunning, kDone, kFailed, kCancelled };

/// "waiting", "running", "done", "failed", "cancelled".
[[nodiscard]] const char* job_state_name(JobState state) noexcept;

/// What an incident rule found (incident.h).
struct Incident {
  std::string rule{};      ///< Its name.
  std::string evidence{};  ///< What it matched: "line 812: CUDA out of memory", "status 137".
  std::string then{};      ///< "note", "retry", "fail".
};

struct Job {
  static constexpr std::int64_t kRecordBytesMost = 256 << 10;
  static constexpr std::size_t kCommandBytesMost = 64 << 10;
  static constexpr std::size_t kIncidentsMost = 8;  ///< The last of them are kept.

  // What was asked for.
  std::int64_t id{0};
  std::vector<std::string> command{};
  std::string directory{};          ///< Where it was added, and runs.
  std::string memory_limit{};       ///< As `plimsoll run` takes it.
  std::int64_t timeout_seconds{0};  ///< Of one start; 0: none.
  std::int64_t added{0};

  // How it stands.
  JobState state{JobState::kWaiting};
  bool cancel{false};          ///< It runs, and shall end.
  std::int64_t starts{0};      ///< How often it was started.
  std::int64_t deaths{0};      ///< How often it was killed or failed.
  Restarts restarts{};         ///< How often it may be started again, and was.
  std::int64_t not_before{0};  ///< Waits until then.
  std::int64_t guard{0};       ///< The process that runs it, and when that began (process_began()).
  std::int64_t guard_began{0};
  std::int64_t started{0};  ///< The last time.
  std::int64_t ended{0};
  std::string progress{};  ///< What its run told last: "runs/a: step 400".
  std::string why{};       ///< The last thing that happened to it, in a line.

  // How it ended the last time.
  std::string ending{};  ///< As `plimsoll run --json`, or "timeout"; "": it has not ended yet.
  int status{0};
  double seconds{0};
  std::int64_t limit_bytes{0};
  std::int64_t peak_bytes{0};
  double stalled_seconds{0};
  std::vector<std::string> advice{};
  std::vector<Incident> incidents{};
};

/// How well a job fares, from 0 to 100, and what it lost points for: 10 a death (at most 40), 50
/// for having failed, 20 for an incident, 10 for a peak above 95 % of its limit, 20 for waiting for
/// memory more than a tenth of the time.
struct Health {
  int score{100};
  std::vector<std::string> reasons{};
};
[[nodiscard]] Health health_of(const Job& job);

/// One line, without the seal.
[[nodiscard]] std::string to_json(const Job& job);
/// Errors: kCorrupt when it is no job. `where` names it.
[[nodiscard]] Result<Job> job_from_json(const std::string& text, const std::string& where);

}  // namespace plimsoll
