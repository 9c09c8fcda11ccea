// SPDX-License-Identifier: Apache-2.0
//
// The recipe `cosir`, from an empty folder to a trained model. Read it from train_cosir() at the
// end, then Run::train() and what it calls, top to bottom.
//
//   settle torch and the limit → open data and model, or the last checkpoint → rehearse a step and
//   admit it → evaluate → train epoch by epoch → evaluate → digest the state.
//
// Reading order: this file, step.h, loss.h, state.h, eval.h, hands.h.
//
// Threads: the thread that trains; loader, stores and torch run their own.
// Memory:  within the limit; the table of what was admitted is printed before the first step.
#include "recipes/cosir/cosir.h"

#include <fmt/format.h>

#include <algorithm>
#include <memory>
#include <optional>
#include <utility>

#include "base/check.h"
#include "plimsoll/bytes.h"
#include "recipes/cosir/data.h"
#include "recipes/cosir/eval.h"
#include "recipes/cosir/hands.h"
#include "recipes/cosir/plan.h"
#include "recipes/cosir/rehearsal.h"
#include "recipes/cosir/report.h"
#include "recipes/cosir/settle.h"
#include "recipes/cosir/state.h"
#include "recipes/cosir/step.h"
#include "torch/admission.h"
#include "torch/rank_crew.h"
#include "torch/run_loop.h"
#include "torch/settle.h"
#include "torch/step_tracer.h"

namespace plimsoll {
namespace {

using namespace cosir;

class Run {
 public:
  /// crew: nullptr, or the ranks that this one is the first of.
  Run(const CosirSettings& settings, const TrainOptions& options, RunFolder& folder,
      Governor governor, RankCrew* crew)
      : settings_(settings),
        config_(settings.config()),
        options_(options),
        folder_(folder),
        governor_(std::move(governor)),
        crew_(crew),
        loop_(config_, folder, governor_,
              {.write = [this](std::int64_t) { return write(); },
               .way_on = [this](const PressureReport& seen) { return way_on(seen); },
               .whole = whole_limit(crew),
               .own = own_limit(crew)}) {}

  /// What the data takes of the limit; nullptr while it is not open.
  [[nodiscard]] const DataShares* shares() const { return data_ ? &data_->shares() : nullptr; }

  Result<RunSummary> train() {
    PLIMSOLL_TRY_VOID(open());
    PLIMSOLL_TRY_VOID(admit());
    PLIMSOLL_TRY_VOID(train_epochs());
    return summarise_run();
  }

 private:
  Result<void> open();
  Result<void> admit();
  Result<void> train_epochs();
  Result<bool> step(const std::shared_ptr<Batch>& batch);
  Result<void> end_of_epoch(std::int64_t epoch);
  Result<void> write();
  [[nodiscard]] std::string way_on(const PressureReport& seen) const;
  Result<Evaluation> evaluate_now(const std::string& when, std::int64_t angles);
  Result<void> evaluate_at_end(RunSummary& summary);
  Result<RunSummary> summarise_run();

  [[nodiscard]] Position& at() { return state_->at; }
  [[nodiscard]] bool in_phase2(std::int64_t epoch) const { return epoch >= config_.epochs; }
  [[nodiscard]] std::int64_t epochs() const { return config_.epochs + config_.phase2_epochs; }

