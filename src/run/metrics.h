// SPDX-License-Identifier: Apache-2.0
//
// Metrics: scalars of a run, written for TensorBoard. MLflow takes them from events.jsonl
// (plimsoll.log_to_mlflow, python/plimsoll/integrations/_mlflow.py).
//
// A failure to write a metric never ends a run: it is kept and returned by flush().
// Reading order: this file, metrics_tensorboard.h.
//
// Threads: single-owner.   Memory: the event file's buffer; files are append-only.
#pragma once

#include <cstdint>
#include <filesystem>
#include <optional>
#include <string_view>

#include "plimsoll/result.h"
#include "run/metrics_tensorboard.h"

namespace plimsoll {

class Metrics {
 public:
  /// Makes an event file in `folder`; an empty path: no event file, and scalars cost nothing.
  /// `resumed_step` >= 0: later steps seen before are being done again.   Errors: kIo.
  static Result<Metrics> open(const std::filesystem::path& folder, std::int64_t resumed_step = -1);

  /// Records one value. `tag` is a path of [a-z0-9_./]: "loss/total", "memory/resident_bytes".
  void scalar(std::string_view tag, double value, std::int64_t step);

  /// Writes out what is buffered; call once per epoch and before a checkpoint is published.
  /// Errors: the first failure since the last call.
  Result<void> flush();

 private:
  void keep(Result<void> done);

  std::optional<EventFile> events_{};
  Result<void> first_{};  // The first failure since the last flush().
};

}  // namespace plimsoll
