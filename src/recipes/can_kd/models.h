// SPDX-License-Identifier: Apache-2.0
//
// Models: the finished models of one role, asked together about graphs.
//
// Reading order: task.h, gat_jk.h, vgae.h, q_network.h, this file.
//
// Threads: single-owner.   Memory: the weights of those that are loaded.
#pragma once

#include <cstdint>
#include <filesystem>
#include <optional>

#include "plimsoll/result.h"
#include "recipes/can_kd/config.h"
#include "recipes/can_kd/gat_jk.h"
#include "recipes/can_kd/graph_tensors.h"
#include "recipes/can_kd/q_network.h"
#include "recipes/can_kd/task.h"
#include "recipes/can_kd/vgae.h"

namespace plimsoll::can_kd {

/// RUN/models/NAME.safetensors.
[[nodiscard]] std::filesystem::path model_file(const std::filesystem::path& run, const Task& task);

/// Reads a finished autoencoder or classifier. Errors: of load_tensors().
Result<Vgae> load_vgae(const CanKdConfig& config, Role role, std::int64_t ids,
                       const std::filesystem::path& file);
Result<GatClassifier> load_classifier(const CanKdConfig& config, Role role, std::int64_t ids,
                                      const std::filesystem::path& file);

/// Each graph's error, [G] float32; no gradient.
at::Tensor errors_of(const Vgae& vgae, const GraphTensors& batch);

/// Each graph's probability of an attack, [G] float32; no gradient.
at::Tensor chances_of(const GatClassifier& classifier, const GraphTensors& batch);

/// What the fusion network sees of each graph, [G, 15] float32:
///   0 … 7   of the autoencoder: error, its square and identity parts, mean, deviation, least and
///           most of the latent over the graph's nodes, mean log variance;
///   8 … 14  of the classifier: both logits, both probabilities, their margin, entropy, confidence.
/// Bits of a graph depend on that graph alone.
at::Tensor fusion_states(const Vgae& vgae, const GatClassifier& classifier,
                         const GraphTensors& batch);

/// α·p(attack) + (1 − α)·e/(e + threshold), [G]: above one half means attack. `actions` [G] int64
/// choose α = action / 20.
at::Tensor fused_scores(const at::Tensor& states, const at::Tensor& actions, double threshold);

}  // namespace plimsoll::can_kd
