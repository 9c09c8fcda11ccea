// SPDX-License-Identifier: Apache-2.0
//
// GraphTensors: one batch of graphs as the models see it.
//
// The tensors are those of a GraphBatch (plimsoll/graph_set.h). Our models do not read the features
// of edges; they are there for who asks. Reading order: graph_set.h, this file, adjacency.h.
//
// Threads: a value.   Memory: views of whoever assembled the batch.
#pragma once

#include <cstdint>

#include <torch/types.h>

namespace plimsoll::can_kd {

/// Columns of x that are features as they are; column 0 before them is the id's index.
inline constexpr std::int64_t kContinuous = 10;

/// Requires: contiguous CPU tensors; a graph's nodes contiguous, its edges between them.
struct GraphTensors {
  at::Tensor x;              ///< [V, 11] float32; column 0 is the id's index, exact in float.
  at::Tensor edge_index;     ///< [2, E] int64: sources, then targets.
  at::Tensor graph_of_node;  ///< [V] int64, ascending.
  at::Tensor labels;         ///< [G] int64.
  at::Tensor graphs;         ///< [G] int64: which graphs of the set.
  at::Tensor edge_attr{};    ///< [E, 11] float32; undefined unless asked for.

  [[nodiscard]] std::int64_t nodes() const { return x.size(0); }
  [[nodiscard]] std::int64_t edges() const { return edge_index.size(1); }
  [[nodiscard]] std::int64_t size() const { return labels.size(0); }
};

}  // namespace plimsoll::can_kd
