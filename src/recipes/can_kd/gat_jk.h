// SPDX-License-Identifier: Apache-2.0
//
// GatClassifier: graph attention with jumping knowledge; two classes per graph.
//
//   embedding of the id beside the features → layers × (GatConv, ReLU, dropout) → what the layers
//   know together, concatenated or weighted by an LSTM → mean over a graph's nodes → dense layers
//
// The dense layers that are not the last are hidden·heads wide, whatever the number of layers: were
// they as wide as what they read, as in the original's teachers, they would hold most of the
// model's weights (13 M of the teacher's, where attention has 1.1 M). Source: Xu et al.,
// "Representation Learning on Graphs with Jumping Knowledge Networks" (ICML 2018). Reading order:
// gat_conv.h, this file, layers.h.
//
// Threads: as torch operators; const use from many threads.
// Memory:  the parameters; for backward, per layer what gat_conv.h says and a result, or with
//          checkpointing the result alone.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "recipes/can_kd/adjacency.h"
#include "recipes/can_kd/gat_conv.h"
#include "recipes/can_kd/graph_tensors.h"
#include "recipes/can_kd/layers.h"
#include "recipes/can_kd/mode.h"
#include "torch/checkpoint.h"

namespace plimsoll::can_kd {

inline constexpr std::int64_t kClasses = 2;

struct GatShape {
  std::int64_t ids{0};  ///< GraphSetInfo::table_rows(): every id and the unknown one.
  std::int64_t embedding{0};
  std::int64_t hidden{0};  ///< Of one head.
  std::int64_t layers{0};
  std::int64_t heads{0};
  std::int64_t fc_layers{1};
  bool lstm{false};  ///< Jumping knowledge by an LSTM; else concatenation.
  double dropout{0};
  double attention_dropout{0};
  std::int64_t fc_width{0};  ///< Of the dense layers before the last; 0: hidden·heads.
};

class GatClassifier {
 public:
  /// Every weight from philox(seed, its own stream).
  GatClassifier(const GatShape& shape, std::uint64_t seed);

  /// Logits [G, 2].
  [[nodiscard]] at::Tensor forward(const GraphTensors& graphs, const Adjacency& adjacency,
                                   const Mode& mode) const;

  /// In a fixed order; they require gradients.
  [[nodiscard]] std::vector<NamedTensor> parameters() const;
  /// None: this model has no batch statistics.
  [[nodiscard]] std::vector<NamedTensor> buffers() const;
  [[nodiscard]] const GatShape& shape() const noexcept { return shape_; }

 private:
  GatShape shape_;
  at::Tensor embedding_;  // [ids, embedding]
  std::vector<GatConv> convs_;
  LayerAttention attention_;  // With lstm alone.
  std::vector<Linear> dense_;
};

/// Numbers in all of them: what is printed of teacher and student.
std::int64_t parameter_count(std::span<const NamedTensor> parameters);

}  // namespace plimsoll::can_kd
