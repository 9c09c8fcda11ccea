// SPDX-License-Identifier: Apache-2.0
//
// Vgae: the variational autoencoder of a graph's nodes, its loss, and a graph's error.
//
//   embedding of the id beside the features → GatConv layers of the hidden widths (heads in the
//   first) with batch norm, ReLU, dropout → mean and log variance → z
//   z → GatConv layers of the same widths backwards (4 heads but in the last) → sigmoid: features
//   z → dense: id;  z → dense, dense, dense: which ids the node sends to
//
// A layer of several heads divides its width among them, or, where that does not go, takes the mean
// of heads of the full width. Log variance is clamped to ±10, and outside training z is the mean.
// Logits over ids are not kept: the losses compute them block by block, gradients included.
// Source: Kipf and Welling, "Variational Graph Auto-Encoders" (2016). Reading order: gat_conv.h,
// layers.h, this file, node_losses.h.
//
// Threads: as torch operators; const use from many threads, except forward() in training, which
//          moves the running statistics.
// Memory:  the parameters; for backward, per layer what gat_conv.h and layers.h say.
#pragma once

#include <cstdint>
#include <vector>

#include "recipes/can_kd/adjacency.h"
#include "recipes/can_kd/gat_conv.h"
#include "recipes/can_kd/graph_tensors.h"
#include "recipes/can_kd/layers.h"
#include "recipes/can_kd/mode.h"
#include "torch/checkpoint.h"

namespace plimsoll::can_kd {

inline constexpr double kLogVarianceMax = 10.0;
inline constexpr std::int64_t kDecoderHeads = 4;
inline constexpr double kIdWeight = 0.1;  ///< Of the losses' parts.
inline constexpr double kNeighbourWeight = 0.05;
inline constexpr double kDivergenceWeight = 0.01;

struct VgaeShape {
  std::int64_t ids{0};  ///< GraphSetInfo::table_rows().
  std::int64_t embedding{0};
  std::vector<std::int64_t> hidden;  ///< Two widths or more; the last is the latent's.
  std::int64_t heads{1};
  double dropout{0};
  [[nodiscard]] std::int64_t latent() const { return hidden.back(); }
};

struct VgaeOutput {
  at::Tensor z;               ///< [V, latent]
  at::Tensor mean;            ///< [V, latent]
  at::Tensor log_variance;    ///< [V, latent], within ±10.
  at::Tensor reconstruction;  ///< [V, 10], within (0, 1).
  at::Tensor neighbour_rows;  ///< [V, latent]: what the last layer of the neighbours' head reads.
  Linear id_head;             ///< The model's own: logits are id_head of z,
  Linear neighbour_head;      ///< and neighbour_head of neighbour_rows.
  Mode mode;                  ///< Of the pass.
};

class Vgae {
 public:
  /// Every weight from philox(seed, its own stream).
  Vgae(const VgaeShape& shape, std::uint64_t seed);

  [[nodiscard]] VgaeOutput forward(const GraphTensors& graphs, const Adjacency& adjacency,
                                   const Mode& mode) const;

  /// In a fixed order; they require gradients.
  [[nodiscard]] std::vector<NamedTensor> parameters() const;
  [[nodiscard]] std::vector<NamedTensor> buffers() const;  ///< Running statistics of batch norms.
  [[nodiscard]] const VgaeShape& shape() const noexcept { return shape_; }

 private:
  VgaeShape shape_;
  at::Tensor embedding_;  // [ids, embedding]
  std::vector<GatConv> encoder_;
  std::vector<BatchNorm> encoder_norms_;
  Linear mean_, log_variance_;
  std::vector<GatConv> decoder_;
  std::vector<BatchNorm> decoder_norms_;  // One fewer: none after the last layer.
  Linear id_head_;
  std::vector<Linear> neighbour_layers_;  // Three.
};

/// Scalars; the parts without their weights.
struct VgaeLoss {
  at::Tensor total;       ///< mse + 0.1 id + 0.05 neighbours + 0.01 divergence.
  at::Tensor mse;         ///< Mean over nodes and features.
  at::Tensor id;          ///< Mean cross entropy of the id.
  at::Tensor neighbours;  ///< Mean binary cross entropy over nodes and ids.
  at::Tensor divergence;  ///< Mean over nodes and latent columns of KL to the normal.
};
VgaeLoss vgae_loss(const VgaeOutput& output, const GraphTensors& graphs,
                   const Adjacency& adjacency);

/// [G] float32: mean square plus 0.1 mean cross entropy of each graph's nodes; how difficult and
/// how anomalous it is. No gradient. A graph's bits are its own.
at::Tensor graph_errors(const VgaeOutput& output, const GraphTensors& graphs,
                        const Adjacency& adjacency);

/// Logits [V, ids] in full, for looking at.
at::Tensor id_logits(const VgaeOutput& output);
at::Tensor neighbour_logits(const VgaeOutput& output);

}  // namespace plimsoll::can_kd
