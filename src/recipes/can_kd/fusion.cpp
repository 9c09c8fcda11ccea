// SPDX-License-Identifier: Apache-2.0
//
// Trials, the ring of what was seen, and the network's steps.
//
// Threads: single-owner.   Memory: see fusion.h.
#include "recipes/can_kd/fusion.h"

#include <ATen/ops/argmax.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/huber_loss.h>
#include <ATen/ops/index_select.h>
#include <ATen/ops/zeros.h>
#include <ATen/ops/zeros_like.h>
#include <c10/core/GradMode.h>
#include <fmt/format.h>
#include <torch/csrc/autograd/autograd.h>

#include <algorithm>
#include <cmath>
#include <optional>
#include <span>
#include <utility>

#include "base/check.h"
#include "base/philox.h"
#include "plimsoll/sample_order.h"
#include "recipes/can_kd/learner.h"
#include "recipes/can_kd/scores.h"
#include "recipes/can_kd/shapes.h"

namespace plimsoll::can_kd {
namespace {

// Streams of random numbers, by what they decide.
constexpr std::uint64_t kGraphs = 1;
constexpr std::uint64_t kDice = 2;
constexpr std::uint64_t kActions = 3;
constexpr std::uint64_t kRecall = 4;

/// A whole number below `most`, of (seed, episode, place).
std::int64_t draw(std::uint64_t seed, std::uint64_t use, std::int64_t episode, std::int64_t place,
                  std::int64_t most) {
  const auto words = philox(seed, (use << 48) | static_cast<std::uint64_t>(episode),
                            static_cast<std::uint64_t>(place));
  const std::uint64_t word = (static_cast<std::uint64_t>(words[0]) << 32) | words[1];
  return static_cast<std::int64_t>(word % static_cast<std::uint64_t>(most));
}

at::Tensor rows_of(const at::Tensor& all, const std::vector<std::int64_t>& rows) {
  const at::Tensor index = at::empty({static_cast<std::int64_t>(rows.size())}, at::kLong);
  std::copy(rows.begin(), rows.end(), index.data_ptr<std::int64_t>());
  return all.index_select(0, index);
}

}  // namespace

Result<FusionModel> FusionModel::load(const CanKdConfig& config,
                                      const std::filesystem::path& file) {
  const c10::AutoGradMode off{false};
  FusionModel model{QNetwork(config.fusion_hidden, 0), at::zeros({1}, at::kDouble)};
  PLIMSOLL_TRY_VOID(
      load_tensors(file, joined(model.network.parameters(), {{"threshold", model.threshold}})));
  return model;
}

at::Tensor FusionModel::scores(const at::Tensor& states) const {
  const c10::AutoGradMode off{false};
  const at::Tensor actions = at::argmax(network.forward(states, answering_mode()), 1).contiguous();
  return fused_scores(states, actions, threshold.data_ptr<double>()[0]);
}

Fusion::Fusion(const CanKdConfig& config, const Data& data, const Task& task)
    : config_(config),
      data_(data),
      task_(task),
      network_(config.fusion_hidden, weight_seed(config, task)),
      target_(config.fusion_hidden, weight_seed(config, task)) {}

Result<std::unique_ptr<Fusion>> Fusion::make(const CanKdConfig& config, const Data& data,
                                             const Task& task, const std::filesystem::path& vgae,
                                             const std::filesystem::path& classifier) {
  std::unique_ptr<Fusion> work(new Fusion(config, data, task));
  DenseAdamOptions options;
  options.learning_rate = config.fusion_lr;
  options.weight_decay = 0.0;
  options.decoupled = false;
  const c10::AutoGradMode off{false};
  work->adam_.emplace(work->network_.parameters(), options);
  const std::int64_t rows = config.fusion_replay;
  work->ring_ = {at::zeros({rows, kFusionState}, at::kFloat),
                 at::zeros({rows, kFusionState}, at::kFloat), at::zeros({rows}, at::kLong),
                 at::zeros({rows}, at::kFloat)};
  PLIMSOLL_TRY_VOID(work->look(vgae, classifier));
  return work;
}

// States of the training graphs, or of a sample of them, and the error that tells best.
Result<void> Fusion::look(const std::filesystem::path& vgae,
                          const std::filesystem::path& classifier) {
  const std::int64_t ids = data_.set().info().table_rows();
  PLIMSOLL_TRY(const Vgae errors, load_vgae(config_, task_.role, ids, vgae));
  PLIMSOLL_TRY(const GatClassifier chances, load_classifier(config_, task_.role, ids, classifier));
  const auto train = data_.train();
  const auto all = static_cast<std::int64_t>(train.size());
  std::vector<std::int64_t> graphs(
      static_cast<std::size_t>(std::min<std::int64_t>(all, kFusionGraphsMax)));
  const SampleOrder order(all, weight_seed(config_, task_), 0);
  for (std::size_t i = 0; i < graphs.size(); ++i) {
    graphs[i] = train[static_cast<std::size_t>(order.at(static_cast<std::int64_t>(i)))];
  }
  const auto count = static_cast<std::int64_t>(graphs.size());
  states_ = at::empty({count, kFusionState}, at::kFloat);
  labels_ = at::empty({count}, at::kByte);
  PLIMSOLL_TRY_VOID(data_.for_each(
      graphs, config_.scoring_chunk,
      [&](std::int64_t first, const GraphTensors& batch) -> Result<void> {
        states_.narrow(0, first, batch.size()).copy_(fusion_states(errors, chances, batch));
        labels_.narrow(0, first, batch.size()).copy_(batch.labels);
        return {};
      }));
  const at::Tensor error = states_.select(1, 0).contiguous();
  threshold_ = at::zeros({1}, at::kDouble);
  threshold_.data_ptr<double>()[0] = youden_threshold(
      std::span<const float>{error.data_ptr<float>(), graphs.size()},
      std::span<const std::uint8_t>{labels_.data_ptr<std::uint8_t>(), graphs.size()});
  return {};
}

double Fusion::epsilon() const {
  return std::max(config_.fusion_epsilon_min,
                  config_.fusion_epsilon *
                      std::pow(config_.fusion_epsilon_decay, static_cast<double>(episode_)));
}

Fusion::Sample Fusion::act() const {
  const c10::AutoGradMode off{false};
  const std::uint64_t seed = weight_seed(config_, task_);
  const std::int64_t graphs = states_.size(0);
  const std::int64_t rows = config_.fusion_batch;
  std::vector<std::int64_t> picked;
  for (std::int64_t i = 0; i <= rows; ++i) {  // One more: the state after the last.
    picked.push_back(draw(seed, kGraphs, episode_, i, graphs));
  }
  const at::Tensor seen = rows_of(states_, picked);
  Sample sample;
  sample.states = seen.narrow(0, 0, rows).contiguous();
  sample.next = seen.narrow(0, 1, rows).contiguous();
  sample.actions = at::argmax(network_.forward(sample.states, answering_mode()), 1).contiguous();
  auto* actions = sample.actions.data_ptr<std::int64_t>();
  const double chance = epsilon();
  constexpr std::int64_t kSides = 1 << 20;
  for (std::int64_t i = 0; i < rows; ++i) {
    const auto roll = static_cast<double>(draw(seed, kDice, episode_, i, kSides));
    if (roll < chance * static_cast<double>(kSides)) {
      actions[i] = draw(seed, kActions, episode_, i, kFusionActions);
    }
  }
  const at::Tensor fused =
      fused_scores(sample.states, sample.actions, threshold_.data_ptr<double>()[0]);
  sample.rewards = at::empty({rows}, at::kFloat);
  for (std::int64_t i = 0; i < rows; ++i) {
    const bool attack = labels_.data_ptr<std::uint8_t>()[picked[static_cast<std::size_t>(i)]] != 0;
    const bool right = (fused.data_ptr<float>()[i] > 0.5F) == attack;
    sample.rewards.data_ptr<float>()[i] =
        static_cast<float>(right ? kFusionReward : -kFusionReward);
  }
  return sample;
}

void Fusion::remember(const Sample& seen) {
  const std::int64_t room = ring_.rewards.size(0);
  for (std::int64_t i = 0; i < seen.rewards.size(0); ++i) {
    const std::int64_t at = remembered_ % room;
    ring_.states.select(0, at).copy_(seen.states.select(0, i));
    ring_.next.select(0, at).copy_(seen.next.select(0, i));
    ring_.actions.data_ptr<std::int64_t>()[at] = seen.actions.data_ptr<std::int64_t>()[i];
    ring_.rewards.data_ptr<float>()[at] = seen.rewards.data_ptr<float>()[i];
    remembered_ += 1;
  }
}

Fusion::Sample Fusion::recall() const {
  const std::int64_t held = std::min(remembered_, ring_.rewards.size(0));
  std::vector<std::int64_t> rows;
  for (std::int64_t i = 0; i < config_.fusion_batch; ++i) {
    rows.push_back(draw(weight_seed(config_, task_), kRecall, episode_, i, held));
  }
  return {rows_of(ring_.states, rows), rows_of(ring_.next, rows), rows_of(ring_.actions, rows),
          rows_of(ring_.rewards, rows)};
}

Result<StepNews> Fusion::step() {
  const Sample seen = act();
  const std::int64_t before = remembered_;
  remember(seen);
  const Sample sample = recall();
  remembered_ = before;  // Until the step has been applied; the ring's rows are written again then.
  at::Tensor wanted = sample.rewards;
  if (config_.fusion_gamma > 0.0) {
    const c10::AutoGradMode off{false};
    const at::Tensor next = std::get<0>(target_.forward(sample.next, answering_mode()).max(1));
    wanted = sample.rewards + config_.fusion_gamma * next;
  }
  Mode mode;
  mode.training = true;
  const at::Tensor values =
      network_.forward(sample.states, mode).gather(1, sample.actions.unsqueeze(1)).squeeze(1);
  const at::Tensor loss = at::huber_loss(values, wanted);
  std::vector<at::Tensor> inputs;
  for (const NamedTensor& named : network_.parameters()) {
    inputs.push_back(named.tensor);
  }
  auto gradients = torch::autograd::grad({loss}, inputs);
  for (at::Tensor& gradient : gradients) {
    gradient = gradient.contiguous();
  }
  adam_->step(gradients, 1.0);
  remembered_ = before + config_.fusion_batch;
  const double reward = seen.rewards.mean().item<double>();
  reward_sum_ += reward;
  episode_ += 1;
  if (episode_ % config_.fusion_target_update == 0) {
    target_.copy_from(network_);
  }
  StepNews news;
  news.loss = loss.item<double>();
  news.terms = {{"reward", reward}, {"epsilon", epsilon()}};
  news.graphs = config_.fusion_batch;
  news.epoch_fraction =
      static_cast<double>(episode_) / static_cast<double>(config_.fusion_episodes);
  news.ends_epoch = finished();
  return news;
}

Result<EpochNews> Fusion::end_epoch() {
  EpochNews news;
  news.epochs = 1;
  news.best = true;
  news.figures = {{"reward", reward_sum_ / static_cast<double>(std::max<std::int64_t>(
                                               1, config_.fusion_episodes))}};
  return news;
}

std::vector<NamedTensor> Fusion::tensors() const {
  std::vector<NamedTensor> list = joined(network_.parameters(), adam_->state());
  for (const NamedTensor& named : target_.parameters()) {
    list.push_back({"target." + named.name, named.tensor});
  }
  return joined(std::move(list), {{"ring.states", ring_.states},
                                  {"ring.next", ring_.next},
                                  {"ring.actions", ring_.actions},
                                  {"ring.rewards", ring_.rewards}});
}

std::map<std::string, double> Fusion::numbers() const {
  return {{"episode", static_cast<double>(episode_)},
          {"remembered", static_cast<double>(remembered_)},
          {"reward_sum", reward_sum_}};
}

Result<void> Fusion::restore(const std::map<std::string, double>& numbers) {
  episode_ = static_cast<std::int64_t>(number_of(numbers, "episode", 0.0));
  remembered_ = static_cast<std::int64_t>(number_of(numbers, "remembered", 0.0));
  reward_sum_ = number_of(numbers, "reward_sum", 0.0);
  return {};
}

std::int64_t Fusion::parameters() const {
  return parameter_count(network_.parameters());
}

Result<void> Fusion::save_model(const std::filesystem::path& path) const {
  return save_tensors(path, joined(network_.parameters(), {{"threshold", threshold_}}),
                      {{"format", "plimsoll.can_kd.1"},
                       {"task", task_.name()},
                       {"parameters", fmt::format("{}", parameters())}});
}

}  // namespace plimsoll::can_kd
