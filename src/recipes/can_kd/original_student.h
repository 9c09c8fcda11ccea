// SPDX-License-Identifier: Apache-2.0
//
// OriginalStudent: the original's published students, to be evaluated beside ours.
//
//   features → layers × (GATConv, ReLU) → JumpingKnowledge("lstm") → mean over nodes → dense →
//   logit
//
// Loaded from the safetensors made of its .pth files, under torch_geometric's names
// (convs.N.lin.weight, jk.lstm.weight_ih_l0, jk.att.weight, lin.weight, …). These models know no
// table of ids: their ten features are the arbitration id as a number, the means of the eight bytes
// within 0 … 255, and how many frames of the window the node sent, of windows of 50 frames. Ours
// hold the id's place in the vocabulary, bytes over 255 and counts scaled within the window:
// original_features() turns them back, taking the counts from the edges, which keep them. Reading
// order: gat_jk.h, this file.
//
// Threads: as torch operators; const use from many threads.   Memory: the weights, about 1.1 MB.
#pragma once

#include <cstdint>
#include <filesystem>
#include <span>
#include <vector>

#include "plimsoll/result.h"
#include "recipes/can_kd/adjacency.h"
#include "recipes/can_kd/gat_conv.h"
#include "recipes/can_kd/layers.h"

namespace plimsoll::can_kd {

/// [V, 10]: what the original's models read. Shape: edge_attr [E, 11] float32, column 0 the frames
/// of the edge; `vocabulary` is GraphSet::vocabulary(). An id that is not in it is given as 0.
at::Tensor original_features(const GraphTensors& graphs, const at::Tensor& edge_attr,
                             std::span<const std::int64_t> vocabulary);

class OriginalStudent {
 public:
  /// Errors: kNotFound (no file, or a tensor it lacks, by name), kCorrupt (a tensor's shape), kIo.
  static Result<OriginalStudent> load(const std::filesystem::path& path);

  /// Shape: features [V, 10] → logits of an attack, [G]. No gradient.
  [[nodiscard]] at::Tensor forward(const at::Tensor& features, const Adjacency& adjacency) const;

  [[nodiscard]] std::int64_t parameter_count() const noexcept { return parameters_; }

 private:
  std::vector<GatConv> convs_;
  LayerAttention attention_;
  Linear head_;
  std::int64_t parameters_{0};
};

}  // namespace plimsoll::can_kd
