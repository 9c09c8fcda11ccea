// SPDX-License-Identifier: Apache-2.0
#include "recipes/can_kd/models.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/softmax.h>
#include <c10/core/GradMode.h>

#include <algorithm>
#include <cmath>
#include <limits>

#include "base/check.h"
#include "recipes/can_kd/adjacency.h"
#include "recipes/can_kd/learner.h"
#include "recipes/can_kd/shapes.h"
#include "torch/random_tensors.h"

namespace plimsoll::can_kd {
namespace {

constexpr double kActionsLast = kFusionActions - 1;

struct LatentFigures {
  double mean{0.0};
  double deviation{0.0};
  double least{0.0};
  double most{0.0};
};

// Of all numbers of rows [begin, end), summed in their order.
LatentFigures figures_of(const at::Tensor& latent, std::int64_t begin, std::int64_t end) {
  LatentFigures found;
  const std::int64_t width = latent.size(1);
  const std::int64_t count = (end - begin) * width;
  if (count == 0) {
    return found;
  }
  const float* values = latent.data_ptr<float>() + begin * width;
  double squares = 0.0;
  found.least = found.most = values[0];
  for (std::int64_t i = 0; i < count; ++i) {
    const double value = values[i];
    found.mean += value;
    squares += value * value;
    found.least = std::min(found.least, value);
    found.most = std::max(found.most, value);
  }
  found.mean /= static_cast<double>(count);
  const double variance = squares / static_cast<double>(count) - found.mean * found.mean;
  found.deviation = std::sqrt(std::max(0.0, variance));
  return found;
}

}  // namespace

std::filesystem::path model_file(const std::filesystem::path& run, const Task& task) {
  return run / "models" / (task.name() + ".safetensors");
}

Result<Vgae> load_vgae(const CanKdConfig& config, Role role, std::int64_t ids,
                       const std::filesystem::path& file) {
  const c10::AutoGradMode off{false};
  const UndrawnWeights unset(UndrawnWeights::Kind::kUnset);
  Vgae model(vgae_shape(config, role, ids), 0);
  PLIMSOLL_TRY_VOID(load_tensors(file, joined(model.parameters(), model.buffers())));
  return model;
}

Result<GatClassifier> load_classifier(const CanKdConfig& config, Role role, std::int64_t ids,
                                      const std::filesystem::path& file) {
  const c10::AutoGradMode off{false};
  const UndrawnWeights unset(UndrawnWeights::Kind::kUnset);
  GatClassifier model(gat_shape(config, role, ids), 0);
  PLIMSOLL_TRY_VOID(load_tensors(file, joined(model.parameters(), model.buffers())));
  return model;
}

at::Tensor errors_of(const Vgae& vgae, const GraphTensors& batch) {
  const c10::AutoGradMode off{false};
  const Adjacency adjacency = make_adjacency(batch);
  return graph_errors(vgae.forward(batch, adjacency, answering_mode()), batch, adjacency);
}

at::Tensor chances_of(const GatClassifier& classifier, const GraphTensors& batch) {
  const c10::AutoGradMode off{false};
  const at::Tensor logits = classifier.forward(batch, make_adjacency(batch), answering_mode());
  return at::softmax(logits, 1).select(1, 1).contiguous();
}

at::Tensor fusion_states(const Vgae& vgae, const GatClassifier& classifier,
                         const GraphTensors& batch) {
  const c10::AutoGradMode off{false};
  const Adjacency adjacency = make_adjacency(batch);
  const VgaeOutput output = vgae.forward(batch, adjacency, answering_mode());
  const at::Tensor errors = graph_errors(output, batch, adjacency);
  const at::Tensor logits = classifier.forward(batch, adjacency, answering_mode()).contiguous();
  const at::Tensor chances = at::softmax(logits, 1).contiguous();
  const at::Tensor states = at::empty({batch.size(), kFusionState}, at::kFloat);
  const float* x = batch.x.data_ptr<float>();
  const float* rebuilt = output.reconstruction.data_ptr<float>();
  for (std::int64_t g = 0; g < batch.size(); ++g) {
    const std::int64_t begin = adjacency.node_ptr[static_cast<std::size_t>(g)];
    const std::int64_t end = adjacency.node_ptr[static_cast<std::size_t>(g) + 1];
    double squares = 0.0;
    for (std::int64_t v = begin; v < end; ++v) {
      for (std::int64_t k = 0; k < kContinuous; ++k) {
        const double gap = static_cast<double>(x[v * (kContinuous + 1) + 1 + k]) -
                           static_cast<double>(rebuilt[v * kContinuous + k]);
        squares += gap * gap;
      }
    }
    const double mse =
        squares / static_cast<double>(std::max<std::int64_t>(1, (end - begin) * kContinuous));
    const double error = errors.data_ptr<float>()[g];
    const LatentFigures latent = figures_of(output.mean, begin, end);
    const LatentFigures spread = figures_of(output.log_variance, begin, end);
    const double p = chances.data_ptr<float>()[2 * g + 1];
    const double q = chances.data_ptr<float>()[2 * g];
    const auto part = [](double share) { return share > 0.0 ? -share * std::log(share) : 0.0; };
    const double figures[kFusionState] = {error,
                                          mse,
                                          error - mse,
                                          latent.mean,
                                          latent.deviation,
                                          latent.least,
                                          latent.most,
                                          spread.mean,
                                          logits.data_ptr<float>()[2 * g],
                                          logits.data_ptr<float>()[2 * g + 1],
                                          q,
                                          p,
                                          p - q,
                                          part(p) + part(q),
                                          std::max(p, q)};
    std::transform(std::begin(figures), std::end(figures),
                   states.data_ptr<float>() + g * kFusionState,
                   [](double figure) { return static_cast<float>(figure); });
  }
  return states;
}

at::Tensor fused_scores(const at::Tensor& states, const at::Tensor& actions, double threshold) {
  const at::Tensor fused = at::empty({states.size(0)}, at::kFloat);
  const float* rows = states.data_ptr<float>();
  for (std::int64_t g = 0; g < states.size(0); ++g) {
    const double weight = static_cast<double>(actions.data_ptr<std::int64_t>()[g]) / kActionsLast;
    const double error = rows[g * kFusionState];
    const double p = rows[g * kFusionState + 11];
    const double anomaly = std::isfinite(threshold) ? error / (error + threshold) : 0.0;
    fused.data_ptr<float>()[g] = static_cast<float>(weight * p + (1.0 - weight) * anomaly);
  }
  return fused;
}

}  // namespace plimsoll::can_kd
