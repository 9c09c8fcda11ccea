// SPDX-License-Identifier: Apache-2.0
//
// gat_conv: one layer of graph attention over sorted edges, as an operator.
//
//   h = x Wᵀ;  e_ij = LeakyReLU₀.₂(a_s·h_j + a_d·h_i);  α_i = softmax over the edges into i;
//   y_i = Σ_j α_ij h_j, heads side by side or their mean, + b
//
// The sums run over a node's edges where the rows lie: no message per edge is ever stored. Forward
// goes node by node over the edges in, backward over the edges out, so no two threads write one row
// and the bits do not depend on their number. Kept for backward: x, h, α [edges, heads] and two
// scores per node and head.
// Source: Veličković et al., "Graph Attention Networks" (ICLR 2018); names and defaults follow
// torch_geometric's GATConv. Reading order: operators.h, edge_tensors.h, this file,
// attention_loops.h.
//
// Threads: as torch operators.   Memory: see above.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>

#include "kernels/edge_tensors.h"

namespace plimsoll::kernels {

struct GatOptions {
  bool concat{true};  ///< Heads side by side; else their mean.
  double dropout{0};  ///< Of attention weights: the share that is dropped.
  std::int64_t seed{0};
  std::int64_t place{0};  ///< Tells this layer's masks from others' of the same seed.
  bool bf16{false};       ///< As linear_rows() has it.
};

/// Shape: x [nodes, in]; weight [heads·out, in]; att_source, att_target [heads, out]; bias
/// [heads·out], or [out] for the mean. At most 64 heads. Returns [nodes, bias's].
at::Tensor gat_conv(const at::Tensor& x, const at::Tensor& weight, const at::Tensor& att_source,
                    const at::Tensor& att_target, const at::Tensor& bias, const EdgeTensors& edges,
                    const GatOptions& options);

/// Factors of dropout, like `like`: 0 for a share `rate`, else 1/(1 − rate), in steps of 2^-16. A
/// function of (seed, place, index) alone, on any device.
at::Tensor dropout_factors(const at::Tensor& like, double rate, std::int64_t seed,
                           std::int64_t place);

}  // namespace plimsoll::kernels
