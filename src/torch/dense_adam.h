// SPDX-License-Identifier: Apache-2.0
//
// DenseAdam: Adam or AdamW over a model's parameters, with all of its state allocated up front.
//
// A step allocates nothing, so an optimizer step cannot be refused memory half way.
// Reading order: this file, dense_adam.cpp. Rows have their own fused optimizer in the store.
//
// Threads: single-owner.   Memory: two tensors per parameter, and a float.
#pragma once

#include <string>
#include <vector>

#include <ATen/core/Tensor.h>

#include "torch/checkpoint.h"

namespace plimsoll {

struct DenseAdamOptions {
  double learning_rate{1e-5};
  double beta1{0.9};
  double beta2{0.999};
  double epsilon{1e-8};
  double weight_decay{0.05};
  bool decoupled{true};  ///< AdamW; false: Adam, the decay added to the gradient (L2).
};

class DenseAdam {
 public:
  /// Parameters are float32 and shared, not copied; names prefix their state's.
  DenseAdam(std::vector<NamedTensor> parameters, const DenseAdamOptions& options);

  /// One step with gradients in the order of the parameters.
  /// `rate_scale` multiplies the learning rate. Allocates no tensor.
  void step(const std::vector<at::Tensor>& gradients, double rate_scale);

  /// Moments and step counts as "adamw.exp_avg.NAME", "adamw.exp_avg_sq.NAME", "adamw.step.NAME".
  [[nodiscard]] std::vector<NamedTensor> state() const;

  [[nodiscard]] const std::vector<at::Tensor>& parameters() const noexcept { return parameters_; }

 private:
  DenseAdamOptions options_;
  std::vector<std::string> names_;
  std::vector<at::Tensor> parameters_;
  std::vector<at::Tensor> first_;   // Moving averages of the gradients.
  std::vector<at::Tensor> second_;  // And of their squares.
  std::vector<at::Tensor> steps_;   // One float each, as torch's fused kernel wants them.
};

}  // namespace plimsoll
