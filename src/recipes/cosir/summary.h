// SPDX-License-Identifier: Apache-2.0
//
// RunSummary: what a run came to; its JSON form is the last line that `--json` prints.
//
// Threads: a value.   Memory: a few strings.
#pragma once

#include <cstdint>
#include <optional>
#include <string>

#include "run/stop.h"

namespace plimsoll {

struct RunSummary : RunEnd {
  std::int64_t epoch{0};  ///< Epochs completed.
  double loss{0.0};       ///< Mean over the last epoch's steps so far.
  double rows_per_second{0.0};
  double hit_rate{0.0};  ///< Of the embedding store.
  double feature_hit_rate{0.0};
  std::int64_t commits{0};
  double stall_seconds{0.0};             ///< Time the training thread waited for input and rows.
  std::int64_t rows_skipped{0};          ///< In batches too small for the loss.
  std::string recall_json{"{}"};         ///< An object; docs/recipes/cosir.md names its keys.
  std::string recall_before_json{"{}"};  ///< The same, before the first step.
  std::string phase2_json{"{}"};         ///< Accuracy per mode; {} without phase 2.

  /// One line of JSON. Numbers that are not finite become null.
  [[nodiscard]] std::string to_json() const;

  /// The same for a reader: a few aligned lines.
  [[nodiscard]] std::string to_text() const;
};

}  // namespace plimsoll
