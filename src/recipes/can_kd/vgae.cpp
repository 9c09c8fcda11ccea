// SPDX-License-Identifier: Apache-2.0
//
// The autoencoder, top to bottom, and what is made of its output.
//
// Threads: as torch operators.   Memory: see vgae.h.
#include "recipes/can_kd/vgae.h"

#include <ATen/TensorOperators.h>
#include <ATen/ops/clamp.h>
#include <ATen/ops/empty.h>
#include <c10/core/GradMode.h>
#include <fmt/format.h>

#include "base/check.h"
#include "kernels/node_losses.h"
#include "recipes/can_kd/node_losses.h"
#include "torch/random_tensors.h"

namespace plimsoll::can_kd {
namespace {

// Places of masks. A layer's attention has none.
constexpr std::uint64_t kEncoderPlace = 0;
constexpr std::uint64_t kLatentPlace = 1000;
constexpr std::uint64_t kDecoderPlace = 2000;
constexpr std::uint64_t kNeighbourPlace = 3000;

// A layer whose rows are `width` wide in all.
GatConv make_conv(std::int64_t in, std::int64_t width, std::int64_t heads, std::uint64_t seed,
                  std::uint64_t& stream) {
  const bool shared = width % heads == 0;
  return GatConv::make({in, shared ? width / heads : width, heads, shared, 0.0}, seed, stream);
}

at::Tensor run_layer(const GatConv& conv, const BatchNorm& norm, const at::Tensor& x,
                     const Adjacency& adjacency, double dropout, const Mode& mode,
                     std::uint64_t place, bool again) {
  const auto made = conv.forward(x, adjacency, mode, place);
  return norm.relu_dropout(made, dropout, mode, place, again);
}

at::Tensor layer(const GatConv& conv, const BatchNorm& norm, const at::Tensor& x,
                 const Adjacency& adjacency, double dropout, const Mode& mode,
                 std::uint64_t place) {
  if (!mode.checkpointing || !c10::GradMode::is_enabled()) {
    return run_layer(conv, norm, x, adjacency, dropout, mode, place, false);
  }
  const auto run = [shape = conv.shape, norm, adjacent = &adjacency, dropout, mode, place](
                       const std::vector<at::Tensor>& in, bool again) {
    const GatConv same{shape, in[1], in[2], in[3], in[4]};
    const BatchNorm same_norm{in[5], in[6], norm.running_mean, norm.running_variance};
    return run_layer(same, same_norm, in[0], *adjacent, dropout, mode, place, again);
  };
  return checkpointed(
      run, {x, conv.weight, conv.att_source, conv.att_target, conv.bias, norm.weight, norm.bias});
}

at::Tensor continuous(const GraphTensors& graphs) {
  return graphs.x.narrow(1, 1, kContinuous).contiguous();
}

at::Tensor ids_of(const GraphTensors& graphs) {
  return graphs.x.select(1, 0).to(at::kLong).contiguous();
}

}  // namespace

Vgae::Vgae(const VgaeShape& shape, std::uint64_t seed) : shape_(shape) {
  PLIMSOLL_CHECK(shape.hidden.size() >= 2 && shape.ids >= 1,
                 "an autoencoder has hidden widths, "
                 "the latent's last, and ids");
  std::uint64_t stream = 0;
  embedding_ =
      random_normal({shape.ids, shape.embedding}, 1.0, seed, stream++).set_requires_grad(true);
  const std::size_t targets = shape.hidden.size() - 1;
  std::int64_t in = shape.embedding + kContinuous;
  for (std::size_t l = 0; l < targets; ++l) {
    encoder_.push_back(make_conv(in, shape.hidden[l], l == 0 ? shape.heads : 1, seed, stream));
    encoder_norms_.push_back(BatchNorm::make(shape.hidden[l]));
    in = shape.hidden[l];
  }
  mean_ = Linear::make(in, shape.latent(), seed, stream);
  log_variance_ = Linear::make(in, shape.latent(), seed, stream);
  in = shape.latent();
  for (std::size_t l = targets; l-- > 1;) {
    decoder_.push_back(make_conv(in, shape.hidden[l], kDecoderHeads, seed, stream));
    decoder_norms_.push_back(BatchNorm::make(shape.hidden[l]));
    in = shape.hidden[l];
  }
  decoder_.push_back(make_conv(in, kContinuous, 1, seed, stream));
  id_head_ = Linear::make(shape.latent(), shape.ids, seed, stream);
  neighbour_layers_.push_back(Linear::make(shape.latent(), shape.latent(), seed, stream));
  neighbour_layers_.push_back(Linear::make(shape.latent(), shape.latent(), seed, stream));
  neighbour_layers_.push_back(Linear::make(shape.latent(), shape.ids, seed, stream));
}

VgaeOutput Vgae::forward(const GraphTensors& graphs, const Adjacency& adjacency,
                         const Mode& mode) const {
  auto x = embed_nodes(embedding_, graphs.x);
  for (std::size_t l = 0; l < encoder_.size(); ++l) {
    x = layer(encoder_[l], encoder_norms_[l], x, adjacency, shape_.dropout, mode,
              kEncoderPlace + l);
  }
  VgaeOutput out;
  out.mode = mode;
  out.mean = mean_.forward(x, mode);
  out.log_variance = at::clamp(log_variance_.forward(x, mode), -kLogVarianceMax, kLogVarianceMax);
  out.z = sample_normal(out.mean, out.log_variance, mode, kLatentPlace);
  x = out.z;
  for (std::size_t l = 0; l + 1 < decoder_.size(); ++l) {
    x = layer(decoder_[l], decoder_norms_[l], x, adjacency, shape_.dropout, mode,
              kDecoderPlace + l);
  }
  out.reconstruction = logistic(decoder_.back().forward(x, adjacency, mode, kDecoderPlace + 999));
  x = out.z;
  for (std::size_t l = 0; l < 2; ++l) {
    x = relu_dropout(neighbour_layers_[l].forward(x, mode), shape_.dropout, mode,
                     kNeighbourPlace + l);
  }
  out.neighbour_rows = x;
  out.id_head = id_head_;
  out.neighbour_head = neighbour_layers_[2];
  return out;
}

std::vector<NamedTensor> Vgae::parameters() const {
  std::vector<NamedTensor> list{{"embedding", embedding_}};
  for (std::size_t l = 0; l < encoder_.size(); ++l) {
    encoder_[l].add_parameters(list, fmt::format("encoder.{}", l));
    encoder_norms_[l].add_parameters(list, fmt::format("encoder.{}.norm", l));
  }
  mean_.add_parameters(list, "mean");
  log_variance_.add_parameters(list, "log_variance");
  for (std::size_t l = 0; l < decoder_.size(); ++l) {
    decoder_[l].add_parameters(list, fmt::format("decoder.{}", l));
    if (l < decoder_norms_.size()) {
      decoder_norms_[l].add_parameters(list, fmt::format("decoder.{}.norm", l));
    }
  }
  id_head_.add_parameters(list, "id");
  for (std::size_t l = 0; l < neighbour_layers_.size(); ++l) {
    neighbour_layers_[l].add_parameters(list, fmt::format("neighbours.{}", l));
  }
  return list;
}

std::vector<NamedTensor> Vgae::buffers() const {
  std::vector<NamedTensor> list;
  for (std::size_t l = 0; l < encoder_norms_.size(); ++l) {
    encoder_norms_[l].add_buffers(list, fmt::format("encoder.{}.norm", l));
  }
  for (std::size_t l = 0; l < decoder_norms_.size(); ++l) {
    decoder_norms_[l].add_buffers(list, fmt::format("decoder.{}.norm", l));
  }
  return list;
}

VgaeLoss vgae_loss(const VgaeOutput& output, const GraphTensors& graphs,
                   const Adjacency& adjacency) {
  const auto ids = ids_of(graphs);
  VgaeLoss loss;
  loss.mse = kernels::mean_square(output.reconstruction, continuous(graphs));
  loss.id = id_cross_entropy(output.z, output.id_head, ids, output.mode);
  loss.neighbours = neighbour_cross_entropy(output.neighbour_rows, output.neighbour_head, ids,
                                            adjacency, output.mode);
  loss.divergence = kernels::normal_divergence(output.mean, output.log_variance);
  loss.total = loss.mse + loss.id * kIdWeight + loss.neighbours * kNeighbourWeight +
               loss.divergence * kDivergenceWeight;
  return loss;
}

at::Tensor graph_errors(const VgaeOutput& output, const GraphTensors& graphs,
                        const Adjacency& adjacency) {
  const c10::AutoGradMode off{false};
  const auto entropy = id_cross_entropy_rows(output.z, output.id_head, ids_of(graphs));
  const auto made = output.reconstruction.contiguous();
  const auto* entropies = entropy.const_data_ptr<float>();
  const auto* y = made.const_data_ptr<float>();
  const auto* x = graphs.x.const_data_ptr<float>();
  auto errors = at::empty({adjacency.graphs}, made.options());
  auto* error = errors.data_ptr<float>();
  for (std::int64_t g = 0; g < adjacency.graphs; ++g) {
    const std::int64_t first = adjacency.node_ptr[static_cast<std::size_t>(g)];
    const std::int64_t last = adjacency.node_ptr[static_cast<std::size_t>(g) + 1];
    double square = 0.0;
    double cross = 0.0;
    for (std::int64_t v = first; v < last; ++v) {
      for (std::int64_t c = 0; c < kContinuous; ++c) {
        const auto apart = static_cast<double>(y[v * kContinuous + c]) -
                           static_cast<double>(x[v * (kContinuous + 1) + 1 + c]);
        square += apart * apart;
      }
      cross += static_cast<double>(entropies[v]);
    }
    const auto nodes = static_cast<double>(std::max<std::int64_t>(1, last - first));
    error[g] = static_cast<float>(square / (nodes * static_cast<double>(kContinuous)) +
                                  kIdWeight * cross / nodes);
  }
  return errors;
}

at::Tensor id_logits(const VgaeOutput& output) {
  return output.id_head.forward(output.z, output.mode);
}

at::Tensor neighbour_logits(const VgaeOutput& output) {
  return output.neighbour_head.forward(output.neighbour_rows, output.mode);
}

}  // namespace plimsoll::can_kd
