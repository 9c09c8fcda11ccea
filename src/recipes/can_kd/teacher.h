// SPDX-License-Identifier: Apache-2.0
//
// Teacher: what a trained model says of each graph, for a student to learn from.
//
// Its answers depend on the graph alone, not on the batch (mode.h), so they may be
// computed where they are asked for, by weights that stay (resident) or that are read for each step
// and let go (released, K8), or be read back from a file keyed by the graph (cached, K9): the
// student sees the same bits. Always in evaluation mode, an autoencoder's latent its mean (K15).
//
// Reading order: graph_tensors.h, gat_jk.h, vgae.h, this file.
//
// Threads: single-owner.
// Memory:  the weights (0 between steps when released); 8 bytes a graph and a bit more with a
//          cache, whose file takes 4 × width bytes a graph or node of the set.
#pragma once

#include <cstdint>
#include <filesystem>
#include <functional>
#include <memory>
#include <optional>
#include <vector>

#include "os/file.h"
#include "plimsoll/governor.h"
#include "plimsoll/graph_set.h"
#include "plimsoll/result.h"
#include "recipes/can_kd/adjacency.h"
#include "recipes/can_kd/graph_tensors.h"
#include "recipes/can_kd/shapes.h"
#include "torch/checkpoint.h"

namespace plimsoll::can_kd {

/// The weights of a teacher, batch statistics included, on the meta device: names and shapes.
[[nodiscard]] std::vector<NamedTensor> teacher_tensors(const TeacherShape& shape);

/// The weights of a model, and what it says; made for each Teacher by teacher.cpp.
class TeacherModel {
 public:
  virtual ~TeacherModel() = default;
  /// A classifier: logits [G, 2]. An autoencoder: [V, latent + 10], mean and reconstruction.
  virtual at::Tensor answers(const GraphTensors& batch, const Adjacency& adjacency) const = 0;
  [[nodiscard]] virtual std::vector<NamedTensor> tensors() const = 0;
};

struct TeacherOptions {
  TeacherShape shape{};
  std::filesystem::path weights{};  ///< A finished model's file; empty: untrained, to rehearse.
  std::filesystem::path cache{};    ///< File of answers, made anew; empty: none.
  bool released{false};             ///< Weights are read for each step and let go after it.
  std::int64_t clear_cache_every_n{0};
};

struct TeacherStats {
  std::int64_t asked{0};    ///< Graphs.
  std::int64_t cached{0};   ///< Of those, answered from the cache.
  std::int64_t cleared{0};  ///< Times the cache's pages were given back.
  std::int64_t loads{0};    ///< Times the weights were read.
};

class Teacher {
 public:
  /// Reads the weights once, to see that they fit. Errors: kNotFound, kCorrupt, kInvalidArgument
  /// (naming the tensor); kIo; kOverBudget when the cache does not fit the disk limit.
  static Result<std::unique_ptr<Teacher>> open(const Governor& governor, const GraphSet& set,
                                               const TeacherOptions& options);

  /// What the teacher says of this batch: see TeacherModel::answers(). No gradient.
  Result<at::Tensor> answers(const GraphTensors& batch, const Adjacency& adjacency);

  /// To be called after each step: lets released weights go, gives the cache's pages back in turn.
  Result<void> end_step();

  /// Bytes of weights held now.
  [[nodiscard]] std::int64_t weight_bytes() const noexcept;
  [[nodiscard]] std::int64_t parameters() const noexcept { return parameters_; }
  /// Columns of answers().
  [[nodiscard]] std::int64_t width() const noexcept { return width_; }
  [[nodiscard]] const TeacherStats& stats() const noexcept { return stats_; }

 private:
  Teacher() = default;
  Result<void> load();
  Result<at::Tensor> computed(const GraphTensors& batch, const Adjacency& adjacency);
  Result<void> read_cached(const GraphTensors& batch, const at::Tensor& out);
  Result<void> keep(const GraphTensors& batch, const at::Tensor& answers);
  [[nodiscard]] bool has_all(const GraphTensors& batch) const;
  /// Calls `work(graph, first row in the batch, rows, first row in the file)`.
  Result<void> for_rows(const GraphTensors& batch,
                        const std::function<Result<void>(std::int64_t, std::int64_t, std::int64_t,
                                                         std::int64_t)>& work) const;

  std::unique_ptr<TeacherModel> model_;
  TeacherOptions options_;
  const GraphSet* set_{nullptr};
  bool by_node_{false};
  std::int64_t width_{0};
  std::int64_t parameters_{0};
  std::int64_t steps_{0};
  File file_;
  at::Tensor first_row_;  // int64 [graphs]: where a graph's rows begin in the file.
  at::Tensor known_;      // uint8 [graphs]: whether they are there.
  TeacherStats stats_;
};

}  // namespace plimsoll::can_kd
