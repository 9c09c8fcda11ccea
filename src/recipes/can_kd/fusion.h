// SPDX-License-Identifier: Apache-2.0
//
// Fusion: a network learns by trial which mixture of both models' answers to believe of a graph.
//
// Each step ("episode") looks at fusion_batch training graphs: the network (or, with a chance that
// decays, a dice) chooses one of 21 weights, the fused score says attack or not, and the reward is
// +3 or −3. Steps are kept in a ring; the network follows Huber's loss of a sample of it towards
// reward + γ·(best value of the next graph's state, by a target network).
// Source: Mnih et al., "Human-level control through deep reinforcement learning" (2015), methods.
// Reading order: models.h, work.h, this file.
//
// Threads: single-owner.
// Memory:  states of at most kFusionGraphsMax graphs (68 bytes each), the ring (fusion_replay × 140
//          bytes), two small networks. Both models only while states are computed.
#pragma once

#include <cstdint>
#include <filesystem>
#include <map>
#include <memory>
#include <optional>
#include <vector>

#include "recipes/can_kd/config.h"
#include "recipes/can_kd/data.h"
#include "recipes/can_kd/models.h"
#include "recipes/can_kd/q_network.h"
#include "recipes/can_kd/work.h"
#include "torch/dense_adam.h"

namespace plimsoll::can_kd {

inline constexpr std::int64_t kFusionGraphsMax = 65'536;
inline constexpr double kFusionReward = 3.0;

/// The fusion stage's finished model.
struct FusionModel {
  QNetwork network;
  at::Tensor threshold;  ///< float64 [1]: the error that counts as one half.

  static Result<FusionModel> load(const CanKdConfig& config, const std::filesystem::path& file);
  /// Scores [G] of graphs in these states; above one half means attack.
  [[nodiscard]] at::Tensor scores(const at::Tensor& states) const;
};

class Fusion final : public Work {
 public:
  /// Errors: of reading the two models; kInvalidArgument without training graphs.
  static Result<std::unique_ptr<Fusion>> make(const CanKdConfig& config, const Data& data,
                                              const Task& task, const std::filesystem::path& vgae,
                                              const std::filesystem::path& classifier);

  Result<StepNews> step() override;
  Result<EpochNews> end_epoch() override;
  [[nodiscard]] bool finished() const override { return episode_ >= config_.fusion_episodes; }
  [[nodiscard]] std::int64_t epochs() const override { return 1; }
  [[nodiscard]] std::int64_t steps() const override { return config_.fusion_episodes; }
  [[nodiscard]] std::vector<NamedTensor> tensors() const override;
  [[nodiscard]] std::map<std::string, double> numbers() const override;
  Result<void> restore(const std::map<std::string, double>& numbers) override;
  Result<void> save_model(const std::filesystem::path& path) const override;
  [[nodiscard]] std::int64_t parameters() const override;

 private:
  struct Sample {
    at::Tensor states;   // [rows, 15]
    at::Tensor next;     // [rows, 15]
    at::Tensor actions;  // int64 [rows]
    at::Tensor rewards;  // [rows]
  };
  Fusion(const CanKdConfig& config, const Data& data, const Task& task);
  Result<void> look(const std::filesystem::path& vgae, const std::filesystem::path& classifier);
  [[nodiscard]] Sample act() const;
  void remember(const Sample& seen);
  [[nodiscard]] Sample recall() const;
  [[nodiscard]] double epsilon() const;

  const CanKdConfig& config_;
  const Data& data_;
  Task task_;
  QNetwork network_;
  QNetwork target_;
  std::optional<DenseAdam> adam_;
  at::Tensor states_;     // [graphs, 15]
  at::Tensor labels_;     // uint8 [graphs]
  at::Tensor threshold_;  // float64 [1]
  Sample ring_;           // fusion_replay rows.
  std::int64_t remembered_{0};
  std::int64_t episode_{0};
  double reward_sum_{0.0};
};

}  // namespace plimsoll::can_kd
