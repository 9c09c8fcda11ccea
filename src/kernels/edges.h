// SPDX-License-Identifier: Apache-2.0
//
// Edges of graphs, sorted by target and by source, for layers that pass messages.
//
// Each node gets one edge to itself, the last of its edges; edges from a node to itself that are
// there are replaced by it, as torch_geometric does. Other edges keep their order within a node.
// Parallel edges count as often as they are there. Reading order: this file, graph_attention.h.
//
// Threads: free functions.   Memory: the caller's.
#pragma once

#include <cstdint>

namespace plimsoll::kernels {

/// Shape: in_ptr, out_ptr [nodes + 1]; the rest [count].
struct Edges {
  std::int64_t nodes{0};
  std::int64_t count{0};                    ///< With each node's own.
  std::int64_t degree_max{0};               ///< Of the edges into one node.
  const std::int32_t* in_ptr{nullptr};      ///< The edges into node v are in_ptr[v] …
  const std::int32_t* in_source{nullptr};   ///< Where an edge comes from.
  const std::int32_t* out_ptr{nullptr};     ///< The edges out of node v are out_ptr[v] …
  const std::int32_t* out_target{nullptr};  ///< Where it goes.
  const std::int32_t* out_edge{nullptr};    ///< The same edge's place in in_source.
};

/// Edges as they come: source[e] → target[e].
struct EdgePairs {
  std::int64_t nodes{0};
  std::int64_t count{0};
  const std::int64_t* source{nullptr};
  const std::int64_t* target{nullptr};
};

/// Writes in_ptr [nodes + 1], and 1 in self_edge [nodes] for nodes with an edge to themselves.
/// Returns whether every edge is between two nodes; if not, nothing that was written is of use.
/// Requires: nodes + count < 2^31.
[[nodiscard]] bool count_edges(const EdgePairs& given, std::int32_t* in_ptr,
                               std::uint8_t* self_edge);

/// Writes the rest, in_ptr[nodes] numbers each. Requires: count_edges() of the same.
void place_edges(const EdgePairs& given, const std::int32_t* in_ptr, std::int32_t* in_source,
                 std::int32_t* out_ptr, std::int32_t* out_target, std::int32_t* out_edge);

}  // namespace plimsoll::kernels
