// SPDX-License-Identifier: Apache-2.0
//
// Autograd functions over kernels/row_loops.h.
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
#include "kernels/linear_rows.h"
#include "kernels/row_loops.h"
#include "torch/random_tensors.h"

namespace plimsoll::can_kd {
namespace {

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

kernels::Extent extent(const at::Tensor& x) {
  return {x.size(0), x.size(1)};
}

kernels::Dropout dropout_of(double rate, const Mode& mode, std::uint64_t place) {
  return {mode.noise, place, mode.training ? rate : 0.0};
}

// An input that may be absent, as autograd wants it.
std::optional<at::Tensor> present(const at::Tensor& x) {
  return x.defined() ? std::optional<at::Tensor>(x) : std::nullopt;
}

struct ReluDropout : torch::autograd::Function<ReluDropout> {
  static at::Tensor forward(AutogradContext* context, const at::Tensor& given,
                            const kernels::Dropout& dropout) {
    const auto x = given.contiguous();
    auto y = at::empty_like(x);
    kernels::relu_dropout(kernels::floats(x), x.numel(), dropout, kernels::out_floats(y));
    context->save_for_backward({y});
    context->saved_data["scale"] = static_cast<double>(dropout.scale());
    return y;
  }
  static variable_list backward(AutogradContext* context, const variable_list& gradients) {
    const auto y = context->get_saved_variables()[0];
    const auto grad = gradients[0].contiguous();
    auto grad_x = at::empty_like(y);
    kernels::relu_dropout_backward(kernels::floats(y), kernels::floats(grad), y.numel(),
                                   static_cast<float>(context->saved_data["scale"].toDouble()),
                                   kernels::out_floats(grad_x));
    return {grad_x, at::Tensor{}};
  }
};

constexpr double kNormFloor = 1e-5;  // Added to the variance, as torch's BatchNorm does.

// 1/σ of each column.
at::Tensor inverse_deviation(const at::Tensor& variance) {
  auto inverse = at::empty_like(variance);
  const float* from = kernels::floats(variance);
  float* to = kernels::out_floats(inverse);
  for (std::int64_t c = 0; c < variance.numel(); ++c) {
    to[c] = static_cast<float>(1.0 / std::sqrt(static_cast<double>(from[c]) + kNormFloor));
  }
  return inverse;
}

struct Moments {
  at::Tensor mean;
  at::Tensor variance;
  bool batch{false};
};

struct NormReluDropout : torch::autograd::Function<NormReluDropout> {
  static at::Tensor forward(AutogradContext* context, const at::Tensor& x, const at::Tensor& weight,
                            const at::Tensor& bias, const Moments& moments,
                            const kernels::Dropout& dropout) {
    const auto inverse = inverse_deviation(moments.variance);
    auto line = at::empty({2, x.size(1)}, x.options());
    float* by = kernels::out_floats(line);
    float* plus = by + x.size(1);
    for (std::int64_t c = 0; c < x.size(1); ++c) {
      by[c] = kernels::floats(weight)[c] * kernels::floats(inverse)[c];
      plus[c] = kernels::floats(bias)[c] - kernels::floats(moments.mean)[c] * by[c];
    }
    auto y = at::empty_like(x);
    kernels::scale_relu_dropout(kernels::floats(x), extent(x), by, plus, dropout,
                                kernels::out_floats(y));
    context->save_for_backward({x, y, moments.mean, inverse, weight});
    context->saved_data["scale"] = static_cast<double>(dropout.scale());
    context->saved_data["batch"] = moments.batch;
    return y;
  }
  static variable_list backward(AutogradContext* context, const variable_list& gradients) {
    const auto saved = context->get_saved_variables();
    const auto grad = gradients[0].contiguous();
    auto grad_x = at::empty_like(saved[0]);
    auto grad_weight = at::empty_like(saved[4]);
    auto grad_bias = at::empty_like(saved[4]);
    kernels::NormGradient in;
    in.shape = extent(saved[0]);
    in.x = kernels::floats(saved[0]);
    in.y = kernels::floats(saved[1]);
    in.grad = kernels::floats(grad);
    in.mean = kernels::floats(saved[2]);
    in.inverse = kernels::floats(saved[3]);
    in.weight = kernels::floats(saved[4]);
    in.scale = static_cast<float>(context->saved_data["scale"].toDouble());
    in.batch = context->saved_data["batch"].toBool();
    in.grad_x = kernels::out_floats(grad_x);
    in.grad_weight = kernels::out_floats(grad_weight);
    in.grad_bias = kernels::out_floats(grad_bias);
    kernels::norm_relu_dropout_backward(in);
    return {grad_x, grad_weight, grad_bias, at::Tensor{}, at::Tensor{}};
  }
};

struct Sigmoid : torch::autograd::Function<Sigmoid> {
  static at::Tensor forward(AutogradContext* context, const at::Tensor& given) {
    const auto x = given.contiguous();
    auto y = at::empty_like(x);
    kernels::sigmoid(kernels::floats(x), x.numel(), kernels::out_floats(y));
    context->save_for_backward({y});
    return y;
  }
  static variable_list backward(AutogradContext* context, const variable_list& gradients) {
    const auto y = context->get_saved_variables()[0];
    return {gradients[0] * y * (1.0 - y)};
  }
};

struct SampleNormal : torch::autograd::Function<SampleNormal> {
  static at::Tensor forward(AutogradContext* context, const at::Tensor& mean,
                            const at::Tensor& log_variance, const Mode& mode, std::uint64_t place) {
    auto apart = at::empty_like(mean);
    kernels::normals(mode.noise, place, mean.numel(), kernels::out_floats(apart));
    auto deviation = log_variance * 0.5;
    kernels::exponential(kernels::floats(deviation), deviation.numel(),
                         kernels::out_floats(deviation));
    apart.mul_(deviation);
    context->save_for_backward({apart});
    return mean + apart;
  }
  static variable_list backward(AutogradContext* context, const variable_list& gradients) {
    const auto apart = context->get_saved_variables()[0];
    return {gradients[0], gradients[0] * apart * 0.5, at::Tensor{}, at::Tensor{}};
  }
};

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

struct MeanOfNodes : torch::autograd::Function<MeanOfNodes> {
  static at::Tensor forward(AutogradContext* context, const at::Tensor& given,
                            const Adjacency* adjacency) {
    const auto x = given.contiguous();
    auto y = at::empty({adjacency->graphs, x.size(1)}, x.options());
    kernels::mean_of_runs(kernels::floats(x), x.size(1), adjacency->node_ptr,
                          kernels::out_floats(y));
    context->saved_data["adjacency"] = reinterpret_cast<std::int64_t>(adjacency);
    return y;
  }
  static variable_list backward(AutogradContext* context, const variable_list& gradients) {
    const auto& adjacency =
        *reinterpret_cast<const Adjacency*>(context->saved_data["adjacency"].toInt());
    const auto grad = gradients[0].contiguous();
    auto grad_x = at::empty({adjacency.nodes, grad.size(1)}, grad.options());
    kernels::mean_of_runs_backward(kernels::floats(grad), grad.size(1), adjacency.node_ptr,
                                   kernels::out_floats(grad_x));
    return {grad_x, at::Tensor{}};
  }
};

// → {hidden, cell}. `before` may be undefined.
struct LstmCell : torch::autograd::Function<LstmCell> {
  static variable_list forward(AutogradContext* context, const at::Tensor& gates,
                               const std::optional<at::Tensor>& before_given) {
    const auto before = before_given.value_or(at::Tensor{});
    auto made = gates.contiguous().clone();
    auto cell = at::empty({gates.size(0), gates.size(1) / 4}, gates.options());
    auto hidden = at::empty_like(cell);
    kernels::lstm_cell(kernels::out_floats(made), extent(cell),
                       before.defined() ? kernels::floats(before) : nullptr,
                       kernels::out_floats(cell), kernels::out_floats(hidden));
    context->save_for_backward({made, before, cell});
    return {hidden, cell};
  }
  static variable_list backward(AutogradContext* context, const variable_list& gradients) {
    const auto saved = context->get_saved_variables();
    const auto dense_or_none = [](const at::Tensor& x) { return x.defined() ? x.contiguous() : x; };
    const auto grad_hidden = dense_or_none(gradients[0]);
    const auto grad_cell = dense_or_none(gradients[1]);
    auto grad_gates = at::empty_like(saved[0]);
    const auto grad_before = saved[1].defined() ? at::empty_like(saved[2]) : at::Tensor{};
    const auto or_null = [](const at::Tensor& x) {
      return x.defined() ? kernels::floats(x) : nullptr;
    };
    kernels::LstmGradient in;
    in.shape = extent(saved[2]);
    in.gates = kernels::floats(saved[0]);
    in.before = or_null(saved[1]);
    in.cell = kernels::floats(saved[2]);
    in.grad_cell = or_null(grad_cell);
    in.grad_hidden = or_null(grad_hidden);
    in.grad_gates = kernels::out_floats(grad_gates);
    in.grad_before = grad_before.defined() ? kernels::out_floats(grad_before) : nullptr;
    kernels::lstm_cell_backward(in);
    return {grad_gates, grad_before};
  }
};

std::vector<const float*> pointers(at::TensorList list, std::size_t count) {
  std::vector<const float*> all;
  for (std::size_t l = 0; l < count; ++l) {
    all.push_back(kernels::floats(list[l]));
  }
  return all;
}

// Inputs: the layers' rows, then the scores [rows, layers].
struct MixLayers : torch::autograd::Function<MixLayers> {
  static at::Tensor forward(AutogradContext* context, at::TensorList inputs) {
    const std::size_t layers = inputs.size() - 1;
    const auto scores = inputs.back().contiguous();
    auto weights = at::empty_like(scores);
    auto y = at::empty_like(inputs[0]);
    kernels::mix_rows(pointers(inputs, layers), extent(y), kernels::floats(scores),
                      kernels::out_floats(weights), kernels::out_floats(y));
    variable_list saved(inputs.begin(), inputs.end() - 1);
    saved.push_back(weights);
    context->save_for_backward(saved);
    return y;
  }
  static variable_list backward(AutogradContext* context, const variable_list& gradients) {
    const auto saved = context->get_saved_variables();
    const std::size_t layers = saved.size() - 1;
    const auto grad = gradients[0].contiguous();
    variable_list made;
    std::vector<float*> to;
    for (std::size_t l = 0; l < layers; ++l) {
      made.push_back(at::empty_like(grad));
      to.push_back(kernels::out_floats(made.back()));
    }
    made.push_back(at::empty_like(saved.back()));
    kernels::mix_rows_backward(pointers(saved, layers), extent(grad), kernels::floats(saved.back()),
                               kernels::floats(grad), to, kernels::out_floats(made.back()));
    return made;
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
  Moments moments{running_mean, running_variance, mode.training};
  if (mode.training) {
    const auto rows = static_cast<double>(x.size(0));
    moments.mean = at::empty_like(running_mean);
    moments.variance = at::empty_like(running_variance);
    kernels::column_moments(kernels::floats(x), extent(x), kernels::out_floats(moments.mean),
                            kernels::out_floats(moments.variance));
    if (!again && rows > 1) {
      const c10::AutoGradMode off{false};
      auto mean = running_mean;
      auto variance = running_variance;
      mean.mul_(1.0 - kMomentum).add_(moments.mean, kMomentum);
      variance.mul_(1.0 - kMomentum).add_(moments.variance, kMomentum * rows / (rows - 1.0));
    }
  }
  return NormReluDropout::apply(x.contiguous(), weight, bias, moments,
                                dropout_of(dropout, mode, place));
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
  return ReluDropout::apply(x, dropout_of(dropout, mode, place));
}

at::Tensor logistic(const at::Tensor& x) {
  return Sigmoid::apply(x);
}

at::Tensor sample_normal(const at::Tensor& mean, const at::Tensor& log_variance, const Mode& mode,
                         std::uint64_t place) {
  if (!mode.training) {
    return mean;
  }
  return SampleNormal::apply(mean.contiguous(), log_variance.contiguous(), mode, place);
}

at::Tensor embed_nodes(const at::Tensor& table, const at::Tensor& x) {
  PLIMSOLL_CHECK(x.is_contiguous(), "the batch's features are dense rows");
  return EmbedNodes::apply(table, x);
}

at::Tensor mean_of_nodes(const at::Tensor& x, const Adjacency& adjacency) {
  return MeanOfNodes::apply(x, &adjacency);
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
      const auto made = LstmCell::apply(gates, present(cell));
      hidden = made[0];
      cell = made[1];
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
  variable_list inputs(layers.begin(), layers.end());
  inputs.push_back(at::cat(scores, 1));
  return MixLayers::apply(at::TensorList(inputs));
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
