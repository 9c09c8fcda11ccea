// SPDX-License-Identifier: Apache-2.0
//
// Metrics: scalars of a run, written for TensorBoard and, when asked, for MLflow.
//
// A failure to write a metric never ends a run: it is kept and returned by flush().
// Reading order: this file, metrics_tensorboard.h, metrics_mlflow.h.
//
// Threads: single-owner.   Memory: two small buffers; files are append-only.
#pragma once

#include <cstdint>
#include <filesystem>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <utility>

#include "plimsoll/result.h"

namespace plimsoll {

struct MetricsOptions {
  std::filesystem::path tensorboard{};  ///< RUN/metrics; empty: no event files.
  std::filesystem::path mlflow{};       ///< The folder given to --mlflow; empty: none.
  std::string experiment{"cosir"};
  std::string run_name{};
  /// The run folder: names the MLflow run, so that a resumption goes on in the same one.
  std::filesystem::path run{};
  std::span<const std::pair<std::string, std::string>> params{};
  std::int64_t resumed_step{-1};  ///< >= 0: later steps seen before are being done again.
};

class Metrics {
 public:
  /// Errors: kIo.
  static Result<Metrics> open(const MetricsOptions& options);
  Metrics(Metrics&&) noexcept;
  Metrics& operator=(Metrics&&) noexcept;
  ~Metrics();

  /// Records one value. `tag` is a path of [a-z0-9_./]: "loss/total", "memory/resident_bytes".
  void scalar(std::string_view tag, double value, std::int64_t step);

  /// Writes out what is buffered; call once per epoch and before a checkpoint is published.
  /// Errors: the first failure since the last call.
  Result<void> flush();

  /// Marks the run's end: "finished", "stopped" or "failed".
  Result<void> finish(std::string_view status);

 private:
  class Impl;
  explicit Metrics(std::unique_ptr<Impl> impl) noexcept;
  std::unique_ptr<Impl> impl_;
};

}  // namespace plimsoll
