// SPDX-License-Identifier: Apache-2.0
//
// Attempt: one start of a job, in a child process that ends with it.
//
// The child is the guard of `plimsoll run`: it holds the job to its limit and tells what became of
// it. All memory that the job or its guard took returns to the system with them. The child is told
// when the runner dies, and has the job end.
//
// Threads: single-owner.
// Memory:  four descriptors; a report of kReportBytesMost while it is read.
#pragma once

#include <chrono>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include <sys/types.h>

#include "jobs/incident.h"
#include "jobs/job.h"
#include "jobs/job_log.h"
#include "os/waited_signals.h"
#include "plimsoll/result.h"
#include "watch/progress.h"

namespace plimsoll {

/// Runs a job to its end, in this process, telling what came of it as `plimsoll run --json` does;
/// returns an exit status.
using JobWork = std::function<int(const Job&, const std::function<void(const std::string&)>&)>;

/// What came of one start.
struct AttemptEnd {
  bool told{false};  ///< Its guard has told; else all but `status` and `lines` is unknown.
  int status{0};
  bool stopped{false};  ///< Ended by its guard, for its memory.
  std::string ending{};
  std::string summary{};
  double seconds{0};
  std::int64_t limit_bytes{0};
  std::int64_t peak_bytes{0};
  double stalled_seconds{0};
  std::vector<std::string> advice{};
  std::vector<std::string> lines{};  ///< What matched, of each rule.
};

class Attempt {
 public:
  static constexpr std::size_t kReportBytesMost = 64 << 10;

  /// Makes the child, which waits for go(): when the runner dies before, it starts nothing.
  /// Errors: kIo.
  static Result<std::unique_ptr<Attempt>> start(const Job& job, const JobWork& work,
                                                const std::filesystem::path& log,
                                                const IncidentRules& rules,
                                                const WaitedSignals& signals);
  Attempt(const Attempt&) = delete;
  Attempt& operator=(const Attempt&) = delete;
  ~Attempt();  ///< Ends what still runs, at once.

  /// The child starts the job: who it is has been written down.
  void go() noexcept;

  [[nodiscard]] pid_t guard() const noexcept { return guard_; }
  [[nodiscard]] std::string progress() const { return note_.read(); }

  /// Asks it to end; after `grace` it is killed, by look(). More calls change nothing.
  void ask(std::chrono::milliseconds grace) noexcept;
  [[nodiscard]] bool asked() const noexcept { return deadline_.has_value(); }

  /// What came of it, once it has ended.
  [[nodiscard]] std::optional<AttemptEnd> look();

 private:
  Attempt(JobLog log, ProgressNote note, int report)
      : log_(std::move(log)), note_(std::move(note)), report_(report) {}
  [[nodiscard]] AttemptEnd end(int status);

  JobLog log_;
  ProgressNote note_;
  int report_;  // A memfd that the guard writes into.
  int go_{-1};  // A pipe's end: the child waits for a byte, or for its end.
  pid_t guard_{-1};
  std::optional<std::chrono::steady_clock::time_point> deadline_{};
};

/// Ends what a runner that died has left: the guard `pid` that began at `began`, and its job.
/// Asked, and killed `grace` later; `wait` waits a moment, and is false when there is no time for
/// it: then this is, too. Nothing to do where that process is gone.
[[nodiscard]] bool end_leftover(std::int64_t pid, std::int64_t began,
                                std::chrono::milliseconds grace, const std::function<bool()>& wait);

}  // namespace plimsoll
