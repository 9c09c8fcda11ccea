// SPDX-License-Identifier: Apache-2.0
//
// Three dense layers.
//
// Threads: as torch operators.   Memory: the parameters.
#include "recipes/can_kd/q_network.h"

#include <c10/core/GradMode.h>
#include <fmt/format.h>

namespace plimsoll::can_kd {

QNetwork::QNetwork(std::int64_t hidden, std::uint64_t seed) {
  std::uint64_t stream = 0;
  layers_[0] = Linear::make(kFusionState, hidden, seed, stream);
  layers_[1] = Linear::make(hidden, hidden, seed, stream);
  layers_[2] = Linear::make(hidden, kFusionActions, seed, stream);
}

at::Tensor QNetwork::forward(const at::Tensor& states, const Mode& mode) const {
  auto x = relu_dropout(layers_[0].forward(states, mode), 0.0, mode, 0);
  x = relu_dropout(layers_[1].forward(x, mode), 0.0, mode, 0);
  return layers_[2].forward(x, mode);
}

std::vector<NamedTensor> QNetwork::parameters() const {
  std::vector<NamedTensor> list;
  for (std::size_t l = 0; l < layers_.size(); ++l) {
    layers_[l].add_parameters(list, fmt::format("layers.{}", l));
  }
  return list;
}

void QNetwork::copy_from(const QNetwork& other) {
  const c10::AutoGradMode off{false};
  const auto from = other.parameters();
  const auto to = parameters();
  for (std::size_t k = 0; k < to.size(); ++k) {
    to[k].tensor.copy_(from[k].tensor);
  }
}

}  // namespace plimsoll::can_kd
