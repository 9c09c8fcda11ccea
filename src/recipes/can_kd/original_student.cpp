// SPDX-License-Identifier: Apache-2.0
//
// Reading torch_geometric's names into our layers.
//
// Threads: as torch operators.   Memory: see original_student.h.
#include "recipes/can_kd/original_student.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/zeros.h>
#include <c10/core/GradMode.h>
#include <fmt/format.h>
#include <fmt/ranges.h>

#include <functional>
#include <numeric>
#include <string>

#include "base/check.h"
#include "data/safetensors.h"

namespace plimsoll::can_kd {
namespace {

using Sizes = std::vector<std::int64_t>;

// A tensor of the file; of this shape, where one is given.
Result<at::Tensor> read_tensor(const SafetensorsReader& reader, const std::string& name,
                               const Sizes& wanted = {}) {
  PLIMSOLL_TRY(const SafetensorsEntry* entry, reader.find(name));
  if (entry->dtype != DType::kFloat32 || (!wanted.empty() && entry->shape != wanted)) {
    return fail(ErrorCode::kCorrupt,
                fmt::format("{} is {} of shape [{}], not F32{}", name, entry->dtype_text,
                            fmt::join(entry->shape, ", "),
                            wanted.empty() ? std::string{}
                                           : fmt::format(" of [{}]", fmt::join(wanted, ", "))),
                "give a student with two or more GATConv layers and an LSTM over them");
  }
  auto made = at::empty(entry->shape, at::kFloat);
  PLIMSOLL_TRY_VOID(
      reader.read(*entry, 0, {static_cast<std::byte*>(made.data_ptr()), made.nbytes()}));
  return made;
}

Result<GatConv> read_conv(const SafetensorsReader& reader, const std::string& name,
                          std::int64_t in) {
  PLIMSOLL_TRY(auto source, read_tensor(reader, name + ".att_src"));
  if (source.dim() != 3 || source.size(0) != 1 || source.numel() == 0) {
    return fail(ErrorCode::kCorrupt, name + ".att_src is not of shape [1, heads, width]",
                "give the state of a torch_geometric GATConv");
  }
  const std::int64_t heads = source.size(1);
  const std::int64_t out = source.size(2);
  GatConv conv;
  conv.shape = {in, out, heads, true, 0.0};
  conv.att_source = source.view({heads, out});
  PLIMSOLL_TRY(auto target, read_tensor(reader, name + ".att_dst", {1, heads, out}));
  conv.att_target = target.view({heads, out});
  PLIMSOLL_TRY(conv.weight, read_tensor(reader, name + ".lin.weight", {heads * out, in}));
  PLIMSOLL_TRY(conv.bias, read_tensor(reader, name + ".bias", {heads * out}));
  return conv;
}

Result<LayerAttention> read_attention(const SafetensorsReader& reader, std::int64_t width,
                                      std::int64_t layers) {
  const std::int64_t hidden = layers * width / 2;
  LayerAttention made;
  const auto direction = [&](const std::string& end, at::Tensor& input, at::Tensor& recurrent,
                             at::Tensor& input_bias, at::Tensor& recurrent_bias) -> Result<void> {
    const Sizes gates{4 * hidden};
    PLIMSOLL_TRY(input, read_tensor(reader, "jk.lstm.weight_ih_l0" + end, {4 * hidden, width}));
    PLIMSOLL_TRY(recurrent,
                 read_tensor(reader, "jk.lstm.weight_hh_l0" + end, {4 * hidden, hidden}));
    PLIMSOLL_TRY(input_bias, read_tensor(reader, "jk.lstm.bias_ih_l0" + end, gates));
    PLIMSOLL_TRY(recurrent_bias, read_tensor(reader, "jk.lstm.bias_hh_l0" + end, gates));
    return {};
  };
  PLIMSOLL_TRY_VOID(direction("", made.forward_input, made.forward_hidden, made.forward_input_bias,
                              made.forward_hidden_bias));
  PLIMSOLL_TRY_VOID(direction("_reverse", made.backward_input, made.backward_hidden,
                              made.backward_input_bias, made.backward_hidden_bias));
  PLIMSOLL_TRY(made.score.weight, read_tensor(reader, "jk.att.weight", {1, 2 * hidden}));
  PLIMSOLL_TRY(made.score.bias, read_tensor(reader, "jk.att.bias", {1}));
  return made;
}

}  // namespace

at::Tensor original_features(const GraphTensors& graphs, const at::Tensor& edge_attr,
                             std::span<const std::int64_t> vocabulary) {
  PLIMSOLL_CHECK(edge_attr.is_contiguous() && edge_attr.size(0) == graphs.edges(),
                 "one row of features per edge");
  auto made = at::zeros({graphs.nodes(), kContinuous}, at::kFloat);
  auto* y = made.data_ptr<float>();
  const auto* x = graphs.x.const_data_ptr<float>();
  for (std::int64_t v = 0; v < graphs.nodes(); ++v) {
    const float* row = x + v * (kContinuous + 1);
    const auto id = static_cast<std::size_t>(row[0]);
    float* to = y + v * kContinuous;
    to[0] = id < vocabulary.size() ? static_cast<float>(vocabulary[id]) : 0.0F;
    for (std::int64_t byte = 0; byte < 8; ++byte) {
      to[1 + byte] = row[1 + byte] * 255.0F;
    }
  }
  const auto* source = graphs.edge_index.const_data_ptr<std::int64_t>();
  const auto* frames = edge_attr.const_data_ptr<float>();
  for (std::int64_t e = 0; e < graphs.edges(); ++e) {
    y[source[e] * kContinuous + kContinuous - 1] += frames[e * edge_attr.size(1)];
  }
  return made;
}

Result<OriginalStudent> OriginalStudent::load(const std::filesystem::path& path) {
  PLIMSOLL_TRY(const auto reader, SafetensorsReader::open(path));
  OriginalStudent made;
  for (const SafetensorsEntry& entry : reader.entries()) {
    made.parameters_ += std::accumulate(entry.shape.begin(), entry.shape.end(), std::int64_t{1},
                                        std::multiplies<>());
  }
  std::int64_t in = kContinuous;
  do {
    const auto name = fmt::format("convs.{}", made.convs_.size());
    PLIMSOLL_TRY(auto conv, read_conv(reader, name, in));
    made.convs_.push_back(conv);
    in = conv.shape.width();
  } while (reader.find(fmt::format("convs.{}.att_src", made.convs_.size())).has_value());
  PLIMSOLL_TRY(made.attention_,
               read_attention(reader, in, static_cast<std::int64_t>(made.convs_.size())));
  PLIMSOLL_TRY(made.head_.weight, read_tensor(reader, "lin.weight", {1, in}));
  PLIMSOLL_TRY(made.head_.bias, read_tensor(reader, "lin.bias", {1}));
  return made;
}

at::Tensor OriginalStudent::forward(const at::Tensor& features, const Adjacency& adjacency) const {
  const c10::AutoGradMode off{false};
  const Mode mode;
  std::vector<at::Tensor> layers;
  auto x = features;
  for (const auto& conv : convs_) {
    x = relu_dropout(conv.forward(x, adjacency, mode, 0), 0.0, mode, 0);
    layers.push_back(x);
  }
  return head_.forward(mean_of_nodes(attention_.forward(layers, mode), adjacency), mode).squeeze(1);
}

}  // namespace plimsoll::can_kd
