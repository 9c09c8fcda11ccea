// SPDX-License-Identifier: Apache-2.0
//
// The sorting is kernels/edges.h's.
//
// Threads: a pure function.   Memory: see adjacency.h.
#include "recipes/can_kd/adjacency.h"

#include <ATen/ops/from_blob.h>

#include <algorithm>
#include <limits>
#include <numeric>

#include "base/check.h"
#include "kernels/edges.h"

namespace plimsoll::can_kd {
namespace {

void number_graphs(const GraphTensors& in, Adjacency& a) {
  const auto* graph = in.graph_of_node.const_data_ptr<std::int64_t>();
  a.node_ptr.assign(static_cast<std::size_t>(a.graphs) + 1, 0);
  std::int64_t last = 0;
  for (std::int64_t v = 0; v < a.nodes; ++v) {
    PLIMSOLL_CHECK(graph[v] >= last && graph[v] < a.graphs,
                   "graph_of_node must ascend and name graphs of the batch");
    last = graph[v];
    ++a.node_ptr[static_cast<std::size_t>(graph[v]) + 1];
  }
  std::partial_sum(a.node_ptr.begin(), a.node_ptr.end(), a.node_ptr.begin());
}

// Kernels only read it.
template <class T>
at::Tensor over(const std::vector<T>& list, at::ScalarType kind) {
  auto* from = const_cast<void*>(static_cast<const void*>(list.data()));
  return at::from_blob(from, {static_cast<std::int64_t>(list.size())}, at::TensorOptions(kind));
}

}  // namespace

std::int64_t Adjacency::bytes() const noexcept {
  const auto places = in_ptr.size() + in_source.size() + out_ptr.size() + out_target.size() +
                      out_edge.size() + node_ptr.size();
  return static_cast<std::int64_t>(places * sizeof(std::int32_t) + self_edge.size());
}

kernels::EdgeTensors edge_tensors(const Adjacency& a) {
  return {over(a.in_ptr, at::kInt),     over(a.in_source, at::kInt), over(a.out_ptr, at::kInt),
          over(a.out_target, at::kInt), over(a.out_edge, at::kInt),  over(a.self_edge, at::kByte)};
}

at::Tensor node_runs(const Adjacency& a) {
  return over(a.node_ptr, at::kInt);
}

Adjacency make_adjacency(const GraphTensors& graphs) {
  Adjacency a;
  a.nodes = graphs.nodes();
  a.graphs = graphs.size();
  PLIMSOLL_CHECK(a.nodes + graphs.edges() < std::numeric_limits<std::int32_t>::max(),
                 "a batch has fewer than 2^31 nodes and edges");
  const auto nodes = static_cast<std::size_t>(a.nodes);
  a.self_edge.assign(nodes, 0);
  a.in_ptr.assign(nodes + 1, 0);
  a.out_ptr.assign(nodes + 1, 0);
  number_graphs(graphs, a);
  const auto* source = graphs.edge_index.const_data_ptr<std::int64_t>();
  const kernels::EdgePairs pairs{a.nodes, graphs.edges(), source, source + graphs.edges()};
  PLIMSOLL_CHECK(kernels::count_edges(pairs, a.in_ptr.data(), a.self_edge.data()),
                 "an edge names a node outside the batch");
  for (std::size_t v = 0; v < nodes; ++v) {
    a.degree_max = std::max<std::int64_t>(a.degree_max, a.in_ptr[v + 1] - a.in_ptr[v]);
  }
  a.edges = a.in_ptr.back();
  const auto edges = static_cast<std::size_t>(a.edges);
  a.in_source.resize(edges);
  a.out_target.resize(edges);
  a.out_edge.resize(edges);
  kernels::place_edges(pairs, a.in_ptr.data(), a.in_source.data(), a.out_ptr.data(),
                       a.out_target.data(), a.out_edge.data());
  return a;
}

}  // namespace plimsoll::can_kd
