// SPDX-License-Identifier: Apache-2.0
//
// The classifier, top to bottom.
//
// Threads: as torch operators.   Memory: see gat_jk.h.
#include "recipes/can_kd/gat_jk.h"

#include <ATen/ops/cat.h>
#include <c10/core/GradMode.h>
#include <fmt/format.h>

#include "base/check.h"
#include "torch/random_tensors.h"

namespace plimsoll::can_kd {
namespace {

// Places of masks: of layer l's attention 2l, of its rows 2l + 1, of the dense layers from here on.
constexpr std::uint64_t kDensePlace = 1000;

at::Tensor attend(const GatConv& conv, const at::Tensor& x, const Adjacency& adjacency,
                  double dropout, const Mode& mode, std::uint64_t layer) {
  const auto made = conv.forward(x, adjacency, mode, 2 * layer);
  return relu_dropout(made, dropout, mode, 2 * layer + 1);
}

bool checkpoints(const Mode& mode) {
  return mode.checkpointing && c10::GradMode::is_enabled();
}

at::Tensor attend_checkpointed(const GatConv& conv, const at::Tensor& x, const Adjacency& adjacency,
                               double dropout, const Mode& mode, std::uint64_t layer) {
  const auto run = [shape = conv.shape, adjacent = &adjacency, dropout, mode, layer](
                       const std::vector<at::Tensor>& in, bool) {
    return attend({shape, in[1], in[2], in[3], in[4]}, in[0], *adjacent, dropout, mode, layer);
  };
  return checkpointed(run, {x, conv.weight, conv.att_source, conv.att_target, conv.bias});
}

at::Tensor mix_checkpointed(const LayerAttention& attention, const std::vector<at::Tensor>& layers,
                            const Mode& mode) {
  std::vector<NamedTensor> parameters;
  attention.add_parameters(parameters, "");
  std::vector<at::Tensor> inputs = layers;
  for (const auto& parameter : parameters) {
    inputs.push_back(parameter.tensor);
  }
  const auto run = [count = layers.size(), mode](const std::vector<at::Tensor>& in, bool) {
    const auto* p = in.data() + count;
    const LayerAttention same{p[0], p[1], p[2], p[3], p[4], p[5], p[6], p[7], {p[8], p[9]}};
    return same.forward({in.begin(), in.begin() + static_cast<std::ptrdiff_t>(count)}, mode);
  };
  return checkpointed(run, inputs);
}

}  // namespace

GatClassifier::GatClassifier(const GatShape& shape, std::uint64_t seed) : shape_(shape) {
  PLIMSOLL_CHECK(shape.layers >= 1 && shape.fc_layers >= 1 && shape.ids >= 1,
                 "a classifier has layers, a dense layer and ids");
  std::uint64_t stream = 0;
  embedding_ =
      random_normal({shape.ids, shape.embedding}, 1.0, seed, stream++).set_requires_grad(true);
  const std::int64_t width = shape.hidden * shape.heads;
  for (std::int64_t l = 0; l < shape.layers; ++l) {
    const std::int64_t in = l == 0 ? shape.embedding + kContinuous : width;
    convs_.push_back(GatConv::make({in, shape.hidden, shape.heads, true, shape.attention_dropout},
                                   seed, stream));
  }
  if (shape.lstm) {
    attention_ = LayerAttention::make(width, shape.layers, seed, stream);
  }
  std::int64_t in = shape.lstm ? width : width * shape.layers;
  for (std::int64_t l = 0; l < shape.fc_layers; ++l) {
    const std::int64_t inner = shape.fc_width > 0 ? shape.fc_width : width;
    const std::int64_t out = l + 1 == shape.fc_layers ? kClasses : inner;
    dense_.push_back(Linear::make(in, out, seed, stream));
    in = out;
  }
}

at::Tensor GatClassifier::forward(const GraphTensors& graphs, const Adjacency& adjacency,
                                  const Mode& mode) const {
  std::vector<at::Tensor> layers;
  auto x = embed_nodes(embedding_, graphs.x);
  for (std::size_t l = 0; l < convs_.size(); ++l) {
    x = checkpoints(mode) ? attend_checkpointed(convs_[l], x, adjacency, shape_.dropout, mode, l)
                          : attend(convs_[l], x, adjacency, shape_.dropout, mode, l);
    layers.push_back(x);
  }
  if (shape_.lstm) {
    x = mean_of_nodes(checkpoints(mode) ? mix_checkpointed(attention_, layers, mode)
                                        : attention_.forward(layers, mode),
                      adjacency);
  } else {
    // Means of columns: taken before the layers are put side by side, they are the same numbers.
    for (auto& layer : layers) {
      layer = mean_of_nodes(layer, adjacency);
    }
    x = at::cat(layers, 1);
  }
  for (std::size_t l = 0; l < dense_.size(); ++l) {
    x = dense_[l].forward(x, mode);
    if (l + 1 < dense_.size()) {
      x = relu_dropout(x, shape_.dropout, mode, kDensePlace + l);
    }
  }
  return x;
}

std::vector<NamedTensor> GatClassifier::parameters() const {
  std::vector<NamedTensor> list{{"embedding", embedding_}};
  for (std::size_t l = 0; l < convs_.size(); ++l) {
    convs_[l].add_parameters(list, fmt::format("convs.{}", l));
  }
  if (shape_.lstm) {
    attention_.add_parameters(list, "jk");
  }
  for (std::size_t l = 0; l < dense_.size(); ++l) {
    dense_[l].add_parameters(list, fmt::format("dense.{}", l));
  }
  return list;
}

std::vector<NamedTensor> GatClassifier::buffers() const {
  return {};
}

std::int64_t parameter_count(std::span<const NamedTensor> parameters) {
  std::int64_t count = 0;
  for (const auto& parameter : parameters) {
    count += parameter.tensor.numel();
  }
  return count;
}

}  // namespace plimsoll::can_kd
