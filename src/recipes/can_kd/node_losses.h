// SPDX-License-Identifier: Apache-2.0
//
// Losses over nodes: sums of fixed blocks, the same bits for any number of threads.
//
// Those over ids take what the last dense layer reads, and compute its logits block by block with
// their gradients: neither logits nor targets [nodes, ids] are ever whole.
// Reading order: layers.h, this file.
//
// Threads: as torch operators.
// Memory:  a gradient the size of each input that takes one, kept for backward; a block of logits a
//          thread.
#pragma once

#include "recipes/can_kd/adjacency.h"
#include "recipes/can_kd/layers.h"

namespace plimsoll::can_kd {

/// Mean of (x − y)² over all elements; a scalar. Gradient to both.
at::Tensor mean_square(const at::Tensor& x, const at::Tensor& y);

/// Mean over all elements of −½(1 + v − m² − eᵛ): from N(m, eᵛ) to the normal.
at::Tensor normal_divergence(const at::Tensor& mean, const at::Tensor& log_variance);

/// Mean cross entropy of `ids` [rows] int64 under logits head(rows).
at::Tensor id_cross_entropy(const at::Tensor& rows, const Linear& head, const at::Tensor& ids,
                            const Mode& mode);

/// Mean over nodes and ids of the binary cross entropy of "sends to a node of this id".
at::Tensor neighbour_cross_entropy(const at::Tensor& rows, const Linear& head,
                                   const at::Tensor& ids, const Adjacency& adjacency,
                                   const Mode& mode);

/// Cross entropy of each row, [rows] float32, without gradient; each row's bits are its own.
at::Tensor id_cross_entropy_rows(const at::Tensor& rows, const Linear& head, const at::Tensor& ids);

}  // namespace plimsoll::can_kd
