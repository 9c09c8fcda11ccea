// SPDX-License-Identifier: Apache-2.0
#include "recipes/can_kd/step_estimate.h"

#include <algorithm>

#include "recipes/can_kd/graph_tensors.h"
#include "recipes/can_kd/models.h"
#include "torch/random_tensors.h"

namespace plimsoll::can_kd {
namespace {

// How many times each extent is held at most, over 303 random steps of both kinds of models (sizes,
// checkpointing, precision, LSTM, batch, chunk), and a twentieth more. Half of those that take more
// than 32 MiB take four fifths of the bound or more, one in ten less than three fifths.
constexpr double kWeightCopies = 5.75;    // With gradients, both moments, and their temporaries.
constexpr double kHalfWeights = 1.8;      // In bfloat16.
constexpr double kSecondGradients = 1.5;  // Summed up over micro-batches.
constexpr double kTrainedWidths = 2.7;
constexpr double kCheckpointedWidths = 1.85;
constexpr double kTrainedWidest = 3.4;  // The layer that is run backward now.
constexpr double kTrainedMixed = 8.75;
constexpr double kTrainedHeads = 0.5;
constexpr double kAnsweredWidths = 0.95;
constexpr double kAnsweredWidest = 2.1;
constexpr double kAnsweredMixed = 3.15;
constexpr double kNode = 93.0;  // Features, edges, ids, losses.
constexpr std::int64_t kBesides = 4 << 20;

template <typename Model, typename Shape>
std::int64_t weights_of(const Shape& shape) {
  const UndrawnWeights shapes(UndrawnWeights::Kind::kShapes);
  return parameter_count(Model(shape, 0).parameters());
}

void add_layer(ModelExtent& extent, std::int64_t in, std::int64_t out, std::int64_t heads) {
  extent.node_widths += out;
  extent.heads += heads;
  extent.widest = std::max(extent.widest, in + out);
}

}  // namespace

ModelExtent extent_of(const GatShape& shape) {
  ModelExtent extent{.weights = weights_of<GatClassifier>(shape)};
  const std::int64_t width = shape.hidden * shape.heads;
  std::int64_t in = shape.embedding + kContinuous;
  extent.node_widths = in;
  for (std::int64_t l = 0; l < shape.layers; ++l) {
    add_layer(extent, in, width, shape.heads);
    in = width;
  }
  extent.mixed_widths = shape.lstm ? shape.layers * shape.layers * width : 0;
  return extent;
}

ModelExtent extent_of(const VgaeShape& shape) {
  ModelExtent extent{.weights = weights_of<Vgae>(shape)};
  std::int64_t in = shape.embedding + kContinuous;
  extent.node_widths = in;
  const auto add = [&](std::int64_t width, std::int64_t heads) {
    // Heads that do not share the width have all of it each.
    add_layer(extent, in, width % heads == 0 ? width : width * heads, heads);
    in = width;
  };
  for (std::size_t l = 0; l + 1 < shape.hidden.size(); ++l) {
    add(shape.hidden[l], l == 0 ? shape.heads : 1);
  }
  extent.node_widths += 5 * shape.latent();  // Mean, variance, z, the neighbours' head.
  in = shape.latent();
  for (std::size_t l = shape.hidden.size() - 1; l-- > 1;) {
    add(shape.hidden[l], kDecoderHeads);
  }
  add(kContinuous, 1);
  return extent;
}

ModelExtent extent_of(const TeacherShape& shape) {
  return std::visit([](const auto& one) { return extent_of(one); }, shape);
}

std::int64_t tensors_at_most(const TaskExtent& extent, const CanKdConfig& config) {
  const bool bf16 = config.precision != "32";
  const double held = kWeightCopies + (bf16 ? kHalfWeights : 0.0) +
                      (config.accumulate_grad_batches > 1 ? kSecondGradients : 0.0);
  const auto weights = [](const ModelExtent& model) { return static_cast<double>(model.weights); };
  // Who answers keeps nothing for a backward pass.
  const auto answers = [](const ModelExtent& model, const StepSize& size) {
    return static_cast<double>(size.nodes) *
           (kAnsweredWidths * static_cast<double>(model.node_widths) +
            kAnsweredWidest * static_cast<double>(model.widest) +
            kAnsweredMixed * static_cast<double>(model.mixed_widths) + kNode);
  };
  const ModelExtent& model = extent.model;
  const double trained =
      static_cast<double>(extent.step.nodes) *
          ((config.gradient_checkpointing ? kCheckpointedWidths : kTrainedWidths) *
               static_cast<double>(model.node_widths) +
           kTrainedWidest * static_cast<double>(model.widest) +
           kTrainedMixed * static_cast<double>(model.mixed_widths) + kNode) +
      kTrainedHeads * static_cast<double>(extent.step.edges * model.heads);
  const double numbers =
      held * weights(model) + weights(extent.teacher) + weights(extent.scorer) +
      std::max({trained, answers(model, extent.answered), answers(extent.teacher, extent.step),
                answers(extent.scorer, extent.answered)});
  return static_cast<std::int64_t>(4.0 * numbers) + kBesides;
}

}  // namespace plimsoll::can_kd
