// SPDX-License-Identifier: Apache-2.0
//
// What a `cosir` run tells beside what every run does: steps, evaluations, caches in words.
//
// Nothing here touches what is trained. Reading order: run_report.h, this file.
//
// Threads: single-owner.   Memory: fixed.
#pragma once

#include <array>
#include <cstdint>
#include <string>

#include "plimsoll/embedding_store.h"
#include "plimsoll/governor.h"
#include "recipes/cosir/data.h"
#include "recipes/cosir/loss.h"
#include "recipes/cosir/state.h"
#include "recipes/cosir/summary.h"
#include "run/metrics.h"
#include "torch/run_report.h"

namespace plimsoll::cosir {

class Report : public RunReport {
 public:
  Report(RunFolder* folder, Metrics metrics, const ProgressOptions& progress,
         const CosirConfig& config, Governor governor);

  /// One line in events.jsonl per step; metrics and status at their own pace.
  Result<void> step(const Position& at, const Batch& batch, std::int64_t train_rows, double loss,
                    const std::array<double, kTerms>* terms, double rate_scale);

  Result<void> evaluation(const char* when, const Position& at, const Evaluation& result);

  /// Statistics of the caches in words, with advice; and memory metrics. Once per epoch.
  Result<void> epoch(const Position& at, std::int64_t epoch, Data& data, bool words);

  /// Figures of training as it stands; the rest is the caller's.
  RunSummary summary(const Position& at, Data& data) const;

  /// Requests to the rows' table by evaluations do not count as training's.
  void leave_out(const StoreStats& before, const StoreStats& after);
  [[nodiscard]] double hit_rate(const StoreStats& stats) const;

 private:
  std::int64_t metrics_every_{10};
  StoreStats left_out_{};
};

/// The cache statistics of a table, in words: hit rate, requests, disk share, syncs, use of each
/// tier, and what to change.
std::string store_words(const StoreStats& stats, const StoreStats& left_out, const SlabPlan& plan,
                        const FeatureStats& features);

}  // namespace plimsoll::cosir
