// SPDX-License-Identifier: Apache-2.0
//
// Sorted edges as a list of six tensors, which the operator sort_edges makes.
//
// in_ptr, in_source, out_ptr, out_target, out_edge, all int32, are edges.h's; self_edge, uint8, is
// 1 for nodes that had an edge to themselves. Lists of edges are as long as all edges and nodes
// together, so that shapes do not depend on values; places behind in_ptr's last number are 0.
// Reading order: edges.h, this file, graph_attention.h.
//
// Threads: as torch operators.   Memory: 12 bytes an edge and 21 a node.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <vector>

#include "kernels/edges.h"

namespace plimsoll::kernels {

enum EdgePart : std::size_t { kInPtr, kInSource, kOutPtr, kOutTarget, kOutEdge, kSelfEdge };
inline constexpr std::size_t kEdgeParts = 6;

/// In the order of EdgePart.
using EdgeTensors = std::vector<at::Tensor>;

/// Errors: TypeError, ValueError unless they are edges of as many nodes as x has rows.
void check_edge_tensors(at::TensorList edges, const at::Tensor& x);

/// The edges as kernels read them. Errors: IndexError for numbers that are not there.
/// Requires: check_edge_tensors(), and tensors of the CPU.
[[nodiscard]] Edges checked_edges(at::TensorList edges);

/// Which node each place of a list belongs to; places behind the last edge: one behind the last.
/// Composed of torch's operators. Shape: ptr [nodes + 1]; like [edges]. Returns int64 like `like`.
[[nodiscard]] at::Tensor nodes_of(const at::Tensor& ptr, const at::Tensor& like);

}  // namespace plimsoll::kernels
