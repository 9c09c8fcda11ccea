// SPDX-License-Identifier: Apache-2.0
//
// The autograd function over gat_kernels.h.
//
// Threads: as torch operators.   Memory: see gat_conv.h; backward adds a gradient of h.
#include "recipes/can_kd/gat_conv.h"

#include <ATen/TensorOperators.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/zeros.h>
#include <torch/csrc/autograd/custom_function.h>

#include <cmath>

#include "base/check.h"
#include "recipes/can_kd/gat_kernels.h"
#include "recipes/can_kd/layers.h"
#include "recipes/can_kd/row_kernels.h"
#include "torch/random_tensors.h"

namespace plimsoll::can_kd {
namespace {

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

// What is no tensor, as one value in autograd's eyes. The adjacency outlives the backward pass.
struct How {
  const Adjacency* adjacency{nullptr};
  GatConvShape shape;
  Dropout dropout;
};

// Factors of dropout of the attention weights, or an undefined tensor.
at::Tensor keep_factors(const How& how, const at::TensorOptions& options) {
  if (how.dropout.rate <= 0.0) {
    return {};
  }
  auto keep = at::empty({how.adjacency->edges, how.shape.heads}, options);
  dropout_factors(how.dropout, keep.numel(), keep.data_ptr<float>());
  return keep;
}

Attention attention(const How& how, const at::Tensor& h, const at::Tensor& scores,
                    const at::Tensor& keep) {
  const float* score = scores.const_data_ptr<float>();
  return {how.adjacency,
          how.shape.heads,
          how.shape.out,
          how.shape.concat,
          h.const_data_ptr<float>(),
          score,
          score + how.adjacency->nodes * how.shape.heads,
          keep.defined() ? keep.const_data_ptr<float>() : nullptr};
}

// From h on: the product before it is dense()'s.
struct Attend : torch::autograd::Function<Attend> {
  static at::Tensor forward(AutogradContext* context, const at::Tensor& h,
                            const at::Tensor& att_source, const at::Tensor& att_target,
                            const at::Tensor& bias, const How& how) {
    const std::int64_t nodes = how.adjacency->nodes;
    PLIMSOLL_CHECK(h.is_contiguous() && h.size(0) == nodes, "one row of h per node");
    auto scores = at::empty({2, nodes, how.shape.heads}, h.options());
    const auto keep = keep_factors(how, h.options());
    const Attention in = attention(how, h, scores, keep);
    auto* score = scores.data_ptr<float>();
    node_scores(in, att_source.const_data_ptr<float>(), att_target.const_data_ptr<float>(), score,
                score + nodes * how.shape.heads);
    auto weights = at::empty({how.adjacency->edges, how.shape.heads}, h.options());
    auto result = at::empty({nodes, how.shape.width()}, h.options());
    attend(in, bias.const_data_ptr<float>(), weights.data_ptr<float>(), result.data_ptr<float>());
    context->save_for_backward({h, att_source, att_target, scores, weights});
    context->saved_data["adjacency"] = reinterpret_cast<std::int64_t>(how.adjacency);
    context->saved_data["heads"] = how.shape.heads;
    context->saved_data["concat"] = how.shape.concat;
    context->saved_data["rate"] = how.dropout.rate;
    context->saved_data["seed"] = static_cast<std::int64_t>(how.dropout.seed);
    context->saved_data["place"] = static_cast<std::int64_t>(how.dropout.place);
    return result;
  }

  static How how(AutogradContext* context, const at::Tensor& att_source) {
    const auto whole = [&](const char* name) { return context->saved_data[name].toInt(); };
    How how;
    how.adjacency = reinterpret_cast<const Adjacency*>(whole("adjacency"));
    how.shape.heads = whole("heads");
    how.shape.out = att_source.size(1);
    how.shape.concat = context->saved_data["concat"].toBool();
    how.dropout = {static_cast<std::uint64_t>(whole("seed")),
                   static_cast<std::uint64_t>(whole("place")),
                   context->saved_data["rate"].toDouble()};
    return how;
  }

  static variable_list backward(AutogradContext* context, const variable_list& gradients) {
    const auto saved = context->get_saved_variables();
    const auto& h = saved[0];
    const How how = Attend::how(context, saved[1]);
    const auto keep = keep_factors(how, h.options());
    const Attention in = attention(how, h, saved[3], keep);
    const auto grad = gradients[0].contiguous();
    const auto empty = [&](at::IntArrayRef sizes) { return at::empty(sizes, h.options()); };
    auto edge_scratch = empty({2, how.adjacency->edges, how.shape.heads});
    auto node_scratch = empty({2, how.adjacency->nodes, how.shape.heads});
    auto block_scratch = empty({node_blocks(how.adjacency->nodes), 2 * in.row() + in.width()});
    auto grad_h = at::empty_like(h);
    auto grad_source = at::empty_like(saved[1]);
    auto grad_target = at::empty_like(saved[2]);
    auto grad_bias = empty({in.width()});
    attend_backward(in, {.weights = saved[4].const_data_ptr<float>(),
                         .grad = grad.const_data_ptr<float>(),
                         .att_source = saved[1].const_data_ptr<float>(),
                         .att_target = saved[2].const_data_ptr<float>(),
                         .edge_scratch = edge_scratch.data_ptr<float>(),
                         .node_scratch = node_scratch.data_ptr<float>(),
                         .block_scratch = block_scratch.data_ptr<float>(),
                         .grad_h = grad_h.data_ptr<float>(),
                         .grad_att_source = grad_source.data_ptr<float>(),
                         .grad_att_target = grad_target.data_ptr<float>(),
                         .grad_bias = grad_bias.data_ptr<float>()});
    return {grad_h, grad_source, grad_target, grad_bias, at::Tensor{}};
  }
};

// Uniform within ±√(6/(fan_in + fan_out)).
at::Tensor glorot(at::IntArrayRef shape, std::uint64_t seed, std::uint64_t stream) {
  const auto fans = static_cast<double>(shape[0] + shape[1]);
  return random_uniform(shape, std::sqrt(6.0 / fans), seed, stream).set_requires_grad(true);
}

}  // namespace

GatConv GatConv::make(const GatConvShape& shape, std::uint64_t seed, std::uint64_t& stream) {
  PLIMSOLL_CHECK(shape.heads >= 1 && shape.heads <= kHeadsMax && shape.in >= 1 && shape.out >= 1,
                 "a layer has 1 to 64 heads and positive widths");
  GatConv conv;
  conv.shape = shape;
  conv.weight = glorot({shape.heads * shape.out, shape.in}, seed, stream++);
  conv.att_source = glorot({shape.heads, shape.out}, seed, stream++);
  conv.att_target = glorot({shape.heads, shape.out}, seed, stream++);
  conv.bias = at::zeros({shape.width()}, at::kFloat).set_requires_grad(true);
  return conv;
}

at::Tensor GatConv::forward(const at::Tensor& x, const Adjacency& adjacency, const Mode& mode,
                            std::uint64_t place) const {
  const auto h = dense(x, weight, {}, mode);
  const Dropout dropout{mode.noise, place, mode.training ? shape.dropout : 0.0};
  return Attend::apply(h, att_source, att_target, bias, How{&adjacency, shape, dropout});
}

void GatConv::add_parameters(std::vector<NamedTensor>& list, const std::string& name) const {
  list.push_back({name + ".weight", weight});
  list.push_back({name + ".att_source", att_source});
  list.push_back({name + ".att_target", att_target});
  list.push_back({name + ".bias", bias});
}

}  // namespace plimsoll::can_kd
