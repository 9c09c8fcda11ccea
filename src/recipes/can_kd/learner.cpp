// SPDX-License-Identifier: Apache-2.0
//
// The two learners.
//
// Threads: single-owner.   Memory: see learner.h.
#include "recipes/can_kd/learner.h"

#include <ATen/ops/cross_entropy_loss.h>
#include <ATen/ops/log_softmax.h>
#include <ATen/ops/softmax.h>
#include <ATen/ops/zeros_like.h>
#include <c10/core/GradMode.h>
#include <torch/csrc/autograd/autograd.h>

#include <optional>

#include "base/check.h"
#include "kernels/node_losses.h"
#include "recipes/can_kd/models.h"
#include "recipes/can_kd/node_losses.h"
#include "recipes/can_kd/shapes.h"

namespace plimsoll::can_kd {
namespace {

constexpr std::uint64_t kProjection = 0x70726f6a;

// Gradients of `loss`; zeros for parameters that had no part in it.
std::vector<at::Tensor> gradients_of(const at::Tensor& loss,
                                     const std::vector<NamedTensor>& parameters) {
  std::vector<at::Tensor> inputs;
  for (const NamedTensor& named : parameters) {
    inputs.push_back(named.tensor);
  }
  auto all = torch::autograd::grad({loss}, inputs, {}, std::nullopt, false, /*allow_unused=*/true);
  for (std::size_t k = 0; k < all.size(); ++k) {
    all[k] = all[k].defined() ? all[k].contiguous() : at::zeros_like(inputs[k]);
  }
  return all;
}

class ClassifierLearner final : public Learner {
 public:
  ClassifierLearner(const CanKdConfig& config, const Task& task, std::int64_t ids, Teacher* teacher)
      : config_(config),
        model_(gat_shape(config, task.role, ids), weight_seed(config, task)),
        teacher_(teacher) {}

  Result<Graded> grade(const GraphTensors& batch, std::uint64_t noise) override {
    const Adjacency adjacency = make_adjacency(batch);
    at::Tensor taught;
    if (teacher_ != nullptr) {
      PLIMSOLL_TRY(taught, teacher_->answers(batch, adjacency));
    }
    const at::Tensor logits = model_.forward(batch, adjacency, training_mode(config_, noise));
    at::Tensor loss = at::cross_entropy_loss(logits, batch.labels);
    Graded made;
    made.terms.emplace_back("cross_entropy", loss.item<double>());
    if (taught.defined()) {
      const at::Tensor kd = divergence(logits, taught);
      made.terms.emplace_back("kd", kd.item<double>());
      loss = config_.kd_alpha * kd + (1.0 - config_.kd_alpha) * loss;
    }
    made.loss = loss.item<double>();
    made.gradients = gradients_of(loss, parameters());
    return made;
  }

  at::Tensor losses(const GraphTensors& batch) const override {
    const c10::AutoGradMode off{false};
    const at::Tensor logits = model_.forward(batch, make_adjacency(batch), answering_mode());
    return at::cross_entropy_loss(logits, batch.labels, {}, at::Reduction::None);
  }

  at::Tensor scores(const GraphTensors& batch) const override { return chances_of(model_, batch); }

  [[nodiscard]] std::vector<NamedTensor> parameters() const override { return model_.parameters(); }
  [[nodiscard]] std::vector<NamedTensor> buffers() const override { return model_.buffers(); }
  [[nodiscard]] std::vector<NamedTensor> model() const override {
    return joined(parameters(), buffers());
  }

 private:
  // T²·KL, the mean over graphs.
  [[nodiscard]] at::Tensor divergence(const at::Tensor& logits, const at::Tensor& taught) const {
    const double t = config_.kd_temperature;
    const at::Tensor theirs = at::softmax(taught / t, 1);
    const at::Tensor gap = at::log_softmax(taught / t, 1) - at::log_softmax(logits / t, 1);
    return (theirs * gap).sum() * (t * t / static_cast<double>(logits.size(0)));
  }

