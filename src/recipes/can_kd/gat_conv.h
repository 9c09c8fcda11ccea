// SPDX-License-Identifier: Apache-2.0
//
// GatConv: the parameters of one layer of graph attention, which kernels/graph_attention.h
// computes.
//
// Reading order: adjacency.h, kernels/graph_attention.h, this file.
//
// Threads: as torch operators.   Memory: the parameters; what backward keeps is said there.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "recipes/can_kd/adjacency.h"
#include "recipes/can_kd/mode.h"
#include "torch/checkpoint.h"

namespace plimsoll::can_kd {

struct GatConvShape {
  std::int64_t in{0};
  std::int64_t out{0};  ///< Of one head.
  std::int64_t heads{1};
  bool concat{true};  ///< Heads side by side; else their mean.
  double dropout{0};  ///< Of attention weights.
  /// Width of a row of the result.
  [[nodiscard]] std::int64_t width() const noexcept { return concat ? heads * out : out; }
};

struct GatConv {
  GatConvShape shape;
  at::Tensor weight;      ///< [heads·out, in]
  at::Tensor att_source;  ///< [heads, out]
  at::Tensor att_target;  ///< [heads, out]
  at::Tensor bias;        ///< [width]

  /// Glorot's uniform weights and a zero bias, from philox(seed, stream…); advances `stream` by 3.
  static GatConv make(const GatConvShape& shape, std::uint64_t seed, std::uint64_t& stream);

  /// Shape: x [nodes, in] float32 → [nodes, width]. `place` tells this layer's masks from others'.
  [[nodiscard]] at::Tensor forward(const at::Tensor& x, const Adjacency& adjacency,
                                   const Mode& mode, std::uint64_t place) const;

  void add_parameters(std::vector<NamedTensor>& list, const std::string& name) const;
};

}  // namespace plimsoll::can_kd
