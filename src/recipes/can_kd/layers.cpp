// SPDX-License-Identifier: Apache-2.0
//
// Layers made of operators of kernels/, and what is the recipe's own.
//
// Threads: as torch operators.   Memory: see layers.h.
#include "recipes/can_kd/layers.h"

#include <ATen/Parallel.h>
#include <ATen/TensorOperators.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/zeros.h>
#include <c10/core/GradMode.h>
#include <torch/csrc/autograd/autograd.h>
#include <torch/csrc/autograd/custom_function.h>

#include <cmath>
#include <optional>

#include "base/check.h"
#include "kernels/floats.h"
#include "kernels/layers.h"
#include "kernels/linear_rows.h"
#include "torch/random_tensors.h"

namespace plimsoll::can_kd {
namespace {

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

kernels::Noise noise_of(double rate, const Mode& mode, std::uint64_t place) {
  return {static_cast<std::int64_t>(mode.noise), static_cast<std::int64_t>(place),
          mode.training ? rate : 0.0};
}

struct EmbedNodes : torch::autograd::Function<EmbedNodes> {
  static at::Tensor forward(AutogradContext* context, const at::Tensor& table,
                            const at::Tensor& x) {
    const std::int64_t nodes = x.size(0);
    const std::int64_t width = table.size(1);
    const std::int64_t given = x.size(1);
    const std::int64_t made = width + given - 1;
    auto y = at::empty({nodes, made}, x.options());
    at::parallel_for(0, nodes, 1024, [&](std::int64_t begin, std::int64_t end) {
      for (std::int64_t v = begin; v < end; ++v) {
        const float* row = kernels::floats(x) + v * given;
        PLIMSOLL_CHECK(row[0] >= 0.0F && row[0] < static_cast<float>(table.size(0)),
                       "an id's index lies within the table of ids");
        const float* from = kernels::floats(table) + static_cast<std::int64_t>(row[0]) * width;
        float* to = kernels::out_floats(y) + v * made;
        std::copy(from, from + width, to);
        std::copy(row + 1, row + given, to + width);
      }
    });
    context->save_for_backward({x});
    context->saved_data["rows"] = table.size(0);
    context->saved_data["width"] = width;
    return y;
  }
  static variable_list backward(AutogradContext* context, const variable_list& gradients) {
    const auto x = context->get_saved_variables()[0];
    const auto grad = gradients[0].contiguous();
    const std::int64_t width = context->saved_data["width"].toInt();
    auto sum = at::zeros({context->saved_data["rows"].toInt(), width}, grad.options());
    // Each thread has columns of its own; every sum goes over the nodes in order.
    at::parallel_for(0, width, 16, [&](std::int64_t begin, std::int64_t end) {
      for (std::int64_t v = 0; v < x.size(0); ++v) {
        const float* from = kernels::floats(grad) + v * grad.size(1);
        float* to = kernels::out_floats(sum) +
                    static_cast<std::int64_t>(kernels::floats(x)[v * x.size(1)]) * width;
        for (std::int64_t c = begin; c < end; ++c) {
          to[c] += from[c];
        }
      }
    });
    return {sum, at::Tensor{}};
  }
};

// A layer as autograd's context can hold it.
struct HeldLayer : torch::CustomClassHolder {
  explicit HeldLayer(Layer given) : layer(std::move(given)) {}
  Layer layer;
};

struct Checkpointed : torch::autograd::Function<Checkpointed> {
  static at::Tensor forward(AutogradContext* context, at::TensorList inputs, const Layer& layer) {
    context->save_for_backward(inputs.vec());
    context->saved_data["layer"] = c10::IValue::make_capsule(c10::make_intrusive<HeldLayer>(layer));
    return layer(inputs.vec(), false);  // Gradients are off within forward.
  }
  static variable_list backward(AutogradContext* context, const variable_list& gradients) {
    const auto saved = context->get_saved_variables();
    const auto held = context->saved_data["layer"].toCapsule();
    const c10::AutoGradMode on{true};
    variable_list inputs;
    variable_list wanted;
    for (const auto& x : saved) {
      const bool wants = x.defined() && x.requires_grad();
      inputs.push_back(wants ? x.detach().set_requires_grad(true) : x);
      if (wants) {
        wanted.push_back(inputs.back());
      }
    }
    const auto y = static_cast<HeldLayer&>(*held).layer(inputs, true);
    // Of one layer's outputs an LSTM never reads its recurrent weights: they have no gradient.
    const auto made = torch::autograd::grad({y}, wanted, {gradients[0]}, std::nullopt, false,
                                            /*allow_unused=*/true);
    variable_list all;
    for (std::size_t k = 0, next = 0; k < saved.size(); ++k) {
      const bool wants = saved[k].defined() && saved[k].requires_grad();
      all.push_back(wants ? made[next++] : at::Tensor{});
    }
    all.emplace_back();  // The layer's.
    return all;
  }
};

at::Tensor uniform(at::IntArrayRef shape, double width, std::uint64_t seed, std::uint64_t stream) {
  return random_uniform(shape, width, seed, stream).set_requires_grad(true);
}

}  // namespace

at::Tensor dense(const at::Tensor& x, const at::Tensor& weight, const at::Tensor& bias,
                 const Mode& mode) {
  return kernels::linear_rows(x, weight, bias, mode.bf16);
}

Linear Linear::make(std::int64_t in, std::int64_t out, std::uint64_t seed, std::uint64_t& stream) {
  Linear made;
  random_linear(made.weight, made.bias, out, in, seed, stream);
  return made;
}

at::Tensor Linear::forward(const at::Tensor& x, const Mode& mode) const {
  return dense(x, weight, bias, mode);
}

void Linear::add_parameters(std::vector<NamedTensor>& list, const std::string& name) const {
  list.push_back({name + ".weight", weight});
  list.push_back({name + ".bias", bias});
}

BatchNorm BatchNorm::make(std::int64_t width) {
  BatchNorm made;
  made.weight = at::ones({width}, at::kFloat).set_requires_grad(true);
  made.bias = at::zeros({width}, at::kFloat).set_requires_grad(true);
  made.running_mean = at::zeros({width}, at::kFloat);
  made.running_variance = at::ones({width}, at::kFloat);
  return made;
}

at::Tensor BatchNorm::relu_dropout(const at::Tensor& x, double dropout, const Mode& mode,
                                   std::uint64_t place, bool again) const {
  constexpr double kMomentum = 0.1;
  kernels::Moments moments{running_mean, running_variance};
  if (mode.training) {
    const auto rows = static_cast<double>(x.size(0));
    moments = kernels::column_moments(x);
    if (!again && rows > 1) {
      const c10::AutoGradMode off{false};
      auto mean = running_mean;
      auto variance = running_variance;
      mean.mul_(1.0 - kMomentum).add_(moments.mean, kMomentum);
      variance.mul_(1.0 - kMomentum).add_(moments.variance, kMomentum * rows / (rows - 1.0));
    }
  }
  return kernels::norm_relu_dropout(x, weight, bias, moments, mode.training,
                                    noise_of(dropout, mode, place));
}

void BatchNorm::add_parameters(std::vector<NamedTensor>& list, const std::string& name) const {
  list.push_back({name + ".weight", weight});
  list.push_back({name + ".bias", bias});
}

void BatchNorm::add_buffers(std::vector<NamedTensor>& list, const std::string& name) const {
  list.push_back({name + ".running_mean", running_mean});
  list.push_back({name + ".running_variance", running_variance});
}

at::Tensor relu_dropout(const at::Tensor& x, double dropout, const Mode& mode,
                        std::uint64_t place) {
  return kernels::relu_dropout(x, noise_of(dropout, mode, place));
}

at::Tensor logistic(const at::Tensor& x) {
  return kernels::logistic(x);
}

at::Tensor sample_normal(const at::Tensor& mean, const at::Tensor& log_variance, const Mode& mode,
                         std::uint64_t place) {
  if (!mode.training) {
    return mean;
  }
  return kernels::sample_normal(mean, log_variance, noise_of(0.0, mode, place));
}

at::Tensor embed_nodes(const at::Tensor& table, const at::Tensor& x) {
  PLIMSOLL_CHECK(x.is_contiguous(), "the batch's features are dense rows");
  return EmbedNodes::apply(table, x);
}

at::Tensor mean_of_nodes(const at::Tensor& x, const Adjacency& adjacency) {
  return kernels::segment_mean(x, node_runs(adjacency));
}

LayerAttention LayerAttention::make(std::int64_t width, std::int64_t layers, std::uint64_t seed,
                                    std::uint64_t& stream) {
  const std::int64_t hidden = layers * width / 2;
  const double within = 1.0 / std::sqrt(static_cast<double>(hidden));
  LayerAttention made;
  const auto fill = [&](at::Tensor& input, at::Tensor& recurrent, at::Tensor& input_bias,
                        at::Tensor& recurrent_bias) {
    input = uniform({4 * hidden, width}, within, seed, stream++);
    recurrent = uniform({4 * hidden, hidden}, within, seed, stream++);
    input_bias = uniform({4 * hidden}, within, seed, stream++);
    recurrent_bias = uniform({4 * hidden}, within, seed, stream++);
  };
  fill(made.forward_input, made.forward_hidden, made.forward_input_bias, made.forward_hidden_bias);
  fill(made.backward_input, made.backward_hidden, made.backward_input_bias,
       made.backward_hidden_bias);
  made.score = Linear::make(2 * hidden, 1, seed, stream);
  return made;
}

at::Tensor LayerAttention::forward(const std::vector<at::Tensor>& layers, const Mode& mode) const {
  const std::size_t count = layers.size();
  const auto run = [&](bool ahead) {
    const auto& input = ahead ? forward_input : backward_input;
    const auto& recurrent = ahead ? forward_hidden : backward_hidden;
    const auto& input_bias = ahead ? forward_input_bias : backward_input_bias;
    const auto& recurrent_bias = ahead ? forward_hidden_bias : backward_hidden_bias;
    std::vector<at::Tensor> states(count);
    at::Tensor hidden;
    at::Tensor cell;
    for (std::size_t step = 0; step < count; ++step) {
      const std::size_t l = ahead ? step : count - 1 - step;
      auto gates = dense(layers[l], input, input_bias, mode);
      gates = gates + (hidden.defined() ? dense(hidden, recurrent, recurrent_bias, mode)
                                        : recurrent_bias.unsqueeze(0).expand_as(gates));
      const auto made = kernels::lstm_cell(gates, cell);
      hidden = made.hidden;
      cell = made.cell;
      states[l] = hidden;
    }
    return states;
  };
  const auto ahead = run(true);
  const auto back = run(false);
  std::vector<at::Tensor> scores;
  for (std::size_t l = 0; l < count; ++l) {
    scores.push_back(score.forward(at::cat({ahead[l], back[l]}, 1), mode));
  }
  return kernels::mix_layers(layers, at::cat(scores, 1));
}

void LayerAttention::add_parameters(std::vector<NamedTensor>& list, const std::string& name) const {
  list.push_back({name + ".forward.input", forward_input});
  list.push_back({name + ".forward.hidden", forward_hidden});
  list.push_back({name + ".forward.input_bias", forward_input_bias});
  list.push_back({name + ".forward.hidden_bias", forward_hidden_bias});
  list.push_back({name + ".backward.input", backward_input});
  list.push_back({name + ".backward.hidden", backward_hidden});
  list.push_back({name + ".backward.input_bias", backward_input_bias});
  list.push_back({name + ".backward.hidden_bias", backward_hidden_bias});
  score.add_parameters(list, name + ".score");
}

at::Tensor checkpointed(const Layer& layer, const std::vector<at::Tensor>& inputs) {
  return Checkpointed::apply(at::TensorList(inputs), layer);
}

}  // namespace plimsoll::can_kd
