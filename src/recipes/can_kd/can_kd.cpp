// SPDX-License-Identifier: Apache-2.0
//
// The recipe `can-kd`, from a graph set to a tested student. Read it from train_can_kd() at the
// end, then Run::train() and what it calls.
//
//   settle torch and the limit → open the graphs, and the last checkpoint → rehearse a step of
//   every task that is left and admit the largest → task by task: steps, validation, the finished
//   model's file → evaluate.
//
// Reading order: this file, task.h, work.h, training.h, fusion.h, evaluation.h.
//
// Threads: the thread that trains; torch runs its own.   Memory: within the limit.
#include "recipes/can_kd/can_kd.h"

#include <c10/core/GradMode.h>
#include <fmt/format.h>

#include <algorithm>
#include <filesystem>
#include <memory>
#include <optional>
#include <set>
#include <utility>

#include "base/check.h"
#include "data/disk_room.h"
#include "data/safetensors.h"
#include "os/directories.h"
#include "os/file.h"
#include "plimsoll/bytes.h"
#include "plimsoll/torch.h"
#include "recipes/can_kd/data.h"
#include "recipes/can_kd/evaluation.h"
#include "recipes/can_kd/fusion.h"
#include "recipes/can_kd/hands.h"
#include "recipes/can_kd/models.h"
#include "recipes/can_kd/planning.h"
#include "recipes/can_kd/report.h"
#include "recipes/can_kd/task.h"
#include "recipes/can_kd/teacher_file.h"
#include "recipes/can_kd/training.h"
#include "run/run_folder.h"
#include "torch/admission.h"
#include "torch/rank_crew.h"
#include "torch/run_loop.h"
#include "torch/settle.h"

namespace plimsoll {
namespace {

using namespace can_kd;
namespace fs = std::filesystem;

constexpr std::int64_t kDigestBytes = 1 << 20;

// Adds a whole file to a digest, in pieces.
Result<void> add_file(StateDigest& digest, const std::string& name, const fs::path& path) {
  std::vector<std::byte> buffer(kDigestBytes);
  PLIMSOLL_TRY(const File file, File::open(path, FileMode::kRead));
  PLIMSOLL_TRY(const std::int64_t size, file.size());
  for (std::int64_t at = 0; at < size; at += kDigestBytes) {
    const auto part =
        std::span(buffer).first(static_cast<std::size_t>(std::min(kDigestBytes, size - at)));
    PLIMSOLL_TRY_VOID(file.read_at(at, part));
    digest.add(name, part);
  }
  return {};
}

class Run {
 public:
  /// crew: nullptr, or the ranks that this one is the first of.
  Run(const CanKdSettings& settings, const TrainOptions& options, RunFolder& folder,
      Governor governor, RankCrew* crew)
      : settings_(settings),
        config_(settings_.config()),
        options_(options),
        folder_(folder),
        governor_(std::move(governor)),
        crew_(crew),
        loop_(config_, folder, governor_,
              {.write = [this](std::int64_t step) { return write(step); },
               .way_on = [this](const PressureReport& seen) { return way_on(seen); },
               .whole = whole_limit(crew),
               .own = own_limit(crew)}) {}

  Result<CanKdSummary> train();

 private:
  /// A task's work, and the teacher it asks.
  struct Bench {
    std::unique_ptr<Teacher> teacher;
    std::unique_ptr<Work> work;
  };
  Result<void> open();
  Result<void> choose_batch_size();
  Result<void> list_tasks();
  Result<void> admit();
  Result<void> prepare(const Task& task);
  Result<TeacherOptions> teacher_of(const Task& task) const;
  Result<void> require(const Task& needed, const Task& by) const;
  Result<void> do_task(const Task& task);
  Result<void> finish_task(const Task& task);
  Result<bool> step(const Task& task);
  Result<void> write(std::int64_t step);
  [[nodiscard]] std::string way_on(const PressureReport& seen) const;
  Result<CanKdSummary> summarise_run();
  Result<std::string> digest() const;

