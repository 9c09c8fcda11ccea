// SPDX-License-Identifier: Apache-2.0
//
// Adjacency: the edges of a batch sorted by target and by source, for layers that pass messages.
//
// Each node gets one edge to itself, the last of its edges; edges from a node to itself that are in
// the batch are replaced by it, as torch_geometric does. Other edges keep their order within a
// node, so a graph's part is the same in any batch. Parallel edges count as often as they are
// there. Reading order: graph_tensors.h, this file, gat_conv.h.
//
// Threads: a value; const use from many threads. It must outlive the backward pass of what used it.
// Memory:  about 12 bytes an edge and 21 a node, counted by bytes().
#pragma once

#include <cstdint>
#include <vector>

#include "kernels/edge_tensors.h"
#include "recipes/can_kd/graph_tensors.h"

namespace plimsoll::can_kd {

struct Adjacency {
  std::int64_t nodes{0};
  std::int64_t edges{0};  ///< With each node's own; below 2^31.
  std::int64_t graphs{0};
  std::int64_t degree_max{0};            ///< Of the edges into one node.
  std::vector<std::int32_t> in_ptr;      ///< [nodes + 1]: the edges into node v are in_ptr[v] …
  std::vector<std::int32_t> in_source;   ///< [edges]
  std::vector<std::int32_t> out_ptr;     ///< [nodes + 1]
  std::vector<std::int32_t> out_target;  ///< [edges]
  std::vector<std::int32_t> out_edge;    ///< [edges]: the same edge's place in in_source.
  std::vector<std::int32_t> node_ptr;    ///< [graphs + 1]: the nodes of graph g are node_ptr[g] …
  std::vector<std::uint8_t> self_edge;   ///< [nodes]: 1 if the batch itself has an edge v → v.

  [[nodiscard]] std::int64_t bytes() const noexcept;
};

/// Tensors over an adjacency, which must outlive them, for operators on edges.
[[nodiscard]] kernels::EdgeTensors edge_tensors(const Adjacency& adjacency);
[[nodiscard]] at::Tensor node_runs(const Adjacency& adjacency);  ///< node_ptr.

/// Sorts by counting, in O(nodes + edges).
/// Errors: a broken invariant (kInternal) for an edge or a graph out of range.
Adjacency make_adjacency(const GraphTensors& graphs);

}  // namespace plimsoll::can_kd