  const CanKdConfig& config_;
  GatClassifier model_;
  Teacher* teacher_;
};

class AutoencoderLearner final : public Learner {
 public:
  AutoencoderLearner(const CanKdConfig& config, const Task& task, std::int64_t ids,
                     Teacher* teacher)
      : config_(config),
        model_(vgae_shape(config, task.role, ids), weight_seed(config, task)),
        teacher_(teacher) {
    const std::int64_t mine = model_.shape().latent();
    if (teacher != nullptr) {
      taught_latent_ = teacher->width() - kContinuous;
      if (taught_latent_ != mine) {
        std::uint64_t stream = 0;
        projection_ =
            Linear::make(mine, taught_latent_, weight_seed(config, task) ^ kProjection, stream);
      }
    }
  }

  Result<Graded> grade(const GraphTensors& batch, std::uint64_t noise) override {
    const Adjacency adjacency = make_adjacency(batch);
    at::Tensor taught;
    if (teacher_ != nullptr) {
      PLIMSOLL_TRY(taught, teacher_->answers(batch, adjacency));
    }
    const Mode mode = training_mode(config_, noise);
    const VgaeOutput output = model_.forward(batch, adjacency, mode);
    const VgaeLoss own = vgae_loss(output, batch, adjacency);
    Graded made;
    made.terms = {{"mse", own.mse.item<double>()},
                  {"id", own.id.item<double>()},
                  {"neighbours", own.neighbours.item<double>()},
                  {"divergence", own.divergence.item<double>()}};
    at::Tensor loss = own.total;
    if (taught.defined()) {
      const at::Tensor z = projection_ ? projection_->forward(output.z, mode) : output.z;
      const at::Tensor latent =
          kernels::mean_square(z, taught.narrow(1, 0, taught_latent_).contiguous());
      const at::Tensor features = kernels::mean_square(
          output.reconstruction, taught.narrow(1, taught_latent_, kContinuous).contiguous());
      made.terms.emplace_back("kd_latent", latent.item<double>());
      made.terms.emplace_back("kd_reconstruction", features.item<double>());
      loss = config_.kd_alpha * (config_.kd_vgae_latent_weight * latent +
                                 config_.kd_vgae_recon_weight * features) +
             (1.0 - config_.kd_alpha) * loss;
    }
    made.loss = loss.item<double>();
    made.gradients = gradients_of(loss, parameters());
    return made;
  }

  at::Tensor losses(const GraphTensors& batch) const override { return errors_of(model_, batch); }

  at::Tensor scores(const GraphTensors& batch) const override { return losses(batch); }

  [[nodiscard]] std::vector<NamedTensor> parameters() const override {
    auto list = model_.parameters();
    if (projection_) {
      projection_->add_parameters(list, "projection");
    }
    return list;
  }
  [[nodiscard]] std::vector<NamedTensor> buffers() const override { return model_.buffers(); }
  [[nodiscard]] std::vector<NamedTensor> model() const override {
    return joined(model_.parameters(), model_.buffers());
  }

 private:
  const CanKdConfig& config_;
  Vgae model_;
  Teacher* teacher_;
  std::int64_t taught_latent_{0};
  std::optional<Linear> projection_;
};

}  // namespace

std::vector<NamedTensor> joined(std::vector<NamedTensor> first,
                                const std::vector<NamedTensor>& second) {
  first.insert(first.end(), second.begin(), second.end());
  return first;
}

std::unique_ptr<Learner> make_learner(const CanKdConfig& config, const Task& task, std::int64_t ids,
                                      Teacher* teacher) {
  if (task.stage == Stage::kAutoencoder) {
    return std::make_unique<AutoencoderLearner>(config, task, ids, teacher);
  }
  PLIMSOLL_CHECK(task.stage == Stage::kCurriculum || task.stage == Stage::kNormal,
                 "fusion and evaluation have no learner");
  return std::make_unique<ClassifierLearner>(config, task, ids, teacher);
}

}  // namespace plimsoll::can_kd
