// SPDX-License-Identifier: Apache-2.0
//
// What every run does around its steps, whatever it trains: begins or goes on, retries, commits,
// gives memory back, obeys, ends.
//
//   in_run_folder([](RunFolder&) {
//     published = begin_or_go_on(folder) → RunLoop::open() → RunLoop::begin()
//     step() → after_step() → … → save() → RunLoop::end()
//   })
//
// Reading order: control.h, limit_requests.h, run_report.h, this file, cosir.cpp.
//
// Threads: the thread that trains.   Memory: fixed.
#pragma once

#include <cstdint>
#include <functional>
#include <optional>
#include <string>

#include "plimsoll/governor.h"
#include "plimsoll/result.h"
#include "run/config.h"
#include "run/control.h"
#include "run/limit_requests.h"
#include "run/run_folder.h"
#include "run/stop.h"
#include "run/train_options.h"
#include "torch/admission.h"
#include "torch/run_report.h"

namespace plimsoll {

/// Makes the folder config.out with `run_toml`, or opens it to go on, and does `work` in it. Then
/// the arena is detached; after an error a folder in which nothing was committed is left as it was,
/// and otherwise the error is in its status. Errors: of the folder; of `work`.
Result<void> in_run_folder(const RunConfig& config, const std::string& run_toml,
                           const TrainOptions& options,
                           const std::function<Result<void>(RunFolder&)>& work);

/// The step that is committed, with what a crash left removed; none: the run begins (again).
Result<std::optional<std::int64_t>> begin_or_go_on(RunFolder& folder);

/// "memory pressure", or which limit was asked for and cannot be kept.
[[nodiscard]] std::string pressure_in_words(const Governor& governor);

class RunLoop {
 public:
  /// What a recipe says of its run.
  struct Callbacks {
    /// Writes and publishes the checkpoint of the step.
    std::function<Result<void>(std::int64_t step)> write{};
    /// Under pressure that nothing relieves: how the run would go on, "resume with …".
    std::function<std::string(const PressureReport&)> way_on{};
    /// Where other processes share the limit (rank_crew.h): the one for all of them, and what this
    /// one may hold of one for all. Empty: it is this process's.
    WholeLimit whole{};
    OwnLimit own{};
  };

  /// Signals ask for a stop from here on.
  RunLoop(const RunConfig& config, RunFolder& folder, Governor governor, Callbacks recipe);
  RunLoop(const RunLoop&) = delete;
  RunLoop& operator=(const RunLoop&) = delete;
  ~RunLoop();  ///< Ends the looks of open(), while the governor still knows what is held.

  /// saved_step: of the last commit; −1: none. The report is the caller's, and stays.
  Result<void> open(RunReport* report, std::int64_t saved_step);

  /// Before the first step: commits where nothing is committed yet, and obeys `plimsoll limit` from
  /// here on.
  Result<void> begin(const RunReport::Extent& extent);

  /// Does `work`, which becomes step number `step`: refused memory, once more after a purge. False:
  /// refused twice, nothing of it was applied and the run stops. Errors: of `work` but refusals.
  Result<bool> step(std::int64_t step, const std::function<Result<void>()>& work);

  /// Gives unused memory back; between steps, so that nothing that a step still needs is touched.
  Result<void> clean_up(std::int64_t step, const char* when);

  /// What the recipe did at a step by itself.
  struct Done {
    bool ends_epoch{false};
    bool cleaned_up{false};      ///< Unused memory was given back just now.
    bool commits_itself{false};  ///< A commit of its own follows.
  };

  /// Between two steps: what is due of giving memory back and of commits; pressure; limits, signals
  /// and files in the folder. Waits here while paused.
  Result<void> after_step(std::int64_t step, const Done& done);

  /// Commits the step, if it is not committed.
  Result<void> save(std::int64_t step);

  /// For an error of work beside the steps: true when it is none, but that work was given up
  /// (control.h), as the run is to end.
  [[nodiscard]] bool gives_up(const Error& error);

  /// Why the run is to end at this step; none: it goes on.
  [[nodiscard]] const std::optional<Stop>& stop() const noexcept { return stop_; }

  /// The last word: fills in what all runs have in their summaries. state_sha256 is the caller's.
  Result<void> end(std::int64_t step, RunEnd& end);

 private:
  Result<void> obey(std::int64_t step);
  Result<void> report_limits(std::int64_t step);

  const RunConfig& config_;
  RunFolder& folder_;
  Governor governor_;
  Callbacks recipe_;
  RunControl control_;
  StopSignals signals_{&control_};
  RunReport* report_{nullptr};
  std::optional<LimitRequests> limits_{};
  std::int64_t saved_step_{-1};
  std::optional<Stop> stop_{};
};

}  // namespace plimsoll