  [[nodiscard]] bool is_done(const Task& task) const { return done_.contains(task.name()); }
  [[nodiscard]] fs::path cache_file(const Task& task) const {
    return folder_.root() / "cache" / (task.name() + ".answers");
  }
  /// Of a teacher that another program saved, under our names.
  [[nodiscard]] fs::path teacher_copy(const Task& task) const {
    return folder_.root() / "cache" / (task.name() + ".teacher.safetensors");
  }

  CanKdSettings settings_;
  const CanKdConfig& config_;
  TrainOptions options_;
  RunFolder& folder_;
  Governor governor_;
  RankCrew* crew_;
  RunLoop loop_;
  std::unique_ptr<Data> data_;
  std::unique_ptr<Hands> hands_;
  std::optional<Report> report_;
  std::vector<Task> tasks_;                   // Still to be done, in order.
  std::set<std::string> done_;                // Names of finished tasks.
  std::string current_;                       // The task in progress; "" between two.
  std::optional<std::int64_t> resumed_step_;  // Of the checkpoint that holds current_.
  Bench bench_;
  std::string teacher_sha256_;  // Of the teacher's file: a resumption asks the same teacher.
  std::int64_t step_{0};
  Evaluated evaluated_;
};

Result<CanKdSummary> Run::train() {
  PLIMSOLL_TRY_VOID(open());
  PLIMSOLL_TRY_VOID(list_tasks());
  PLIMSOLL_TRY_VOID(admit());
  PLIMSOLL_TRY_VOID(loop_.begin({.step = step_, .steps_total = step_}));
  for (const Task& task : tasks_) {
    if (loop_.stop()) {
      break;
    }
    const auto did = do_task(task);
    if (!did && !loop_.gives_up(did.error())) {
      return tl::unexpected(did.error());
    }
    if (!did && bench_.work) {
      PLIMSOLL_TRY_VOID(loop_.save(step_));  // Given up between two steps.
    }
  }
  return summarise_run();
}

// The graphs, and how far the published checkpoint had come.
Result<void> Run::open() {
  PLIMSOLL_TRY(const auto published, begin_or_go_on(folder_));
  PLIMSOLL_TRY(data_, open_data(governor_, config_));
  if (crew_ != nullptr) {
    PLIMSOLL_TRY(hands_, Hands::open(*crew_, config_, *data_, governor_));
  }
  if (config_.batch_size == 0) {
    PLIMSOLL_TRY_VOID(choose_batch_size());
  }
  PLIMSOLL_TRY_VOID(
      folder_.check_identity(make_identity(settings_.identity(), data_->set().info().fingerprint),
                             identity_changes(options_)));
  if (published) {
    PLIMSOLL_TRY(const auto state, read_checkpoint_state(folder_.checkpoint_path(*published)));
    step_ = state.step;
    resumed_step_ = state.step;
    if (const auto found = state.texts.find("task"); found != state.texts.end()) {
      current_ = found->second;
    }
    for (const Task& task : all_tasks()) {
      if (state.numbers.contains("done." + task.name())) {
        done_.insert(task.name());
      }
    }
  }
  PLIMSOLL_TRY(auto metrics,
               Metrics::open(config_.tensorboard ? folder_.metrics() : "", published.value_or(-1)));
  report_.emplace(&folder_, std::move(metrics), options_.progress, config_, governor_);
  PLIMSOLL_TRY_VOID(loop_.open(&*report_, published.value_or(-1)));
  if (config_.precision == "16-mixed") {
    report_->text(
        "precision 16-mixed: on the CPU matrices are multiplied in bfloat16, which does "
        "not overflow as float16 does");
  }
  for (const char* folder : {"models", "cache"}) {
    PLIMSOLL_TRY_VOID(make_directories(folder_.root() / folder));
  }
  return {};
}

// "auto" becomes a number here, once, and is part of the run from its first step on.
Result<void> Run::choose_batch_size() {
  PLIMSOLL_TRY(const auto plans, plan_tasks(governor_, config_, *data_, /*timed=*/false));
  std::int64_t chosen = config_.batch_size_max;
  std::string why = "auto, nothing to train";
  if (!plans.empty()) {
    const TaskPlan& least = tightest(plans);
    chosen = least.batch.batch_size;
    why = fmt::format("auto, planned for {}: {}, peak {}", least.task.name(),
                      label_name(least.batch.label), format_bytes(least.batch.peak.bytes));
  }
  PLIMSOLL_TRY_VOID(settings_.set("batch_size", fmt::format("{}", chosen), why));
  return folder_.write_config(settings_.to_toml());
}

// What is asked for and not done; what was interrupted comes first. Each names what it lacks now,
// not an hour later.
Result<void> Run::list_tasks() {
  const auto wanted = wanted_tasks(config_);
  for (const Task& task : all_tasks()) {
    const bool asked = std::find(wanted.begin(), wanted.end(), task) != wanted.end();
    if (task.name() == current_ || (asked && !is_done(task))) {
      tasks_.push_back(task);
    }
  }
  std::stable_partition(tasks_.begin(), tasks_.end(),
                        [&](const Task& task) { return task.name() == current_; });
  for (const Task& task : tasks_) {
    const Task autoencoder{task.role, Stage::kAutoencoder};
    if (task.stage == Stage::kFusion) {
      PLIMSOLL_TRY_VOID(require(autoencoder, task));
      PLIMSOLL_TRY_VOID(require(classifier_task(task.role, config_), task));
    }
    if (task.stage == Stage::kCurriculum && config_.use_vgae_mining) {
      PLIMSOLL_TRY_VOID(require(autoencoder, task));
    }
    const bool taught = task.role == Role::kStudent && config_.use_kd &&
                        task.stage != Stage::kFusion && task.stage != Stage::kEvaluation;
    if (taught && config_.teacher_path.empty()) {
      PLIMSOLL_TRY_VOID(require({Role::kTeacher, task.stage}, task));
    } else if (taught) {
      PLIMSOLL_TRY(const fs::path found, find_teacher_file(config_, task));
    }
  }
  return {};
}

// That `needed` is done, or comes before `by` in this call.
Result<void> Run::require(const Task& needed, const Task& by) const {
  const auto before = std::find(tasks_.begin(), tasks_.end(), by);
  if (is_done(needed) || std::find(tasks_.begin(), before, needed) != before) {
    return {};
  }
  return fail(
      ErrorCode::kNotFound,
      fmt::format("{} needs {}, which {} does not have; first run --stage {} --model-size {}",
                  by.name(), needed.name(), folder_.root().string(), stage_name(needed.stage),
                  role_name(needed.role)),
      needed.role != by.role ? "or give --teacher-path, or train without a teacher: --use-kd false"
                             : "");
}

Result<TeacherOptions> Run::teacher_of(const Task& task) const {
  TeacherOptions options;
  options.released = config_.offload_teacher_to_cpu;
  options.clear_cache_every_n = config_.clear_cache_every_n;
  if (config_.use_teacher_cache) {
    options.cache = cache_file(task);
  }
  const std::int64_t ids = data_->set().info().table_rows();
  if (config_.teacher_path.empty()) {
    PLIMSOLL_TRY(options.shape, teacher_shape(governor_, config_, task, ids));
    options.weights = model_file(folder_.root(), {Role::kTeacher, task.stage});
    return options;
  }
  PLIMSOLL_TRY(options.weights, find_teacher_file(config_, task));
  PLIMSOLL_TRY(TeacherFile file, TeacherFile::open(governor_, options.weights));
  PLIMSOLL_TRY(options.shape, file.shape(task, ids));
  if (!file.is_ours()) {
    std::error_code ignored;
    PLIMSOLL_TRY_VOID(
        check_disk_room(governor_, folder_.root(),
                        static_cast<std::int64_t>(fs::file_size(options.weights, ignored))));
    options.weights = teacher_copy(task);
    PLIMSOLL_TRY_VOID(file.write_ours(options.weights));
  }
  return options;
}

// The work of a task, and its teacher.
Result<void> Run::prepare(const Task& task) {
  bench_ = {};
  teacher_sha256_.clear();
  if (task.stage == Stage::kFusion) {
    PLIMSOLL_TRY(bench_.work,
                 Fusion::make(config_, *data_, task,
                              model_file(folder_.root(), {task.role, Stage::kAutoencoder}),
                              model_file(folder_.root(), classifier_task(task.role, config_))));
    return {};
  }
  if (task.role == Role::kStudent && config_.use_kd) {
    PLIMSOLL_TRY(const TeacherOptions options, teacher_of(task));
    PLIMSOLL_TRY(bench_.teacher, Teacher::open(governor_, data_->set(), options));
    StateDigest digest;
    PLIMSOLL_TRY_VOID(add_file(digest, "teacher", options.weights));
    teacher_sha256_ = digest.hex();
  }
  PLIMSOLL_TRY(
      bench_.work,
      Training::make(config_, *data_,
                     {.task = task,
                      .teacher = bench_.teacher.get(),
                      .scorer = model_file(folder_.root(), {task.role, Stage::kAutoencoder}),
                      .hands = hands_.get()}));
  return {};
}

// Rehearses a step of every task that is left, and asks for what the largest one needed.
Result<void> Run::admit() {
  std::int64_t most = 0;
  Refusals refusals;
  // A step has no more graphs than there are.
  const std::int64_t graphs =
      std::min(config_.batch_size, static_cast<std::int64_t>(data_->train().size()));
  for (const Task& task : tasks_) {
    if (StopSignals::asked()) {
      return given_up("a rehearsal");
    }
    if (task.stage == Stage::kEvaluation) {
      PLIMSOLL_TRY(const std::int64_t peak,
                   refusals.note(rehearse_evaluation(governor_, config_, *data_, folder_.root())));
      most = std::max(most, peak);
    }
    if (!has_rehearsal(task)) {
      continue;
    }
    PLIMSOLL_TRY(const std::int64_t peak,
                 refusals.note(rehearse_task(governor_, config_, *data_, task, graphs)));
    if (peak > 0) {
      PLIMSOLL_TRY_VOID(report_->event(
          "rehearsed",
          {{"task", std::string_view(task.name())}, {"graphs", graphs}, {"peak_bytes", peak}}));
    }
    most = std::max(most, peak);
  }
  if (hands_) {
    PLIMSOLL_TRY_VOID(refusals.note(hands_->admit(tasks_)));
  }
  if (const auto outcome = refusals.outcome(); !outcome) {
    return tl::unexpected(beside_the_set(governor_, config_, *data_, outcome.error()));
  }
  if (const auto admitted =
          admit_tensors(governor_, most, fmt::format("a step of {} graphs", graphs));
      !admitted) {
    return tl::unexpected(beside_the_set(governor_, config_, *data_, admitted.error()));
  }
  const LedgerState state = governor_.state();
  report_->text(fmt::format(
      "admitted under a limit of {}\n"
      "  steps     {:>12}   models, optimizer and a step of {} graphs, rehearsed at {}\n"
      "  graphs    {:>12}   {}\n"
      "  foreign   {:>12}   code and kernels' scratch (foreign_bytes)\n"
      "  baseline  {:>12}   the process before the run\n"
      "  headroom  {:>12}   free",
      governor_.limit().explain(), format_bytes(with_margin(most)), graphs, format_bytes(most),
      format_bytes(state.pools[static_cast<std::size_t>(Tag::kLoader)].leased_bytes),
      data_->set().cached() ? "all of the set in memory (cache_bytes)"
                            : "offsets; the rest is read from disk (cache_bytes)",
      format_bytes(config_.foreign_bytes), format_bytes(state.baseline_bytes),
      format_bytes(state.free_bytes())));
  return report_->event("admitted",
                        {{"step_peak_bytes", most}, {"graph_set_cached", data_->set().cached()}});
}

Result<void> Run::do_task(const Task& task) {
  if (task.stage == Stage::kEvaluation) {
    PLIMSOLL_TRY_VOID(report_->phase("evaluating"));
    const Report::Aside aside{*report_};
    PLIMSOLL_TRY(evaluated_, evaluate(config_, *data_, folder_.root(), /*write=*/true));
    report_->text(evaluated_.text);
    return report_->event("eval", {{"step", step_}, {"file", std::string_view("evaluation.json")}});
  }
  const bool resumed = task.name() == current_;
  PLIMSOLL_TRY_VOID(prepare(task));
  if (resumed) {
    PLIMSOLL_TRY(const auto state,
                 load_checkpoint(folder_.checkpoint_path(*resumed_step_), bench_.work->tensors()));
    PLIMSOLL_TRY_VOID(bench_.work->restore(state.numbers));
    if (const auto told = state.texts.find("teacher_sha256");
        told == state.texts.end() || told->second != teacher_sha256_) {
      return fail(ErrorCode::kInvalidArgument,
                  fmt::format("{}: {} was begun with another teacher", folder_.root().string(),
                              task.name()),
                  "name the one it was begun with (--teacher-path), or train anew");
    }
  }
  current_ = task.name();
  PLIMSOLL_TRY_VOID(report_->begin_task(task, step_, *bench_.work, resumed));
  while (!bench_.work->finished() && !loop_.stop()) {
    PLIMSOLL_TRY(const bool done, step(task));
    if (!done) {
      return {};  // Nothing of this step was applied; the last commit stands.
    }
  }
  if (!bench_.work->finished()) {
    return loop_.save(step_);
  }
  return finish_task(task);
}

// The model's file first, then the checkpoint that says so: a crash between them trains the last
// steps again, into the same bits.
Result<void> Run::finish_task(const Task& task) {
  PLIMSOLL_TRY_VOID(bench_.work->save_model(model_file(folder_.root(), task)));
  if (bench_.teacher) {
    const TeacherStats& stats = bench_.teacher->stats();
    PLIMSOLL_TRY_VOID(
        report_->event("teacher", {{"step", step_},
                                   {"task", std::string_view(current_)},
                                   {"parameters", bench_.teacher->parameters()},
                                   {"asked", stats.asked},
                                   {"cached", stats.cached},
                                   {"cleared", stats.cleared},
                                   {"loads", stats.loads},
                                   {"weight_bytes", bench_.teacher->weight_bytes()}}));
  }
  PLIMSOLL_TRY_VOID(report_->end_task(task, step_, *bench_.work));
  bench_ = {};
  teacher_sha256_.clear();
  done_.insert(task.name());
  current_.clear();
  step_ += 1;  // The end of a task is a step of its own, so that it has its own checkpoint.
  PLIMSOLL_TRY_VOID(loop_.save(step_));
  std::error_code ignored;
  fs::remove(cache_file(task), ignored);
  fs::remove(teacher_copy(task), ignored);
  return {};
}

// One optimizer step and what follows it. False: memory was refused twice.
Result<bool> Run::step(const Task& task) {
  StepNews news;
  news.ends_epoch = bench_.work->epoch_over();  // It was stopped there.
  if (!news.ends_epoch) {
    PLIMSOLL_TRY(const bool done, loop_.step(step_ + 1, [&]() -> Result<void> {
      PLIMSOLL_TRY(news, bench_.work->step());
      return {};
    }));
    if (!done) {
      return false;
    }
    step_ += 1;
    PLIMSOLL_TRY_VOID(report_->step(task, step_, news));
  }
  if (news.ends_epoch) {
    const Report::Aside aside{*report_};
    EpochNews epoch;
    PLIMSOLL_TRY_VOID(without_refusal([&]() -> Result<void> {
      PLIMSOLL_TRY(epoch, bench_.work->end_epoch());
      return {};
    }));
    PLIMSOLL_TRY_VOID(report_->epoch(task, step_, epoch));
  }
  if (news.ends_epoch) {
    PLIMSOLL_TRY_VOID(loop_.clean_up(step_, "evaluation"));
  }
  PLIMSOLL_TRY_VOID(loop_.after_step(step_, {.ends_epoch = news.ends_epoch,
                                             .cleaned_up = news.ends_epoch,
                                             .commits_itself = bench_.work->finished()}));
  return true;
}

std::string Run::way_on(const PressureReport& seen) const {
  const LedgerState ledger = governor_.state();
  const std::int64_t limit = std::max(seen.needed_bytes, ledger.limit_bytes);
  return ledger.asked_bytes < ledger.limit_bytes ? resume_with(limit, whole_limit(crew_))
                                                 : larger_limit(governor_, whole_limit(crew_));
}

// Checkpoint, then manifest: both name this step.
Result<void> Run::write(std::int64_t step) {
  CheckpointState state;
  state.step = step;
  state.texts["task"] = current_;
  state.texts["teacher_sha256"] = teacher_sha256_;
  std::vector<NamedTensor> tensors;
  if (bench_.work) {
    state.numbers = bench_.work->numbers();
    tensors = bench_.work->tensors();
  }
  for (const std::string& name : done_) {
    state.numbers["done." + name] = 1.0;
  }
  PLIMSOLL_TRY_VOID(save_checkpoint(folder_.checkpoint_path(step), state, tensors));
  return folder_.publish(step, config_.keep_checkpoints);
}

Result<std::string> Run::digest() const {
  StateDigest digest;
  for (const Task& task : all_tasks()) {
    if (is_done(task)) {
      PLIMSOLL_TRY_VOID(add_file(digest, task.name(), model_file(folder_.root(), task)));
    }
  }
  if (bench_.work) {
    digest_tensors(digest, bench_.work->tensors());
  }
  return digest.hex();
}

Result<CanKdSummary> Run::summarise_run() {
  CanKdSummary summary;
  for (const Task& task : all_tasks()) {
    if (!is_done(task)) {
      continue;
    }
    PLIMSOLL_TRY(const auto reader, SafetensorsReader::open(model_file(folder_.root(), task)));
    PLIMSOLL_TRY_VOID(reader.check());
    const auto number = [&](const char* key) {
      const auto found = reader.metadata().find(key);
      return found == reader.metadata().end() ? 0.0 : std::strtod(found->second.c_str(), nullptr);
    };
    summary.models.push_back({task.name(), static_cast<std::int64_t>(number("parameters")),
                              static_cast<std::int64_t>(number("epochs")),
                              number("held_out_loss")});
  }
  summary.graphs_per_second = report_->rows_per_second();
  summary.evaluation_json = evaluated_.json;
  summary.evaluation_text = evaluated_.text;
  PLIMSOLL_TRY(summary.state_sha256, digest());
  PLIMSOLL_TRY_VOID(loop_.end(step_, summary));
  return summary;
}

}  // namespace

Result<CanKdSummary> train_can_kd(const CanKdSettings& settings, const TrainOptions& options,
                                  RankCrew* crew) {
  if (crew != nullptr) {
    PLIMSOLL_TRY_VOID(crew->takes_batch(settings.config().batch_size));
  }
  CanKdSummary summary;
  PLIMSOLL_TRY_VOID(in_run_folder(settings.config(), settings.to_toml(), options,
                                  [&](RunFolder& folder) -> Result<void> {
                                    CanKdConfig config = settings.config();
                                    if (crew != nullptr) {
                                      if (const auto taken = crew->take_share(config); !taken) {
                                        return taken;
                                      }
                                    }
                                    PLIMSOLL_TRY(Governor governor, settle(config, folder.root()));
                                    Run run{settings, options, folder, governor, crew};
                                    return without_refusal([&]() -> Result<void> {
                                      PLIMSOLL_TRY(summary, run.train());
                                      return {};
                                    });
                                  }));
  return summary;
}

Result<RecipeReport> eval_can_kd(const CanKdSettings& settings) {
  const CanKdConfig& config = settings.config();
  PLIMSOLL_TRY(const RunFolder folder, RunFolder::open_to_read(config.out));
  PLIMSOLL_TRY(Governor governor, settle(config, folder.root()));
  Evaluated evaluated;
  const auto done = without_refusal([&]() -> Result<void> {
    PLIMSOLL_TRY(const auto data, Data::open(governor, config));
    PLIMSOLL_TRY_VOID(folder.check_data(config.data, data->set().info().fingerprint));
    PLIMSOLL_TRY(const std::int64_t peak,
                 rehearse_evaluation(governor, config, *data, folder.root()));
    PLIMSOLL_TRY_VOID(admit_tensors(governor, peak, "evaluation"));
    PLIMSOLL_TRY(evaluated, evaluate(config, *data, folder.root(), /*write=*/false));
    return {};
  });
  TensorArena::detach();
  PLIMSOLL_TRY_VOID(done);
  if (!evaluated.any) {
    return fail(ErrorCode::kNotFound, config.out + ": no finished model to evaluate",
                "train it first");
  }
  return RecipeReport{.json = std::move(evaluated.json), .text = std::move(evaluated.text)};
}

}  // namespace plimsoll
