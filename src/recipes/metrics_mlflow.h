// SPDX-License-Identifier: Apache-2.0
//
// MlflowRun: one run in MLflow's file layout, so that `mlflow ui --backend-store-uri DIR` shows it.
//
//   DIR/EXPERIMENT/meta.yaml
//   DIR/EXPERIMENT/RUN/{meta.yaml, params/KEY, metrics/KEY, tags/KEY, artifacts/}
//
// Threads: single-owner.   Memory: a few strings; every value is appended to its file at once.
#pragma once

#include <cstdint>
#include <filesystem>
#include <span>
#include <string>
#include <string_view>
#include <utility>

#include "plimsoll/result.h"

namespace plimsoll {

class MlflowRun {
 public:
  /// Starts a run in the experiment of this name under `root`, or goes on with the one whose id is
  /// in `id_file` (written by the first call).   Errors: kIo.
  static Result<MlflowRun> open(const std::filesystem::path& root, std::string_view experiment,
                                std::string_view run_name, const std::filesystem::path& id_file,
                                std::span<const std::pair<std::string, std::string>> params);

  Result<void> metric(std::string_view key, double value, std::int64_t step, std::int64_t wall_ms);

  /// "finished", "stopped" or "failed".
  Result<void> finish(std::string_view status, std::int64_t wall_ms);

  [[nodiscard]] const std::filesystem::path& directory() const noexcept { return directory_; }

 private:
  MlflowRun() = default;
  Result<void> write_meta(int status, std::int64_t end_ms);

  std::filesystem::path directory_{};
  std::string experiment_id_{};
  std::string run_id_{};
  std::string run_name_{};
  std::string user_{};
  std::int64_t start_ms_{0};
};

}  // namespace plimsoll
