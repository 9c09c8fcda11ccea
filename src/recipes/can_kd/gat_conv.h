// SPDX-License-Identifier: Apache-2.0
//
// GatConv: one layer of graph attention, as one autograd function over sorted edges.
//
//   h = x Wᵀ;  e_ij = LeakyReLU₀.₂(a_s·h_j + a_d·h_i);  α_i = softmax over the edges into i;
//   y_i = Σ_j α_ij h_j, heads side by side or their mean, + b
//
// The sums run over a node's edges where the rows lie: no message per edge is ever stored. Forward
// goes node by node over the edges in, backward over the edges out, so no two threads write one row
// and the bits do not depend on their number. Kept for backward: x, h, α [edges, heads] and two
// scores per node and head.
// Source: Veličković et al., "Graph Attention Networks" (ICLR 2018); names and defaults follow
// torch_geometric's GATConv. Reading order: adjacency.h, this file, gat_kernels.h.
//
// Threads: as torch operators.   Memory: see above.
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
