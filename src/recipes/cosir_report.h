// SPDX-License-Identifier: Apache-2.0
//
// What a `cosir` run tells: events, metrics, status file, progress, statistics in words.
//
// Nothing here touches what is trained. Reading order: run_folder.h, metrics.h, progress.h.
//
// Threads: single-owner.   Memory: fixed.
#pragma once

#include <chrono>
#include <cstdint>
#include <string>

#include "plimsoll/embedding_store.h"
#include "plimsoll/governor.h"
#include "plimsoll/torch.h"
#include "recipes/cosir_data.h"
#include "recipes/cosir_loss.h"
#include "recipes/cosir_state.h"
#include "recipes/limit_requests.h"
#include "recipes/metrics.h"
#include "recipes/progress.h"
#include "recipes/run_folder.h"
#include "recipes/summary.h"

namespace plimsoll::cosir {

class Report {
 public:
  Report(RunFolder* folder, Metrics metrics, const ProgressOptions& progress,
         const CosirConfig& config, Governor governor);

  /// Totals for the bar; call once before training.
  void begin(std::int64_t steps_total, std::int64_t epochs);

  /// One line in events.jsonl per step; metrics and status at their own pace.
  Result<void> step(const Position& at, const Batch& batch, std::int64_t train_rows, double loss,
                    const std::array<double, kTerms>* terms, double rate_scale);

  /// A pressure move, or a refusal inside a step. A line for every owner that gave memory back,
  /// with what was resident before and after it.
  Result<void> pressure(std::int64_t step, const PressureReport& seen);
  /// What giving unused memory back has freed.
  Result<void> clean_up(std::int64_t step, const char* when, const CleanUp& done);
  /// A change of the limit, or why there was none.
  Result<void> limit(std::int64_t step, const LimitOutcome& outcome);
  Result<void> refusal(std::int64_t step, const Error& error, bool again);

  Result<void> evaluation(const char* when, const Position& at, const Evaluation& result);
  Result<void> commit(const Position& at, double seconds);

  /// Statistics of the caches in words, with advice; and memory metrics. Once per epoch.
  Result<void> epoch(const Position& at, std::int64_t epoch, Data& data, bool words);

  /// status.json and the bar, as a phase other than training: "evaluating", "paused".
  Result<void> phase(const char* name);

  void text(const std::string& message) { progress_.text(message); }
  Result<void> event(const char* name, std::initializer_list<EventField> fields) {
    return folder_->event(name, fields);
  }
  /// Figures of the run as it stands; status, recall and digest are the caller's.
  RunSummary summary(const Position& at, Data& data) const;
  /// The last status; "finished", "stopped" or "failed".
  Result<void> end(const std::string& status, const std::string& message);

  /// Requests to the rows' table by evaluations do not count as training's.
  void leave_out(const StoreStats& before, const StoreStats& after);
  [[nodiscard]] double hit_rate(const StoreStats& stats) const;

  [[nodiscard]] double rows_per_second() const;
  [[nodiscard]] double seconds() const;
  [[nodiscard]] std::int64_t peak_resident() const { return status_.peak_resident_bytes; }

  /// Time spent outside training steps, such as evaluation, is not part of rows per second.
  class Aside {
   public:
    explicit Aside(Report& report) : report_(report), begin_(std::chrono::steady_clock::now()) {}
    ~Aside() { report_.aside_ += std::chrono::steady_clock::now() - begin_; }
    Aside(const Aside&) = delete;
    Aside& operator=(const Aside&) = delete;

   private:
    Report& report_;
    std::chrono::steady_clock::time_point begin_;
  };

 private:
  void read_memory(bool force);
  Result<void> evictions(std::int64_t step, const EvictionLog& log);

  RunFolder* folder_;
  Metrics metrics_;
  Progress progress_;
  Governor governor_;
  std::int64_t metrics_every_{10};
  RunStatus status_;
  double epoch_fraction_{0.0};
  std::int64_t rows_done_{0};
  StoreStats left_out_{};
  std::chrono::steady_clock::time_point begin_{std::chrono::steady_clock::now()};
  std::chrono::steady_clock::time_point train_begin_{begin_};
  std::chrono::steady_clock::time_point memory_read_{};
  std::chrono::steady_clock::duration aside_{};
};

/// The cache statistics of a table, in words: hit rate, requests, disk share, syncs, use of each
/// tier, and what to change.
std::string store_words(const StoreStats& stats, const StoreStats& left_out, const SlabPlan& plan,
                        const FeatureStats& features);

}  // namespace plimsoll::cosir
