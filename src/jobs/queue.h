// SPDX-License-Identifier: Apache-2.0
//
// Queue: a folder of jobs that any process adds to, and one runs (runner.h).
//
//   DIR/jobs/7.json   a job, a sealed file, replaced whole        DIR/logs/7.log, 7.log.old
//   DIR/jobs/.lock    held for a moment by who changes a job      DIR/.lock   held by the runner
//
// A job that add() returned is there after kill -9 and after a power failure. Of those that ended
// the last kEndedMost are kept, with their logs.
//
// Threads: single-owner; any number of processes.
// Memory:  8 bytes a job; one record at a time. On disk: at most kWaitingMost + kEndedMost jobs of
//          Job::kRecordBytesMost, and 2 * JobLog::kBytesMost of log for each that was started.
#pragma once

#include <cstdint>
#include <filesystem>
#include <functional>
#include <vector>

#include "jobs/job.h"
#include "os/folder_lock.h"
#include "plimsoll/result.h"

namespace plimsoll {

class Queue {
 public:
  static constexpr std::int64_t kWaitingMost = 1000;
  static constexpr std::int64_t kEndedMost = 200;

  /// Makes the folder where there is none. Errors: kIo.
  static Result<Queue> make(const std::filesystem::path& folder);
  /// Errors: kNotFound where there is no queue; kIo.
  static Result<Queue> open(const std::filesystem::path& folder);

  /// Takes the job in, durably, and returns its number. Errors: kInvalidArgument when kWaitingMost
  /// wait already, or when it is too large; kIo.
  Result<std::int64_t> add(Job job);

  /// Numbers of all jobs, smallest first. Errors: kIo.
  [[nodiscard]] Result<std::vector<std::int64_t>> ids() const;
  /// Errors: kNotFound; kCorrupt, naming the file; kIo.
  [[nodiscard]] Result<Job> read(std::int64_t id) const;
  /// Reads, changes and writes a job while nobody else does; returns it as written. Errors: as
  /// read().
  Result<Job> change(std::int64_t id, const std::function<void(Job&)>& how);

  /// A job that waits is cancelled; one that runs is asked to end. True: it was not over yet.
  /// Errors: as read().
  Result<bool> cancel(std::int64_t id);

  /// The right to run the queue, of one process at a time. Errors: kInvalidArgument naming it; kIo.
  [[nodiscard]] Result<FolderLock> lock_runner() const;
  /// Whether somebody runs it.
  [[nodiscard]] bool runs() const { return FolderLock::held(folder_); }

  [[nodiscard]] const std::filesystem::path& folder() const noexcept { return folder_; }
  [[nodiscard]] std::filesystem::path log_of(std::int64_t id) const;

 private:
  explicit Queue(std::filesystem::path folder) : folder_(std::move(folder)) {}
  [[nodiscard]] std::filesystem::path file_of(std::int64_t id) const;
  [[nodiscard]] Result<FolderLock> lock_jobs() const;
  Result<void> write(const Job& job) const;
  Result<void> make_room(const std::vector<std::int64_t>& ids) const;

  std::filesystem::path folder_;
};

/// Seconds since 1970.
[[nodiscard]] std::int64_t unix_now() noexcept;

}  // namespace plimsoll