  const CosirSettings& settings_;
  const CosirConfig& config_;
  TrainOptions options_;
  RunFolder& folder_;
  Governor governor_;
  RankCrew* crew_;
  RunLoop loop_;
  std::unique_ptr<Data> data_;
  std::optional<State> state_;
  std::unique_ptr<Hands> hands_;
  std::optional<Stepper> stepper_;
  std::optional<Report> report_;
};

// Data, model and optimizers, as new or as the published checkpoint has them.
Result<void> Run::open() {
  PLIMSOLL_TRY(const auto step, begin_or_go_on(folder_));
  PLIMSOLL_TRY(data_,
               Data::open(governor_, config_,
                          {.embeddings = folder_.embeddings(), .at_step = step.value_or(-1)}));
  PLIMSOLL_TRY_VOID(folder_.check_identity(
      make_identity(settings_.identity(), data_->features().info().fingerprint),
      identity_changes(options_)));
  PLIMSOLL_TRY(const ModelShape shape,
               resolve_shape(config_, data_->image_dim(), data_->text_dim()));
  state_.emplace(config_, shape);
  at().loader.seed = seed_for(static_cast<std::uint64_t>(config_.seed), Purpose::kOrder);
  PLIMSOLL_TRY_VOID(governor_.check_disk_limit(
      "the run " + folder_.root().string() + ", its rows and its checkpoints,",
      data_->rows().plan().disk_cap_bytes + state_->disk_bytes(config_.keep_checkpoints)));
  if (step) {
    PLIMSOLL_TRY_VOID(state_->load(folder_, *step));
  }
  if (crew_ != nullptr) {
    PLIMSOLL_TRY(hands_,
                 Hands::open(*crew_, config_, state_->model, config_.batch_size, governor_));
  }
  stepper_.emplace(config_, &*state_, data_.get(), hands_.get());

  PLIMSOLL_TRY(auto metrics,
               Metrics::open(config_.tensorboard ? folder_.metrics() : "", step.value_or(-1)));
  report_.emplace(&folder_, std::move(metrics), options_.progress, config_, governor_);
  return loop_.open(&*report_, step.value_or(-1));
}

// Rehearses a step of each phase on the next batch, asks for what it needed, and puts the loader
// back. Gradients change nothing, so nothing else has to be undone.
Result<void> Run::admit() {
  const LoaderState start = at().loader;
  std::int64_t peak = 0;
  Refusals refusals;
  PLIMSOLL_TRY_VOID(data_->loader().seek(start));
  if (start.epoch < epochs()) {
    auto batch = std::make_shared<Batch>();
    PLIMSOLL_TRY_VOID(data_->loader().next(*batch));
    const auto rehearse = [&](bool second) -> Result<void> {
      PLIMSOLL_TRY(const std::int64_t here,
                   refusals.note(rehearse_step(
                       governor_, batch->rows(),
                       {.pair_bytes = kPairBytes,
                        .estimate = [this](std::int64_t) -> Result<std::int64_t> {
                          PLIMSOLL_TRY(const TensorNeeds most, tensors_at_most(config_));
                          return most.step;
                        }},
                       [&](std::int64_t rows) {
                         auto made =
                             second ? stepper_->phase2(batch, rows) : stepper_->phase1(batch, rows);
                         return made ? Result<void>{} : tl::unexpected(made.error());
                       })));
      peak = std::max(peak, here);
      return {};
    };
    if (batch->rows() >= 2 && !in_phase2(start.epoch)) {
      PLIMSOLL_TRY_VOID(data_->rows().begin_epoch(start.epoch));
      PLIMSOLL_TRY_VOID(rehearse(false));
    }
    if (batch->rows() >= 2 && config_.phase2_epochs > 0) {
      PLIMSOLL_TRY_VOID(rehearse(true));
      stepper_->forget_representatives();  // They are chosen again when phase 2 begins.
    }
  }
  PLIMSOLL_TRY_VOID(data_->loader().seek(start));
  if (hands_) {
    PLIMSOLL_TRY_VOID(refusals.note(hands_->admit()));
  }
  PLIMSOLL_TRY_VOID(refusals.note(
      admit_tensors(governor_, peak, fmt::format("a step of {} rows", config_.batch_size))));
  if (at().eval_peak == 0) {
    auto measured = measure_peak([&]() -> Result<void> {
      PLIMSOLL_TRY(const auto before, evaluate_now("before training", kFinalAngles));
      at().recall_before = before.to_json();
      return {};
    });
    if (!measured && measured.error().code == ErrorCode::kOverBudget) {
      measured = tl::unexpected(
          refused_bytes(governor_, "an evaluation", 2 * left_for_tensors(governor_.state())));
    }
    PLIMSOLL_TRY(at().eval_peak, refusals.note(std::move(measured)));
  }
  PLIMSOLL_TRY_VOID(refusals.note(admit_tensors(governor_, at().eval_peak, "an evaluation")));
  PLIMSOLL_TRY_VOID(refusals.outcome());
  const std::string table = admitted_table(governor_, peak, config_.batch_size);
  report_->text(table);
  return report_->event("admitted", {{"step_peak_bytes", peak},
                                     {"eval_peak_bytes", at().eval_peak},
                                     {"store_bytes", data_->bytes().store},
                                     {"cache_bytes", data_->bytes().cache},
                                     {"queue_bytes", data_->bytes().queue},
                                     {"table", std::string_view(table)}});
}

Result<void> Run::train_epochs() {
  PLIMSOLL_TRY_VOID(loop_.begin({.step = at().step,
                                 .steps_total = epochs() * data_->loader().batches_per_epoch(),
                                 .epoch = at().loader.epoch,
                                 .epochs = epochs(),
                                 .loss = at().mean_loss()}));
  std::vector<std::int64_t> upcoming;
  while (at().loader.epoch < epochs() && !loop_.stop()) {
    auto batch = std::make_shared<Batch>();
    PLIMSOLL_TRY_VOID(data_->loader().next(*batch));
    if (!in_phase2(batch->epoch())) {
      PLIMSOLL_TRY_VOID(data_->rows().begin_epoch(batch->epoch()));
      PLIMSOLL_TRY_VOID(data_->loader().upcoming_ids(upcoming));
      data_->rows().prefetch(upcoming);
    }
    PLIMSOLL_TRY(const bool done, step(batch));
    if (!done) {
      return {};  // Nothing of this step was applied; the last commit stands.
    }
    const std::int64_t epoch = batch->epoch();
    const bool ends = batch->ends_epoch();
    batch.reset();
    if (ends) {
      PLIMSOLL_TRY_VOID(end_of_epoch(epoch));
    }
    PLIMSOLL_TRY_VOID(loop_.after_step(at().step, {.ends_epoch = ends}));
  }
  return loop_.save(at().step);
}

// One optimizer step; a lone row has no loss and is passed over. False: memory was refused twice.
Result<bool> Run::step(const std::shared_ptr<Batch>& batch) {
  const bool second = in_phase2(batch->epoch());
  const bool skipped = batch->rows() < 2;
  if (batch->position() == 0) {
    at().loss_sum = 0.0;
    at().loss_steps = 0;
  }
  Gradients made;
  if (!skipped) {
    PLIMSOLL_TRY(const bool done, loop_.step(at().step + 1, [&]() -> Result<void> {
      made = Gradients{};
      PLIMSOLL_TRY(made, second ? stepper_->phase2(batch, batch->rows())
                                : stepper_->phase1(batch, batch->rows()));
      return {};
    }));
    if (!done) {
      return false;
    }
  }
  const double scale = second ? 1.0 : stepper_->rate_scale(at().step);
  if (second && !skipped) {
    stepper_->apply_labeller(made);
  } else if (!skipped) {
    PLIMSOLL_TRY_VOID(stepper_->apply(*batch, made));
  }
  at().step += 1;
  at().loader = batch->state_after();
  at().rows_skipped += skipped ? batch->rows() : 0;
  at().loss_sum += made.loss;
  at().loss_steps += skipped ? 0 : 1;
  PLIMSOLL_TRY_VOID(report_->step(at(), *batch, data_->split().train_rows(), made.loss,
                                  second ? nullptr : &made.terms, scale));
  return true;
}

Result<void> Run::end_of_epoch(std::int64_t epoch) {
  const Report::Aside aside{*report_};
  const auto due = [&](std::int64_t every) { return every > 0 && (epoch + 1) % every == 0; };
  PLIMSOLL_TRY_VOID(report_->epoch(at(), epoch, *data_, due(config_.stats_every_n_epochs)));
  if (due(config_.eval_every_n_epochs) && epoch + 1 < config_.epochs) {
    const auto seen = evaluate_now(fmt::format("after epoch {}", epoch + 1), config_.oracle_angles);
    return seen || loop_.gives_up(seen.error()) ? Result<void>{} : tl::unexpected(seen.error());
  }
  return {};
}

Result<Evaluation> Run::evaluate_now(const std::string& when, std::int64_t angles) {
  PLIMSOLL_TRY_VOID(report_->phase("evaluating"));
  const StoreStats before = data_->rows().stats();
  PLIMSOLL_TRY(auto result, evaluate(state_->model, data_->held_out(config_.eval_pairs),
                                     data_->trained(), eval_options(config_, angles)));
  report_->leave_out(before, data_->rows().stats());
  PLIMSOLL_TRY_VOID(report_->evaluation(when.c_str(), at(), result));
  PLIMSOLL_TRY_VOID(loop_.clean_up(at().step, "evaluation"));
  return result;
}

// Checkpoint, commit of the rows, manifest: all name this step.
Result<void> Run::write() {
  return state_->save(folder_, data_->rows(), config_.keep_checkpoints);
}

std::string Run::way_on(const PressureReport& seen) const {
  const std::int64_t limit =
      std::max(limit_to_resume(governor_, data_->shares()), seen.pressure ? seen.needed_bytes : 0);
  return resume_with(limit, whole_limit(crew_));
}

Result<void> Run::evaluate_at_end(RunSummary& summary) {
  PLIMSOLL_TRY(const auto after, evaluate_now("after training", kFinalAngles));
  summary.recall_json = after.to_json();
  if (config_.phase2_epochs > 0) {
    PLIMSOLL_TRY(const auto* chosen, stepper_->representatives());
    PLIMSOLL_TRY(const auto accuracy, phase2_accuracy(state_->model, state_->classifier, *chosen,
                                                      data_->held_out(config_.eval_pairs)));
    summary.phase2_json = accuracy.to_json();
    PLIMSOLL_TRY_VOID(
        report_->event("phase2", {{"accuracy", std::string_view(summary.phase2_json)}}));
  }
  return {};
}

Result<RunSummary> Run::summarise_run() {
  RunSummary summary = report_->summary(at(), *data_);
  summary.recall_before_json = at().recall_before;
  if (!loop_.stop()) {
    const auto seen = evaluate_at_end(summary);
    if (!seen && !loop_.gives_up(seen.error())) {
      return tl::unexpected(seen.error());
    }
  }
  PLIMSOLL_TRY(summary.state_sha256, state_->digest(data_->rows()));
  PLIMSOLL_TRY_VOID(loop_.end(at().step, summary));
  return summary;
}

Result<RunSummary> train_in(const CosirSettings& settings, const TrainOptions& options,
                            RunFolder& folder, std::optional<std::int64_t> baseline_bytes,
                            RankCrew* crew) {
  CosirConfig config = settings.config();
  if (crew != nullptr) {
    PLIMSOLL_TRY_VOID(crew->take_share(config));
  }
  auto settled = settle(config, folder.root(), baseline_bytes);
  if (!settled) {
    Error error = std::move(settled).error();
    const bool tight = error.code == ErrorCode::kOverBudget && !options.resume;
    const std::int64_t baseline = error.baseline_bytes;
    return tl::unexpected(
        tight ? refused_before_start(settings.config(), baseline, nullptr, std::move(error))
              : std::move(error));
  }
  Governor governor = std::move(*settled);
  Run run{settings, options, folder, governor, crew};
  RunSummary summary;
  Result<void> result = without_refusal([&]() -> Result<void> {
    PLIMSOLL_TRY(summary, run.train());
    return {};
  });
  // Before there is anything to resume a refusal says with which limit to begin.
  PLIMSOLL_TRY(const auto saved, folder.published_step());
  if (!result && !saved && result.error().code == ErrorCode::kOverBudget) {
    Error error = std::move(result).error();
    error.limit_bytes = governor.state().limit_bytes;
    result = tl::unexpected(refused_before_start(settings.config(), governor.state().baseline_bytes,
                                                 run.shares(), std::move(error)));
  }
  PLIMSOLL_TRY_VOID(result);
  return summary;
}

// "auto" becomes a number here, once: it is part of the run's identity from its first step on.
// Returns what the process began with.
Result<std::int64_t> resolve_batch_size(CosirSettings& settings, const ProgressOptions& progress) {
  PLIMSOLL_TRY(const CosirPlan plan, plan_cosir(settings));
  Progress(progress).text(plan.to_text());
  PLIMSOLL_TRY_VOID(
      settings.set("batch_size", fmt::format("{}", plan.batch.batch_size),
                   fmt::format("auto, planned: {}, peak {}", label_name(plan.batch.label),
                               format_bytes(plan.batch.peak.bytes))));
  return plan.baseline_bytes;
}

}  // namespace

Result<RunSummary> train_cosir(const CosirSettings& given, const TrainOptions& options,
                               RankCrew* crew) {
  CosirSettings settings = given;
  const CosirConfig& config = settings.config();
  if (crew != nullptr) {
    PLIMSOLL_TRY_VOID(crew->takes_batch(config.batch_size));
  }
  std::optional<std::int64_t> baseline_bytes;
  if (config.batch_size == 0 && !RunFolder::is_run(config.out)) {
    const StopSignals signals;  // A plan is given up when it is asked to stop.
    PLIMSOLL_TRY(baseline_bytes, resolve_batch_size(settings, options.progress));
  }
  RunSummary summary;
  PLIMSOLL_TRY_VOID(
      in_run_folder(config, settings.to_toml(), options, [&](RunFolder& folder) -> Result<void> {
        PLIMSOLL_TRY(summary, train_in(settings, options, folder, baseline_bytes, crew));
        return {};
      }));
  return summary;
}

}  // namespace plimsoll
