// SPDX-License-Identifier: Apache-2.0
//
// DenseAdam over torch's fused kernels.
//
// Threads: single-owner.   Memory: all of it in the constructor.
#include "torch/dense_adam.h"

#include <ATen/ops/_fused_adam.h>
#include <ATen/ops/_fused_adamw.h>
#include <ATen/ops/zeros.h>
#include <ATen/ops/zeros_like.h>
#include <c10/core/GradMode.h>

#include <optional>
#include <utility>

#include "base/check.h"

namespace plimsoll {

DenseAdam::DenseAdam(std::vector<NamedTensor> parameters, const DenseAdamOptions& options)
    : options_(options) {
  const c10::AutoGradMode off{false};
  for (auto& [name, tensor] : parameters) {
    first_.push_back(at::zeros_like(tensor));
    second_.push_back(at::zeros_like(tensor));
    steps_.push_back(at::zeros({1}, at::kFloat).squeeze(0));
    names_.push_back(std::move(name));
    parameters_.push_back(std::move(tensor));
  }
}

void DenseAdam::step(const std::vector<at::Tensor>& gradients, double rate_scale) {
  PLIMSOLL_CHECK(gradients.size() == parameters_.size(), "one gradient per parameter");
  if (parameters_.empty()) {
    return;
  }
  const c10::AutoGradMode off{false};
  for (const auto& count : steps_) {
    *count.data_ptr<float>() += 1.0F;  // The kernel reads the number of this step.
  }
  const double rate = options_.learning_rate * rate_scale;
  if (options_.decoupled) {
    at::_fused_adamw_(parameters_, gradients, first_, second_, {}, steps_, rate, options_.beta1,
                      options_.beta2, options_.weight_decay, options_.epsilon, /*amsgrad=*/false,
                      /*maximize=*/false);
  } else {
    at::_fused_adam_(parameters_, gradients, first_, second_, {}, steps_, rate, options_.beta1,
                     options_.beta2, options_.weight_decay, options_.epsilon, /*amsgrad=*/false,
                     /*maximize=*/false);
  }
}

std::vector<NamedTensor> DenseAdam::state() const {
  std::vector<NamedTensor> list;
  for (std::size_t k = 0; k < names_.size(); ++k) {
    list.push_back({"adamw.exp_avg." + names_[k], first_[k]});
    list.push_back({"adamw.exp_avg_sq." + names_[k], second_[k]});
    list.push_back({"adamw.step." + names_[k], steps_[k]});
  }
  return list;
}

}  // namespace plimsoll
