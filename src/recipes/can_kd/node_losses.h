// SPDX-License-Identifier: Apache-2.0
//
// Losses of kernels/node_losses.h with a model's last layer and a batch's edges.
//
// Reading order: layers.h, kernels/node_losses.h, this file.
//
// Threads: as torch operators.   Memory: said there.
#pragma once

#include "recipes/can_kd/adjacency.h"
#include "recipes/can_kd/layers.h"

namespace plimsoll::can_kd {

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
