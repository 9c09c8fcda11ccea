// SPDX-License-Identifier: Apache-2.0
//
// Epochs, steps, validation and the curriculum.
//
// Threads: single-owner.   Memory: see training.h.
#include "recipes/can_kd/training.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/zeros.h>
#include <c10/core/GradMode.h>
#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <chrono>
#include <cmath>
#include <numbers>
#include <numeric>
#include <span>
#include <utility>

#include "base/check.h"
#include "recipes/can_kd/curriculum.h"
#include "recipes/can_kd/difficulties.h"
#include "recipes/can_kd/scores.h"
#include "recipes/can_kd/shapes.h"

namespace plimsoll::can_kd {
namespace {

constexpr double kClipEpsilon = 1e-6;

std::span<const float> floats_of(const at::Tensor& tensor) {
  return {tensor.data_ptr<float>(), static_cast<std::size_t>(tensor.numel())};
}

DenseAdamOptions adam_options(const CanKdConfig& config, const Task& task) {
  DenseAdamOptions options;
  options.learning_rate = task.stage == Stage::kAutoencoder ? config.vgae_lr : config.gat_lr;
  options.weight_decay = config.weight_decay;
  options.decoupled = false;
  return options;
}

// Puts the batch statistics back unless the step was applied.
class Undo {
 public:
  explicit Undo(std::vector<NamedTensor> buffers) : buffers_(std::move(buffers)) {
    for (const NamedTensor& named : buffers_) {
      kept_.push_back(named.tensor.clone());
    }
  }
  ~Undo() {
    for (std::size_t k = 0; k < kept_.size(); ++k) {
      buffers_[k].tensor.copy_(kept_[k]);
    }
  }
  Undo(const Undo&) = delete;
  Undo& operator=(const Undo&) = delete;
  void keep() noexcept { kept_.clear(); }

