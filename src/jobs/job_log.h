// SPDX-License-Identifier: Apache-2.0
//
// JobLog: a process that takes what a job prints into a file of bounded size, and looks for
// incidents.
//
// A job writes into a pipe as long as it likes; its log keeps the last kBytesMost to twice as much
// (PATH, and PATH.old before it). A full disk loses lines, and holds nobody up. It is a process of
// its own, so that a job that is asked to end may still print when its runner was killed.
//
// Threads: single-owner.
// Memory:  of the process: 64 KiB, and a line of kLineBytesMost; of each rule the line that matched
//          first.
#pragma once

#include <cstdint>
#include <filesystem>
#include <string>
#include <vector>

#include <sys/types.h>

#include "jobs/incident.h"
#include "os/fork.h"
#include "plimsoll/result.h"

namespace plimsoll {

class JobLog {
 public:
  static constexpr std::int64_t kBytesMost = 1 << 20;
  static constexpr std::size_t kLineBytesMost = 4096;  ///< Of a longer line the first ones count.
  static constexpr std::size_t kEvidenceBytesMost = 200;

  /// Starts the process; the log begins anew. Errors: kIo.
  static Result<JobLog> start(const std::filesystem::path& path, const IncidentRules& rules);
  JobLog(JobLog&& other) noexcept;
  JobLog& operator=(JobLog&&) = delete;
  ~JobLog();

  /// Where the job writes; for its process alone. This one closes it with close_input().
  [[nodiscard]] int input() const noexcept { return input_; }
  void close_input() noexcept;

  /// Waits until everybody who wrote is gone, at most five seconds; "line 812: …" of each rule, or
  /// "".
  [[nodiscard]] std::vector<std::string> finish();

 private:
  JobLog() = default;
  pid_t process_{-1};
  int input_{-1};
  int found_{-1};  // A memfd, a line for each rule.
  std::size_t rules_{0};
};

}  // namespace plimsoll
