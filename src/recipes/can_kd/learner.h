// SPDX-License-Identifier: Apache-2.0
//
// Learner: one model in training, its loss with or without a teacher, and its gradients.
//
//   classifier:  α·T²·KL(teacher‖student at temperature T) + (1 − α)·cross entropy
//   autoencoder: α·(w_z·MSE(P z, z_teacher) + w_x·MSE(x̂, x̂_teacher)) + (1 − α)·its own loss
//
// P is a trained projection where the latents' widths differ; it is not part of the model.
// Source: Hinton et al., "Distilling the Knowledge in a Neural Network" (2015), section 2.
// Reading order: gat_jk.h, vgae.h, teacher.h, this file.
//
// Threads: single-owner.   Memory: the parameters; during grade() what autograd keeps.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "plimsoll/result.h"
#include "recipes/can_kd/config.h"
#include "recipes/can_kd/graph_tensors.h"
#include "recipes/can_kd/task.h"
#include "recipes/can_kd/teacher.h"
#include "torch/checkpoint.h"

namespace plimsoll::can_kd {

/// Loss and gradients of one batch.
struct Graded {
  double loss{0.0};
  std::vector<std::pair<const char*, double>> terms{};  ///< "mse", "kd", …: before their weights.
  std::vector<at::Tensor> gradients{};                  ///< In the order of parameters().
};

class Learner {
 public:
  virtual ~Learner() = default;

  /// Changes nothing but batch statistics (buffers()). Errors: of the teacher.
  virtual Result<Graded> grade(const GraphTensors& batch, std::uint64_t noise) = 0;

  /// Each graph's own loss, [G] float32: no teacher, no noise, bits of that graph alone.
  virtual at::Tensor losses(const GraphTensors& batch) const = 0;

  /// How much each graph looks like an attack, [G] float32: a probability, or an error.
  virtual at::Tensor scores(const GraphTensors& batch) const = 0;

  /// What is trained, the projection included.
  [[nodiscard]] virtual std::vector<NamedTensor> parameters() const = 0;
  [[nodiscard]] virtual std::vector<NamedTensor> buffers() const = 0;
  /// What the finished model's file holds.
  [[nodiscard]] virtual std::vector<NamedTensor> model() const = 0;
};

/// `teacher` is nullptr without distillation, and outlives the learner.
std::unique_ptr<Learner> make_learner(const CanKdConfig& config, const Task& task, std::int64_t ids,
                                      Teacher* teacher);

/// Joins lists of tensors.
[[nodiscard]] std::vector<NamedTensor> joined(std::vector<NamedTensor> first,
                                              const std::vector<NamedTensor>& second);

}  // namespace plimsoll::can_kd
