// SPDX-License-Identifier: Apache-2.0
//
// Two counting sorts: by target, then of the result by source.
//
// Threads: a pure function.   Memory: see adjacency.h.
#include "recipes/can_kd/adjacency.h"

#include <algorithm>
#include <limits>
#include <numeric>

#include "base/check.h"

namespace plimsoll::can_kd {
namespace {

using Places = std::vector<std::int32_t>;

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

// Edges in, in their order, each node's own last.
void sort_by_target(const GraphTensors& in, Adjacency& a) {
  const auto* source = in.edge_index.const_data_ptr<std::int64_t>();
  const auto* target = source + in.edges();
  for (std::int64_t e = 0; e < in.edges(); ++e) {
    PLIMSOLL_CHECK(source[e] >= 0 && source[e] < a.nodes && target[e] >= 0 && target[e] < a.nodes,
                   "an edge names a node outside the batch");
    if (source[e] == target[e]) {
      a.self_edge[static_cast<std::size_t>(source[e])] = 1;
    } else {
      ++a.in_ptr[static_cast<std::size_t>(target[e]) + 1];
    }
  }
  for (std::size_t v = 0; v < static_cast<std::size_t>(a.nodes); ++v) {
    a.degree_max = std::max<std::int64_t>(a.degree_max, a.in_ptr[v + 1] + 1);
    a.in_ptr[v + 1] += a.in_ptr[v] + 1;
  }
  a.edges = a.in_ptr.back();
  a.in_source.resize(static_cast<std::size_t>(a.edges));
  Places next(a.in_ptr.begin(), a.in_ptr.end() - 1);
  for (std::int64_t e = 0; e < in.edges(); ++e) {
    if (source[e] != target[e]) {
      auto& place = next[static_cast<std::size_t>(target[e])];
      a.in_source[static_cast<std::size_t>(place++)] = static_cast<std::int32_t>(source[e]);
    }
  }
  for (std::size_t v = 0; v < next.size(); ++v) {
    a.in_source[static_cast<std::size_t>(next[v])] = static_cast<std::int32_t>(v);
  }
}

void sort_by_source(Adjacency& a) {
  for (const auto source : a.in_source) {
    ++a.out_ptr[static_cast<std::size_t>(source) + 1];
  }
  std::partial_sum(a.out_ptr.begin(), a.out_ptr.end(), a.out_ptr.begin());
  a.out_target.resize(a.in_source.size());
  a.out_edge.resize(a.in_source.size());
  Places next(a.out_ptr.begin(), a.out_ptr.end() - 1);
  for (std::size_t v = 0; v < static_cast<std::size_t>(a.nodes); ++v) {
    for (std::int32_t e = a.in_ptr[v]; e < a.in_ptr[v + 1]; ++e) {
      auto& place = next[static_cast<std::size_t>(a.in_source[static_cast<std::size_t>(e)])];
      a.out_target[static_cast<std::size_t>(place)] = static_cast<std::int32_t>(v);
      a.out_edge[static_cast<std::size_t>(place++)] = e;
    }
  }
}

}  // namespace

std::int64_t Adjacency::bytes() const noexcept {
  const auto places = in_ptr.size() + in_source.size() + out_ptr.size() + out_target.size() +
                      out_edge.size() + node_ptr.size();
  return static_cast<std::int64_t>(places * sizeof(std::int32_t) + self_edge.size());
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
  sort_by_target(graphs, a);
  sort_by_source(a);
  return a;
}

}  // namespace plimsoll::can_kd
