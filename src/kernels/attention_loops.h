// SPDX-License-Identifier: Apache-2.0
//
// Loops of graph attention over sorted edges; graph_attention.h has the formula.
//
// Every output row is written by one node's turn, in the order of its edges; sums over all nodes go
// by blocks of kNodeBlock. So bits depend neither on threads nor on other graphs of the batch.
// Reading order: edges.h, this file, attention_loops.cpp.
//
// Threads: free functions; work is shared among torch's threads.   Memory: the caller's.
#pragma once

#include <cstdint>

#include "kernels/edges.h"

namespace plimsoll::kernels {

inline constexpr std::int64_t kHeadsMax = 64;
inline constexpr std::int64_t kNodeBlock = 256;
[[nodiscard]] constexpr std::int64_t node_blocks(std::int64_t nodes) noexcept {
  return (nodes + kNodeBlock - 1) / kNodeBlock;
}

/// What forward and backward share. Shape: h [nodes, heads·out]; scores [nodes, heads]; weights
/// [edges, heads] in the order of in_source; keep [edges, heads] factors of dropout, or null.
struct Attention {
  Edges edges;
  std::int64_t heads{0};
  std::int64_t out{0};
  bool concat{true};
  const float* h{nullptr};
  const float* score_source{nullptr};
  const float* score_target{nullptr};
  const float* keep{nullptr};
  [[nodiscard]] std::int64_t row() const noexcept { return heads * out; }
  [[nodiscard]] std::int64_t width() const noexcept { return concat ? row() : out; }
};

/// a_s·h and a_d·h of each node and head. Reads h, heads, out of `in` alone.
void node_scores(const Attention& in, const float* att_source, const float* att_target,
                 float* score_source, float* score_target);

/// Writes the softmax weights (before dropout) and the result [nodes, width()] with the bias.
void attend(const Attention& in, const float* bias, float* weights, float* result);

/// Shape: grad [nodes, width()]; att_* [heads, out]; edge_scratch [2, edges, heads]; node_scratch
/// [2, nodes, heads]; block_scratch [node_blocks, 2·heads·out + width()]; grad_h like h; the last
/// three like the parameters.
struct AttentionGradients {
  const float* weights{nullptr};
  const float* grad{nullptr};
  const float* att_source{nullptr};
  const float* att_target{nullptr};
  float* edge_scratch{nullptr};
  float* node_scratch{nullptr};
  float* block_scratch{nullptr};
  float* grad_h{nullptr};
  float* grad_att_source{nullptr};
  float* grad_att_target{nullptr};
  float* grad_bias{nullptr};
};
void attend_backward(const Attention& in, const AttentionGradients& out);

}  // namespace plimsoll::kernels
