// SPDX-License-Identifier: Apache-2.0
#include "recipes/can_kd/node_losses.h"

#include "kernels/node_losses.h"

namespace plimsoll::can_kd {

at::Tensor id_cross_entropy(const at::Tensor& rows, const Linear& head, const at::Tensor& ids,
                            const Mode& mode) {
  return kernels::id_cross_entropy(rows, {head.weight, head.bias, mode.bf16}, ids);
}

at::Tensor neighbour_cross_entropy(const at::Tensor& rows, const Linear& head,
                                   const at::Tensor& ids, const Adjacency& adjacency,
                                   const Mode& mode) {
  return kernels::neighbor_cross_entropy(rows, {head.weight, head.bias, mode.bf16}, ids,
                                         edge_tensors(adjacency));
}

at::Tensor id_cross_entropy_rows(const at::Tensor& rows, const Linear& head,
                                 const at::Tensor& ids) {
  return kernels::id_cross_entropy_rows(rows, {head.weight, head.bias}, ids);
}

}  // namespace plimsoll::can_kd