 private:
  std::vector<NamedTensor> buffers_;
  std::vector<at::Tensor> kept_;
};

void clip(const std::vector<at::Tensor>& gradients, double norm, double most) {
  if (most > 0.0 && norm > most) {
    for (const at::Tensor& gradient : gradients) {
      gradient.mul_(most / (norm + kClipEpsilon));
    }
  }
}

// Summed in one order: torch's own norm of a large tensor depends on the number of threads.
double norm_of(const std::vector<at::Tensor>& gradients) {
  std::array<double, 8> lanes{};
  for (const at::Tensor& gradient : gradients) {
    const at::Tensor dense = gradient.contiguous();
    const auto values = floats_of(dense);
    for (std::size_t i = 0; i < values.size(); ++i) {
      lanes[i % lanes.size()] += static_cast<double>(values[i]) * static_cast<double>(values[i]);
    }
  }
  return std::sqrt(std::accumulate(lanes.begin(), lanes.end(), 0.0));
}

void add(Graded& sum, Graded&& more) {
  if (sum.gradients.empty()) {
    sum = std::move(more);
    return;
  }
  sum.loss += more.loss;
  for (std::size_t k = 0; k < sum.terms.size(); ++k) {
    sum.terms[k].second += more.terms[k].second;
  }
  for (std::size_t k = 0; k < sum.gradients.size(); ++k) {
    sum.gradients[k].add_(more.gradients[k]);
  }
}

void divide(Graded& sum, std::int64_t batches) {
  if (batches == 1) {
    return;
  }
  const double share = 1.0 / static_cast<double>(batches);
  sum.loss *= share;
  for (auto& term : sum.terms) {
    term.second *= share;
  }
  for (const at::Tensor& gradient : sum.gradients) {
    gradient.mul_(share);
  }
}

}  // namespace

Training::Training(const CanKdConfig& config, const Data& data, const TrainingOptions& options)
    : config_(config), data_(data), options_(options) {}

Result<std::unique_ptr<Training>> Training::make(const CanKdConfig& config, const Data& data,
                                                 const TrainingOptions& options) {
  std::unique_ptr<Training> work(new Training(config, data, options));
  const std::int64_t ids = data.set().info().table_rows();
  work->learner_ = make_learner(config, options.task, ids, options.teacher);
  const c10::AutoGradMode off{false};
  work->adam_.emplace(work->learner_->parameters(), adam_options(config, options.task));
  for (const NamedTensor& named : work->learner_->model()) {
    work->best_.push_back({"best." + named.name, named.tensor.detach().clone()});
  }
  if (!work->curriculum()) {
    return work;
  }
  work->difficulty_ = at::zeros({static_cast<std::int64_t>(data.normals().size())}, at::kFloat);
  if (config.use_vgae_mining) {
    work->scorer_ = make_learner(config, {options.task.role, Stage::kAutoencoder}, ids, nullptr);
    if (!options.rehearsal) {
      PLIMSOLL_TRY_VOID(load_tensors(options.scorer, work->scorer_->model()));
    }
  }
  return work;
}

bool Training::finished() const {
  return epoch_ >= config_.max_epochs || epoch_ - 1 - best_epoch_ >= patience();
}

std::int64_t Training::patience() const {
  const bool student_classifier =
      options_.task.role == Role::kStudent && options_.task.stage != Stage::kAutoencoder;
  return student_classifier ? config_.student_gat_patience : config_.patience;
}

double Training::rate_scale() const {
  if (!config_.use_scheduler) {
    return 1.0;
  }
  const auto epoch = static_cast<double>(epoch_);
  if (config_.scheduler_type == "step") {
    return std::pow(config_.scheduler_gamma,
                    static_cast<double>(epoch_ / config_.scheduler_step_size));
  }
  if (config_.scheduler_type == "exponential") {
    return std::pow(config_.scheduler_gamma, epoch);
  }
  const std::int64_t epochs =
      config_.scheduler_t_max > 0 ? config_.scheduler_t_max : config_.max_epochs;
  const double turn = epoch / static_cast<double>(epochs);
  return 0.5 * (1.0 + std::cos(std::numbers::pi * turn));
}

// The graphs an epoch may take: normal ones for an autoencoder, all for a classifier.
std::span<const std::int64_t> Training::candidates() const {
  const bool anomalies = options_.task.stage == Stage::kAutoencoder && !data_.normals().empty();
  return anomalies ? data_.normals() : data_.train();
}

// Of the model of `stage`, this task's or its scorer's.
Result<at::Tensor> Training::answers(const Learner& learner, Stage stage, Asked asked,
                                     Answer answer) const {
  return options_.hands != nullptr
             ? options_.hands->ask(learner, {options_.task.role, stage}, asked, answer)
             : answers_of(learner, data_, config_, asked, answer);
}

Result<void> Training::score_difficulty() {
  const auto begin = std::chrono::steady_clock::now();
  PLIMSOLL_TRY(const at::Tensor found,
               scorer_ ? answers(*scorer_, Stage::kAutoencoder, Asked::kNormals, Answer::kLoss)
                       : answers(*learner_, options_.task.stage, Asked::kNormals, Answer::kLoss));
  difficulty_.copy_(found);
  scored_epoch_ = epoch_;
  scorer_.reset();  // Its weights do not change: once is enough.
  const std::chrono::duration<double> spent = std::chrono::steady_clock::now() - begin;
  scoring_seconds_ = spent.count();
  return {};
}

Result<void> Training::begin_epoch() {
  const auto members = candidates();
  GraphBatchesOptions options;
  options.graphs.assign(members.begin(), members.end());
  if (curriculum()) {
    const bool again = !config_.use_vgae_mining && config_.difficulty_cache_update > 0 &&
                       epoch_ - scored_epoch_ >= config_.difficulty_cache_update;
    if (scored_epoch_ < 0 || again) {
      PLIMSOLL_TRY_VOID(score_difficulty());
    }
    const CurriculumSchedule schedule{config_.curriculum_start_ratio, config_.curriculum_end_ratio,
                                      config_.difficulty_percentile,
                                      config_.difficulty_percentile_end, config_.max_epochs};
    auto choice = choose(floats_of(difficulty_), data_.normals(), data_.attacks(),
                         curriculum_stage(schedule, epoch_),
                         static_cast<std::uint64_t>(config_.seed), epoch_);
    options.graphs = std::move(choice.graphs);
    chosen_ = {choice.attacks, choice.normals};
    threshold_ = choice.threshold;
  }
  options.batch_graphs = config_.batch_size;
  options.nodes_max = config_.batch_nodes;
  options.edges_max = config_.batch_edges;
  options.min_steps = std::min<std::int64_t>(config_.min_steps_per_epoch,
                                             static_cast<std::int64_t>(options.graphs.size()));
  options.seed = weight_seed(config_, options_.task) ^ 0x6f72646572;
  options.epoch = epoch_;
  options.position = position_;
  PLIMSOLL_TRY(auto opened, GraphBatches::open(&data_.set(), std::move(options)));
  batches_.emplace(std::move(opened));
  return {};
}

Result<Graded> Training::grade_batches(GraphBatch& last, std::int64_t& graphs) {
  Graded sum;
  std::int64_t batches = 0;
  do {
    PLIMSOLL_TRY(const GraphTensors batch, data_.next(*batches_, last));
    PLIMSOLL_TRY(Graded one,
                 learner_->grade(batch, step_noise(config_, options_.task, epoch_, last.position)));
    graphs += batch.size();
    batches += 1;
    add(sum, std::move(one));
  } while (batches < config_.accumulate_grad_batches && !last.ends_epoch);
  divide(sum, batches);
  return sum;
}

Result<StepNews> Training::step() {
  if (!batches_) {
    PLIMSOLL_TRY_VOID(begin_epoch());
  }
  PLIMSOLL_TRY_VOID(batches_->seek(epoch_, position_));  // Where a refused step had begun.
  Undo undo(learner_->buffers());
  GraphBatch last;
  StepNews news;
  PLIMSOLL_TRY(const Graded made, grade_batches(last, news.graphs));
  const double norm = norm_of(made.gradients);
  if (!std::isfinite(norm) || !std::isfinite(made.loss)) {
    return fail(ErrorCode::kInternal,
                fmt::format("{}, epoch {}: the loss is {} and its gradient's norm {}",
                            options_.task.name(), epoch_, made.loss, norm),
                "lower the learning rate (vgae_lr, gat_lr), or train with --precision 32");
  }
  clip(made.gradients, norm, config_.gradient_clip);
  news.rate_scale = rate_scale();
  if (options_.teacher != nullptr) {
    PLIMSOLL_TRY_VOID(options_.teacher->end_step());
  }
  adam_->step(made.gradients, news.rate_scale);
  undo.keep();
  position_ = last.position + last.counts.graphs;
  loss_sum_ += made.loss;
  loss_steps_ += 1;
  news.loss = made.loss;
  news.terms = made.terms;
  news.epoch = epoch_;
  news.ends_epoch = epoch_over_ = last.ends_epoch;
  news.epoch_fraction = static_cast<double>(position_) / static_cast<double>(batches_->graphs());
  return news;
}

Result<double> Training::validate() const {
  const bool normal_only = options_.task.stage == Stage::kAutoencoder;
  PLIMSOLL_TRY(const at::Tensor found,
               answers(*learner_, options_.task.stage, Asked::kHeldOut, Answer::kLoss));
  const auto losses = floats_of(found);
  double sum = 0.0;
  double graphs = 0.0;
  for (std::size_t i = 0; i < losses.size(); ++i) {
    if (!normal_only || data_.set().label(data_.held_out()[i]) == 0) {
      sum += losses[i];
      graphs += 1.0;
    }
  }
  return graphs == 0.0 ? 0.0 : sum / graphs;
}

// The test files' scores so far: a look aside, no part of what is trained.
Result<void> Training::look_at_tests(EpochNews& news) const {
  const auto graphs = data_.set().split(GraphSplit::kTest);
  const auto every = config_.test_every_n_epochs;
  if (every <= 0 || (epoch_ + 1) % every != 0 || graphs.empty()) {
    return {};
  }
  PLIMSOLL_TRY(const at::Tensor scores,
               answers(*learner_, options_.task.stage, Asked::kTests, Answer::kScore));
  const auto found = floats_of(scores);
  std::vector<std::uint8_t> truth(graphs.size());
  std::transform(graphs.begin(), graphs.end(), truth.begin(), [&](std::int64_t graph) {
    return static_cast<std::uint8_t>(data_.set().label(graph));
  });
  const bool probability = options_.task.stage != Stage::kAutoencoder;
  const BinaryScores seen = score(found, truth, probability ? 0.5 : youden_threshold(found, truth));
  news.figures.emplace_back("test/f1", seen.f1);
  news.figures.emplace_back("test/auc", seen.auc);
  return {};
}

void Training::tell_curriculum(EpochNews& news) const {
  news.figures.emplace_back("curriculum/attacks", static_cast<double>(chosen_.first));
  news.figures.emplace_back("curriculum/normals", static_cast<double>(chosen_.second));
  news.figures.emplace_back("curriculum/threshold", static_cast<double>(threshold_));
  const auto difficulties = floats_of(difficulty_);
  for (const int percent : {5, 25, 50, 75, 95}) {
    news.figures.emplace_back(fmt::format("curriculum/difficulty_{}", percent),
                              static_cast<double>(quantile_of(difficulties, percent / 100.0)));
  }
}

Result<EpochNews> Training::end_epoch() {
  const c10::AutoGradMode off{false};
  if (!batches_) {  // Resumed here.
    PLIMSOLL_TRY_VOID(begin_epoch());
  }
  EpochNews news;
  news.epoch = epoch_;
  news.epochs = config_.max_epochs;
  news.loss = loss_steps_ == 0 ? 0.0 : loss_sum_ / static_cast<double>(loss_steps_);
  PLIMSOLL_TRY(news.held_out, validate());
  PLIMSOLL_TRY_VOID(look_at_tests(news));
  news.best = best_epoch_ < 0 || news.held_out < best_loss_;
  if (news.best) {
    best_loss_ = news.held_out;
    best_epoch_ = epoch_;
    const auto model = learner_->model();
    for (std::size_t k = 0; k < best_.size(); ++k) {
      best_[k].tensor.copy_(model[k].tensor);
    }
  }
  news.figures.emplace_back("graphs", static_cast<double>(batches_->graphs()));
  if (curriculum()) {
    tell_curriculum(news);
  }
  if (scoring_seconds_ > 0.0) {
    news.scored = difficulty_.numel();
    news.scoring_seconds = std::exchange(scoring_seconds_, 0.0);
  }
  epoch_ += 1;
  epoch_over_ = false;
  position_ = 0;
  loss_sum_ = 0.0;
  loss_steps_ = 0;
  batches_.reset();
  return news;
}

Result<void> Training::rehearse(std::int64_t rows, std::int64_t chunk) {
  const auto members = candidates();
  auto most = data_.largest(members, rows);
  GraphCounts counts;
  for (std::size_t k = 0; k < most.size(); ++k) {
    const GraphCounts one = data_.set().counts(most[k]);
    counts.nodes += one.nodes;
    counts.edges += one.edges;
    const bool full = (config_.batch_nodes > 0 && counts.nodes > config_.batch_nodes) ||
                      (config_.batch_edges > 0 && counts.edges > config_.batch_edges);
    if (full && k > 0) {
      most.resize(k);
    }
  }
  {
    Undo undo(learner_->buffers());
    PLIMSOLL_TRY(const GraphTensors batch, data_.gather(most));
    PLIMSOLL_TRY(const Graded one, learner_->grade(batch, 0));
    if (config_.accumulate_grad_batches > 1) {
      PLIMSOLL_TRY(const Graded two, learner_->grade(batch, 0));
    }
    if (options_.teacher != nullptr) {
      PLIMSOLL_TRY_VOID(options_.teacher->end_step());
    }
  }
  // Validation, evaluation on the test files, difficulty: all of them ask in chunks.
  for (const auto asked : {data_.held_out(), data_.set().split(GraphSplit::kTest)}) {
    if (asked.empty() || chunk == 0) {
      continue;
    }
    PLIMSOLL_TRY(const GraphTensors batch, data_.gather(data_.largest(asked, chunk)));
    static_cast<void>(learner_->losses(batch));
    if (scorer_) {
      static_cast<void>(scorer_->losses(batch));
    }
  }
  return {};
}

std::int64_t Training::steps() const {
  const auto graphs = static_cast<std::int64_t>(candidates().size());
  const std::int64_t per_epoch = std::max((graphs + config_.batch_size - 1) / config_.batch_size,
                                          std::min(config_.min_steps_per_epoch, graphs));
  return (per_epoch + config_.accumulate_grad_batches - 1) / config_.accumulate_grad_batches *
         config_.max_epochs;
}

std::vector<NamedTensor> Training::tensors() const {
  std::vector<NamedTensor> list = joined(learner_->parameters(), learner_->buffers());
  list = joined(std::move(list), adam_->state());
  list = joined(std::move(list), best_);
  if (curriculum()) {
    list.push_back({"difficulty", difficulty_});
  }
  return list;
}

std::map<std::string, double> Training::numbers() const {
  return {{"epoch", static_cast<double>(epoch_)},
          {"position", static_cast<double>(position_)},
          {"epoch_over", epoch_over_ ? 1.0 : 0.0},
          {"best_loss", best_loss_},
          {"best_epoch", static_cast<double>(best_epoch_)},
          {"loss_sum", loss_sum_},
          {"loss_steps", static_cast<double>(loss_steps_)},
          {"scored_epoch", static_cast<double>(scored_epoch_)}};
}

Result<void> Training::restore(const std::map<std::string, double>& numbers) {
  const auto whole = [&](const char* name, std::int64_t otherwise) {
    return static_cast<std::int64_t>(number_of(numbers, name, static_cast<double>(otherwise)));
  };
  epoch_ = whole("epoch", 0);
  position_ = whole("position", 0);
  epoch_over_ = whole("epoch_over", 0) != 0;
  best_loss_ = number_of(numbers, "best_loss", 0.0);
  best_epoch_ = whole("best_epoch", -1);
  loss_sum_ = number_of(numbers, "loss_sum", 0.0);
  loss_steps_ = whole("loss_steps", 0);
  scored_epoch_ = whole("scored_epoch", -1);
  batches_.reset();
  if (scored_epoch_ >= 0) {
    scorer_.reset();
  }
  return {};
}

std::int64_t Training::parameters() const {
  return parameter_count(learner_->model()) - parameter_count(learner_->buffers());
}

Result<void> Training::save_model(const std::filesystem::path& path) const {
  std::vector<NamedTensor> model = learner_->model();
  if (config_.save_top_k > 0 && best_epoch_ >= 0) {
    for (std::size_t k = 0; k < model.size(); ++k) {
      model[k].tensor = best_[k].tensor;
    }
  }
  return save_tensors(path, model,
                      {{"format", "plimsoll.can_kd.1"},
                       {"task", options_.task.name()},
                       {"parameters", fmt::format("{}", parameters())},
                       {"epochs", fmt::format("{}", epoch_)},
                       {"best_epoch", fmt::format("{}", best_epoch_)},
                       {"held_out_loss", fmt::format("{}", best_loss_)}});
}

}  // namespace plimsoll::can_kd
