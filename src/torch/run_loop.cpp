// SPDX-License-Identifier: Apache-2.0
//
// Threads: the thread that trains.   Memory: fixed.
#include "torch/run_loop.h"

#include <fmt/format.h>

#include <chrono>
#include <utility>

#include "base/check.h"
#include "os/file_system.h"
#include "plimsoll/bytes.h"
#include "plimsoll/torch.h"
#include "run/page.h"
#include "torch/admission.h"
#include "watch/inside.h"

namespace plimsoll {
namespace {

// Leaves the folder of a run that ended with `error` as it should be: emptied when there is nothing
// to resume, so that a new run may take it; else with the error in its status.
void leave_failed(RunFolder& folder, const Error& error) {
  if (const auto saved = folder.published_step(); saved && !saved->has_value()) {
    folder.abandon();
  }
  if (RunFolder::is_run(folder.root())) {
    RunStatus status;
    status.status = "failed";
    status.message = error.to_string();
    status.cause = cause_of(error);
    static_cast<void>(folder.write_status(status, /*force=*/true));
    static_cast<void>(write_report(folder.root()));
  }
}

}  // namespace

Result<void> in_run_folder(const RunConfig& config, const std::string& run_toml,
                           const TrainOptions& options,
                           const std::function<Result<void>(RunFolder&)>& work) {
  PLIMSOLL_TRY(RunFolder folder, options.resume ? RunFolder::open(config.out)
                                                : RunFolder::create(config.out, run_toml));
  if (options.resume) {
    PLIMSOLL_TRY_VOID(folder.write_config(run_toml));
  }
  const Result<void> done = work(folder);
  TensorArena::detach();
  if (!done) {
    leave_failed(folder, done.error());
  }
  return done;
}

Result<std::optional<std::int64_t>> begin_or_go_on(RunFolder& folder) {
  PLIMSOLL_TRY(const auto published, folder.published_step());
  PLIMSOLL_TRY_VOID(folder.discard_unpublished());
  if (!published) {  // Ended before its first commit: it begins again, on new tables.
    PLIMSOLL_TRY_VOID(folder.discard_rows());
  }
  return published;
}

std::string pressure_in_words(const Governor& governor) {
  const LedgerState ledger = governor.state();
  return ledger.asked_bytes < ledger.limit_bytes
             ? fmt::format("memory limit: {} is asked for, and {} cannot be given up",
                           format_bytes(ledger.asked_bytes), format_bytes(ledger.limit_bytes))
             : std::string("memory pressure");
}

RunLoop::RunLoop(const RunConfig& config, RunFolder& folder, Governor governor, Callbacks recipe)
    : config_(config),
      folder_(folder),
      governor_(std::move(governor)),
      recipe_(std::move(recipe)),
      control_(folder.root()) {}

RunLoop::~RunLoop() {
  folder_.end_record();
}

Result<void> RunLoop::open(RunReport* report, std::int64_t saved_step) {
  report_ = report;
  saved_step_ = saved_step;
  folder_.record(governor_, [] { return inside_now(); });
  return report_->on_network(network_file_system(folder_.root()));
}

Result<void> RunLoop::begin(const RunReport::Extent& extent) {
  PLIMSOLL_TRY_VOID(save(extent.step));  // From here on there is always something to resume.
  limits_.emplace(governor_, folder_.root(), recipe_.own);
  report_->begin(extent);
  return {};
}

Result<bool> RunLoop::step(std::int64_t step, const std::function<Result<void>()>& work) {
  for (const bool again : {false, true}) {
    const auto done = without_refusal(work);
    if (done) {
      return true;
    }
    if (done.error().code != ErrorCode::kOverBudget) {
      return tl::unexpected(done.error());
    }
    PLIMSOLL_TRY_VOID(report_->refusal(step, done.error(), again));
    if (!again) {
      TensorArena::purge();  // The only move there is inside a step; then the same step again.
    }
  }
  stop_ = Stop{Stop::Cause::kMemory, fmt::format("memory refused twice in step {}; {}", step,
                                                 larger_limit(governor_, recipe_.whole))};
  return false;
}

Result<void> RunLoop::clean_up(std::int64_t step, const char* when) {
  PLIMSOLL_TRY(const CleanUp done, plimsoll::clean_up());
  return report_->clean_up(step, when, done);
}

Result<void> RunLoop::after_step(std::int64_t step, const Done& done) {
  const auto due = [&](std::int64_t every) { return every > 0 && step % every == 0; };
  if (!done.cleaned_up && due(config_.cleanup_every_n_steps)) {
    PLIMSOLL_TRY_VOID(clean_up(step, "step"));
  }
  const PressureReport seen = governor_.step_boundary();
  PLIMSOLL_TRY_VOID(report_->pressure(step, seen));
  const std::int64_t every = config_.checkpoint_every_n_steps;
  if (!done.commits_itself && (every > 0 ? due(every) : done.ends_epoch)) {
    PLIMSOLL_TRY_VOID(save(step));
  }
  if (seen.stop) {
    stop_ = Stop{Stop::Cause::kMemory, pressure_in_words(governor_) + "; " + recipe_.way_on(seen)};
  }
  return obey(step);
}

Result<void> RunLoop::obey(std::int64_t step) {
  PLIMSOLL_TRY_VOID(report_limits(step));
  Request request = control_.poll();
  if (request == Request::kPause) {
    const RunReport::Aside aside{*report_};
    PLIMSOLL_TRY_VOID(save(step));
    Result<void> told{};
    request = control_.wait_while_paused([&] {
      told = report_limits(step);
      told = told ? report_->phase("paused") : told;
    });
    PLIMSOLL_TRY_VOID(told);
  }
  if (request == Request::kStop) {
    stop_ = Stop{Stop::Cause::kAsked, control_.reason()};
  }
  return {};
}

bool RunLoop::gives_up(const Error& error) {
  const bool stops = was_given_up(error) && control_.poll() == Request::kStop;
  if (stops) {
    stop_ = Stop{Stop::Cause::kAsked, control_.reason()};
  }
  return stops;
}

Result<void> RunLoop::report_limits(std::int64_t step) {
  for (const LimitOutcome& outcome : limits_->take()) {
    PLIMSOLL_TRY_VOID(report_->limit(step, outcome));
  }
  return {};
}

Result<void> RunLoop::save(std::int64_t step) {
  if (step == saved_step_) {
    return {};
  }
  const auto begin = std::chrono::steady_clock::now();
  PLIMSOLL_TRY_VOID(recipe_.write(step));
  saved_step_ = step;
  const std::chrono::duration<double> spent = std::chrono::steady_clock::now() - begin;
  return report_->commit(step, spent.count());
}

Result<void> RunLoop::end(std::int64_t step, RunEnd& end) {
  end.stop = stop_;
  end.run = folder_.root().string();
  end.step = step;
  end.limit_bytes = governor_.state().limit_bytes;
  end.limit_source = governor_.limit().explain();
  PLIMSOLL_TRY_VOID(report_->end(end.status(), stop_ ? stop_->why : "",
                                 stop_ ? stop_->cause_name() : "finished"));
  folder_.end_record();
  static_cast<void>(write_report(folder_.root()));  // A page that cannot be written ends nothing.
  end.seconds = report_->seconds();
  end.peak_resident_bytes = report_->peak_resident();
  end.leased_peak_bytes = governor_.state().leased_peak_bytes;
  return {};
}

}  // namespace plimsoll
