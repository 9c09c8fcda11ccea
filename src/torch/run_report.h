// SPDX-License-Identifier: Apache-2.0
//
// What every run tells, whatever it trains: events, memory metrics, status file, progress.
//
// A recipe's own report derives from it and adds steps, epochs and evaluations. Nothing here
// touches what is trained. Reading order: run_folder.h, metrics.h, progress.h, this file.
//
// Threads: single-owner.   Memory: fixed.
#pragma once

#include <chrono>
#include <cstdint>
#include <initializer_list>
#include <string>
#include <string_view>

#include "plimsoll/governor.h"
#include "plimsoll/torch.h"
#include "run/limit_requests.h"
#include "run/metrics.h"
#include "run/progress.h"
#include "run/run_folder.h"

namespace plimsoll {

class RunReport {
 public:
  RunReport(RunFolder* folder, Metrics metrics, const ProgressOptions& progress, Governor governor);

  /// Warns of a run's folder on a network's file system, by its name ("NFS"); "" is none.
  Result<void> on_network(std::string_view name);

  /// How far the run has come when training begins, and how far it will go.
  struct Extent {
    std::int64_t step{0};
    std::int64_t steps_total{0};
    std::int64_t epoch{0};
    std::int64_t epochs{0};  ///< 0: not known yet.
    double loss{0.0};
  };
  /// Call once before training, at a step that is saved.
  void begin(const Extent& extent);

  /// A pressure move, or a refusal inside a step. A line for every owner that gave memory back,
  /// with what was resident before and after it.
  Result<void> pressure(std::int64_t step, const PressureReport& seen);
  /// What giving unused memory back has freed.
  Result<void> clean_up(std::int64_t step, const char* when, const CleanUp& done);
  /// A change of the limit, or why there was none.
  Result<void> limit(std::int64_t step, const LimitOutcome& outcome);
  Result<void> refusal(std::int64_t step, const Error& error, bool again);
  Result<void> commit(std::int64_t step, double seconds);

  /// status.json and the bar, as a phase other than training: "evaluating", "paused".
  Result<void> phase(const char* name);

  void text(const std::string& message) { progress_.text(message); }
  Result<void> event(const char* name, std::initializer_list<EventField> fields) {
    return folder_->event(name, fields);
  }
  /// The last status; "finished", "stopped" or "failed". `cause`: as RunStatus has it.
  Result<void> end(const std::string& status, const std::string& message, const char* cause);

  [[nodiscard]] double rows_per_second() const;
  [[nodiscard]] double seconds() const;
  [[nodiscard]] std::int64_t peak_resident() const { return status_.peak_resident_bytes; }

  /// Time spent outside training steps, such as evaluation, is not part of rows per second.
  class Aside {
   public:
    explicit Aside(RunReport& report) : report_(report), begin_(std::chrono::steady_clock::now()) {}
    ~Aside() { report_.aside_ += std::chrono::steady_clock::now() - begin_; }
    Aside(const Aside&) = delete;
    Aside& operator=(const Aside&) = delete;

   private:
    RunReport& report_;
    std::chrono::steady_clock::time_point begin_;
  };

 protected:
  void read_memory(bool force);
  /// Limit, leases and resident bytes, as metrics of this step.
  void memory_metrics(std::int64_t step);

  RunFolder* folder_;
  Metrics metrics_;
  Progress progress_;
  Governor governor_;
  RunStatus status_;
  double epoch_fraction_{0.0};
  std::int64_t rows_done_{0};

 private:
  Result<void> evictions(std::int64_t step, const EvictionLog& log);

  std::chrono::steady_clock::time_point begin_{std::chrono::steady_clock::now()};
  std::chrono::steady_clock::time_point train_begin_{begin_};
  std::chrono::steady_clock::time_point memory_read_{};
  std::chrono::steady_clock::duration aside_{};
};

}  // namespace plimsoll
