// SPDX-License-Identifier: Apache-2.0
//
// The operator gat_conv with a layer's parameters.
#include "recipes/can_kd/gat_conv.h"

#include <ATen/ops/zeros.h>

#include <cmath>

#include "base/check.h"
#include "kernels/attention_loops.h"
#include "kernels/graph_attention.h"
#include "torch/random_tensors.h"

namespace plimsoll::can_kd {
namespace {

// Uniform within ±√(6/(fan_in + fan_out)).
at::Tensor glorot(at::IntArrayRef shape, std::uint64_t seed, std::uint64_t stream) {
  const auto fans = static_cast<double>(shape[0] + shape[1]);
  return random_uniform(shape, std::sqrt(6.0 / fans), seed, stream).set_requires_grad(true);
}

}  // namespace

GatConv GatConv::make(const GatConvShape& shape, std::uint64_t seed, std::uint64_t& stream) {
  PLIMSOLL_CHECK(
      shape.heads >= 1 && shape.heads <= kernels::kHeadsMax && shape.in >= 1 && shape.out >= 1,
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
  return kernels::gat_conv(x, weight, att_source, att_target, bias, edge_tensors(adjacency),
                           {.concat = shape.concat,
                            .dropout = mode.training ? shape.dropout : 0.0,
                            .seed = static_cast<std::int64_t>(mode.noise),
                            .place = static_cast<std::int64_t>(place),
                            .bf16 = mode.bf16});
}

void GatConv::add_parameters(std::vector<NamedTensor>& list, const std::string& name) const {
  list.push_back({name + ".weight", weight});
  list.push_back({name + ".att_source", att_source});
  list.push_back({name + ".att_target", att_target});
  list.push_back({name + ".bias", bias});
}

}  // namespace plimsoll::can_kd
