// SPDX-License-Identifier: Apache-2.0
//
// QNetwork: what the fusion stage learns: the value of each of 21 mixing weights in a state.
//
//   dense 15 → hidden, ReLU, dense hidden → hidden, ReLU, dense hidden → 21
//
// Reading order: layers.h, this file.
//
// Threads: as torch operators; const use from many threads.   Memory: the parameters.
#pragma once

#include <array>
#include <cstdint>
#include <vector>

#include "recipes/can_kd/layers.h"
#include "recipes/can_kd/mode.h"
#include "torch/checkpoint.h"

namespace plimsoll::can_kd {

inline constexpr std::int64_t kFusionState = 15;
inline constexpr std::int64_t kFusionActions = 21;  ///< Mixing weights 0, 0.05, … 1.

class QNetwork {
 public:
  /// Every weight from philox(seed, its own stream).
  QNetwork(std::int64_t hidden, std::uint64_t seed);

  /// Shape: states [rows, 15] → [rows, 21].
  [[nodiscard]] at::Tensor forward(const at::Tensor& states, const Mode& mode) const;

  [[nodiscard]] std::vector<NamedTensor> parameters() const;
  /// Takes the other's weights, as a target network does now and then.
  void copy_from(const QNetwork& other);

 private:
  std::array<Linear, 3> layers_;
};

}  // namespace plimsoll::can_kd
