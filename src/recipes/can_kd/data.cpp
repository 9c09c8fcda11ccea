// SPDX-License-Identifier: Apache-2.0
//
// Opening a graph set for training, and assembling its graphs as tensors.
//
// Threads: single-owner.   Memory: see data.h.
#include "recipes/can_kd/data.h"

#include <ATen/ops/empty.h>

#include <algorithm>
#include <numeric>
#include <utility>

#include "base/check.h"
#include "run/control.h"

namespace plimsoll::can_kd {
namespace {

template <class T>
std::span<T> span_of(const at::Tensor& tensor) {
  return {tensor.data_ptr<T>(), static_cast<std::size_t>(tensor.numel())};
}

GraphTensors make_tensors(const GraphCounts& counts) {
  GraphTensors made;
  made.x = at::empty({counts.nodes, kGraphFeatures}, at::kFloat);
  made.edge_index = at::empty({2, counts.edges}, at::kLong);
  made.graph_of_node = at::empty({counts.nodes}, at::kLong);
  made.labels = at::empty({counts.graphs}, at::kLong);
  made.graphs = at::empty({counts.graphs}, at::kLong);
  made.edge_attr = at::empty({counts.edges, kGraphFeatures}, at::kFloat);
  return made;
}

GraphBuffers buffers_of(const GraphTensors& tensors) {
  return {.x = span_of<float>(tensors.x),
          .edge_index = span_of<std::int64_t>(tensors.edge_index),
          .edge_attr = span_of<float>(tensors.edge_attr),
          .graph_of_node = span_of<std::int64_t>(tensors.graph_of_node),
          .labels = span_of<std::int64_t>(tensors.labels),
          .graphs = span_of<std::int64_t>(tensors.graphs)};
}

}  // namespace

Result<std::unique_ptr<Data>> Data::open(const Governor& governor, const CanKdConfig& config) {
  PLIMSOLL_TRY(GraphSet set, GraphSet::open(governor, {.directory = config.data,
                                                       .cache_bytes = config.cache_bytes}));
  std::unique_ptr<Data> data(new Data(std::move(set)));
  const auto train = data->train();
  if (train.empty()) {
    return fail(ErrorCode::kInvalidArgument, config.data + ": no graph to train on",
                "import train_* files with `plimsoll import can`");
  }
  data->by_label_ = at::empty({static_cast<std::int64_t>(train.size())}, at::kLong);
  auto* out = data->by_label_.data_ptr<std::int64_t>();
  for (const std::int64_t label : {0, 1}) {
    out = std::copy_if(train.begin(), train.end(), out,
                       [&](std::int64_t graph) { return data->set_.label(graph) == label; });
    data->normals_ = label == 0 ? out - data->by_label_.data_ptr<std::int64_t>() : data->normals_;
  }
  return data;
}

std::span<const std::int64_t> Data::train() const noexcept {
  return set_.split(GraphSplit::kTrain);
}

std::span<const std::int64_t> Data::held_out() const noexcept {
  const auto kept = set_.split(GraphSplit::kValidation);
  return kept.empty() ? train() : kept;
}

std::span<const std::int64_t> Data::normals() const noexcept {
  return span_of<std::int64_t>(by_label_).first(static_cast<std::size_t>(normals_));
}

std::span<const std::int64_t> Data::attacks() const noexcept {
  return span_of<std::int64_t>(by_label_).subspan(static_cast<std::size_t>(normals_));
}

Result<GraphTensors> Data::gather(std::span<const std::int64_t> graphs, bool edge_attr) const {
  GraphCounts counts;
  for (const std::int64_t graph : graphs) {
    const GraphCounts one = set_.counts(graph);
    counts.graphs += 1;
    counts.nodes += one.nodes;
    counts.edges += one.edges;
  }
  GraphTensors made = make_tensors(counts);
  PLIMSOLL_TRY_VOID(set_.gather(graphs, buffers_of(made)));
  std::copy(graphs.begin(), graphs.end(), made.graphs.data_ptr<std::int64_t>());
  if (!edge_attr) {
    made.edge_attr.reset();  // It was assembled with the rest.
  }
  return made;
}

Result<GraphTensors> Data::next(GraphBatches& batches, GraphBatch& seen) const {
  const GraphCounts counts = batches.peek();
  GraphTensors made = make_tensors(counts);
  PLIMSOLL_TRY(seen, batches.next(buffers_of(made)));
  made.edge_attr.reset();
  return made;
}

Result<void> Data::for_each(
    std::span<const std::int64_t> graphs, std::int64_t chunk,
    const std::function<Result<void>(std::int64_t, const GraphTensors&)>& work,
    bool edge_attr) const {
  const auto step = static_cast<std::size_t>(std::max<std::int64_t>(1, chunk));
  for (std::size_t first = 0; first < graphs.size(); first += step) {
    if (StopSignals::asked()) {
      return given_up("an evaluation");
    }
    const auto part = graphs.subspan(first, std::min(step, graphs.size() - first));
    PLIMSOLL_TRY(const GraphTensors batch, gather(part, edge_attr));
    PLIMSOLL_TRY_VOID(work(static_cast<std::int64_t>(first), batch));
  }
  return {};
}

std::vector<std::int64_t> Data::largest(std::span<const std::int64_t> graphs,
                                        std::int64_t count) const {
  std::vector<std::int64_t> found(graphs.begin(), graphs.end());
  const auto size = [&](std::int64_t graph) {
    const GraphCounts counts = set_.counts(graph);
    return counts.nodes + counts.edges;
  };
  const auto kept = static_cast<std::ptrdiff_t>(
      std::min<std::size_t>(found.size(), static_cast<std::size_t>(count)));
  std::partial_sort(found.begin(), found.begin() + kept, found.end(),
                    [&](std::int64_t x, std::int64_t y) {
                      return std::pair(-size(x), x) < std::pair(-size(y), y);
                    });
  found.resize(static_cast<std::size_t>(kept));
  return found;
}

}  // namespace plimsoll::can_kd
