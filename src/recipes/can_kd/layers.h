// SPDX-License-Identifier: Apache-2.0
//
// Layers of these models that are not graph attention: same bits for any number of threads.
//
// Where the bits of torch's operators depend on the number of threads or on a row's place (products
// of narrow matrices, sums, exponentials of the last lanes) there are functions over
// kernels/row_loops.h and operators of kernels/, keeping for backward no more than a tensor that
// lives anyway, or one of its size. `place` is where in the model a mask is used; two masks of one
// step have two places. Reading order: mode.h, this file, kernels/row_loops.h.
//
// Threads: as torch operators.   Memory: parameters; what autograd keeps is said at each.
#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "recipes/can_kd/adjacency.h"
#include "recipes/can_kd/graph_tensors.h"
#include "recipes/can_kd/mode.h"
#include "torch/checkpoint.h"

namespace plimsoll::can_kd {

/// x Wᵀ (+ b when defined). Shape: x [rows, in], weight [out, in], bias [out].
/// Keeps x and weight, in bfloat16 with mode.bf16.
at::Tensor dense(const at::Tensor& x, const at::Tensor& weight, const at::Tensor& bias,
                 const Mode& mode);

struct Linear {
  at::Tensor weight;  ///< [out, in]
  at::Tensor bias;    ///< [out]
  /// Uniform within ±1/√in, as torch's; advances `stream` by 2.
  static Linear make(std::int64_t in, std::int64_t out, std::uint64_t seed, std::uint64_t& stream);
  [[nodiscard]] at::Tensor forward(const at::Tensor& x, const Mode& mode) const;
  void add_parameters(std::vector<NamedTensor>& list, const std::string& name) const;
};

struct BatchNorm {
  at::Tensor weight, bias;                    ///< [width]
  at::Tensor running_mean, running_variance;  ///< [width]; momentum 0.1, variance unbiased.
  static BatchNorm make(std::int64_t width);
  /// ReLU and dropout of the normed rows. Training moves the running statistics unless `again`.
  /// Keeps x and the result.
  [[nodiscard]] at::Tensor relu_dropout(const at::Tensor& x, double dropout, const Mode& mode,
                                        std::uint64_t place, bool again) const;
  void add_parameters(std::vector<NamedTensor>& list, const std::string& name) const;
  void add_buffers(std::vector<NamedTensor>& list, const std::string& name) const;
};

/// Dropout of ReLU of x. Keeps the result alone.
at::Tensor relu_dropout(const at::Tensor& x, double dropout, const Mode& mode, std::uint64_t place);

/// 1 / (1 + e^−x). Keeps the result.
at::Tensor logistic(const at::Tensor& x);

/// mean + noise·e^(log_variance/2), noise normal; mean itself when not training.
at::Tensor sample_normal(const at::Tensor& mean, const at::Tensor& log_variance, const Mode& mode,
                         std::uint64_t place);

/// Rows of the table chosen by column 0 of x, beside x's other columns: [nodes, width + 10].
/// Requires: every id below table.size(0) (graph sets map unknown ids to the last one).
at::Tensor embed_nodes(const at::Tensor& table, const at::Tensor& x);

/// Mean of each graph's nodes, [graphs, width]; zeros for a graph without any. Keeps nothing.
at::Tensor mean_of_nodes(const at::Tensor& x, const Adjacency& adjacency);

/// Weighs the layers of each node by an LSTM in both directions over them and a score each, as
/// torch_geometric's JumpingKnowledge("lstm") does.
struct LayerAttention {
  at::Tensor forward_input, forward_hidden, forward_input_bias, forward_hidden_bias;
  at::Tensor backward_input, backward_hidden, backward_input_bias, backward_hidden_bias;
  Linear score;  ///< [1, 2·hidden]
  /// Hidden width layers·width/2 each way; uniform within ±1/√hidden, as torch's LSTM.
  static LayerAttention make(std::int64_t width, std::int64_t layers, std::uint64_t seed,
                             std::uint64_t& stream);
  /// Shape: layers of [nodes, width] → [nodes, width].
  [[nodiscard]] at::Tensor forward(const std::vector<at::Tensor>& layers, const Mode& mode) const;
  void add_parameters(std::vector<NamedTensor>& list, const std::string& name) const;
};

/// Runs `layer(inputs, again)` keeping the inputs alone; backward runs it again, with again = true.
/// Gradients are those of running it plainly, bit for bit. `inputs` must name every tensor that
/// takes a gradient through it.
using Layer = std::function<at::Tensor(const std::vector<at::Tensor>& inputs, bool again)>;
at::Tensor checkpointed(const Layer& layer, const std::vector<at::Tensor>& inputs);

}  // namespace plimsoll::can_kd
