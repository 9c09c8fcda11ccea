// SPDX-License-Identifier: Apache-2.0
//
// Work: what a task does, step by step; the run (can_kd.cpp) does everything around the steps.
//
// Reading order: task.h, this file, training.h, fusion.h.
//
// Threads: single-owner.   Memory: said by each.
#pragma once

#include <cstdint>
#include <filesystem>
#include <map>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "plimsoll/result.h"
#include "torch/checkpoint.h"

namespace plimsoll::can_kd {

/// What one step came to.
struct StepNews {
  double loss{0.0};
  std::vector<std::pair<const char*, double>> terms{};
  std::int64_t graphs{0};
  std::int64_t epoch{0};       ///< That the step was part of.
  double epoch_fraction{0.0};  ///< Of it done, this step included.
  double rate_scale{1.0};
  bool ends_epoch{false};
};

/// What an epoch came to; for the report.
struct EpochNews {
  std::int64_t epoch{0};
  std::int64_t epochs{0};
  double loss{0.0};      ///< Mean over the epoch's steps.
  double held_out{0.0};  ///< Mean over the graphs held out.
  bool best{false};
  std::int64_t scored{0};  ///< Graphs whose difficulty was found for this epoch, and how long …
  double scoring_seconds{0.0};  ///< … that took.
  /// "graphs", "curriculum/normals", "test/f1", …: names of metrics.
  std::vector<std::pair<std::string, double>> figures{};
};

class Work {
 public:
  virtual ~Work() = default;

  /// One optimizer step. When it fails nothing of it was applied, and it may be tried again.
  virtual Result<StepNews> step() = 0;

  /// After a step that ended an epoch: validation, the next epoch's graphs. When it fails nothing
  /// of it was done, and it may be tried again, after a resumption too.
  virtual Result<EpochNews> end_epoch() = 0;
  /// A step has ended an epoch, and end_epoch() comes next.
  [[nodiscard]] virtual bool epoch_over() const { return false; }

  [[nodiscard]] virtual bool finished() const = 0;
  [[nodiscard]] virtual std::int64_t epochs() const = 0;
  /// Steps of all epochs, as far as one can tell now.
  [[nodiscard]] virtual std::int64_t steps() const = 0;

  /// Everything that a resumption needs, and puts back.
  [[nodiscard]] virtual std::vector<NamedTensor> tensors() const = 0;
  [[nodiscard]] virtual std::map<std::string, double> numbers() const = 0;
  virtual Result<void> restore(const std::map<std::string, double>& numbers) = 0;

  /// The model as it is to be used: the best of its epochs. Errors: kIo.
  virtual Result<void> save_model(const std::filesystem::path& path) const = 0;
  [[nodiscard]] virtual std::int64_t parameters() const = 0;
};

/// A number of a checkpoint; `otherwise` where it has none.
[[nodiscard]] inline double number_of(const std::map<std::string, double>& numbers,
                                      const std::string& name, double otherwise) {
  const auto found = numbers.find(name);
  return found == numbers.end() ? otherwise : found->second;
}

}  // namespace plimsoll::can_kd
