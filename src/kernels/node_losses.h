// SPDX-License-Identifier: Apache-2.0
//
// Losses over rows, as operators: sums of fixed blocks, the same bits for any number of threads.
//
// Those over ids take what the last dense layer reads, and compute its logits block by block with
// their gradients: neither logits nor targets [nodes, ids] are ever whole. Gradients of gradients
// are refused. Reading order: operators.h, this file, row_loops.h, row_products.h.
//
// Threads: as torch operators.
// Memory:  a gradient the size of each input that takes one, kept for backward; a block of logits.
#pragma once

#include <ATen/core/Tensor.h>

#include "kernels/graph_attention.h"

namespace plimsoll::kernels {

/// Mean of (x − y)² over all elements; a scalar. Gradient to both. Requires: an element or more.
at::Tensor mean_square(const at::Tensor& x, const at::Tensor& y);

/// Mean over all elements of −½(1 + v − m² − eᵛ): from N(m, eᵛ) to the normal.
at::Tensor normal_divergence(const at::Tensor& mean, const at::Tensor& log_variance);

/// The last dense layer of a classifier of ids.
struct Head {
  at::Tensor weight;  ///< [ids, width]
  at::Tensor bias;    ///< [ids]
  bool bf16{false};   ///< As linear_rows() has it.
};

/// Mean cross entropy of `ids` [rows] int64 under logits of rows [rows, width].
at::Tensor id_cross_entropy(const at::Tensor& rows, const Head& head, const at::Tensor& ids);

/// Mean over rows (nodes) and ids of the binary cross entropy of "sends to a node of this id".
at::Tensor neighbor_cross_entropy(const at::Tensor& rows, const Head& head, const at::Tensor& ids,
                                  const EdgeTensors& edges);

/// Cross entropy of each row, [rows], without gradient; each row's bits are its own.
at::Tensor id_cross_entropy_rows(const at::Tensor& rows, const Head& head, const at::Tensor& ids);

}  // namespace plimsoll::kernels
