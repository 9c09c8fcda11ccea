// SPDX-License-Identifier: Apache-2.0
//
// Batches of random graphs, and comparisons, for the tests of the models.
//
// Threads: pure functions.   Memory: the tensors returned.
#pragma once

#include <ATen/ATen.h>
#include <ATen/Parallel.h>

#include <cstring>
#include <span>
#include <vector>

#include "base/philox.h"
#include "recipes/can_kd/adjacency.h"
#include "recipes/can_kd/graph_tensors.h"

namespace plimsoll::can_kd::testing {

inline constexpr std::int64_t kIds = 37;

/// Random numbers one after another.
class Draws {
 public:
  explicit Draws(std::uint64_t seed) : seed_(seed) {}
  std::int64_t below(std::int64_t most) {
    return static_cast<std::int64_t>(philox(seed_, 5, next_++)[0] %
                                     static_cast<std::uint64_t>(most));
  }
  float uniform() { return uniform01(philox(seed_, 5, next_++)[1]); }

 private:
  std::uint64_t seed_;
  std::uint64_t next_{0};
};

struct PlainGraph {
  std::vector<float> x;  ///< [nodes, 11]
  std::vector<std::int64_t> sources, targets;
  std::int64_t label{0};
  [[nodiscard]] std::int64_t nodes() const { return static_cast<std::int64_t>(x.size()) / 11; }
};

/// 1 … nodes_max nodes each; edges twice as many on average, some from a node to itself, some
/// twice; every tenth graph has no edges.
inline std::vector<PlainGraph> random_graphs(std::int64_t count, std::int64_t nodes_max,
                                             std::uint64_t seed) {
  Draws draw(seed);
  std::vector<PlainGraph> graphs(static_cast<std::size_t>(count));
  for (std::size_t g = 0; g < graphs.size(); ++g) {
    auto& graph = graphs[g];
    const std::int64_t nodes = 1 + draw.below(nodes_max);
    for (std::int64_t v = 0; v < nodes; ++v) {
      graph.x.push_back(static_cast<float>(draw.below(kIds)));
      for (std::int64_t c = 0; c < kContinuous; ++c) {
        graph.x.push_back(draw.uniform());
      }
    }
    const std::int64_t edges = g % 10 == 9 ? 0 : draw.below(4 * nodes + 1);
    for (std::int64_t e = 0; e < edges; ++e) {
      graph.sources.push_back(draw.below(nodes));
      graph.targets.push_back(draw.below(nodes));
    }
    graph.label = draw.below(2);
  }
  return graphs;
}

inline GraphTensors batch_of(std::span<const PlainGraph> graphs) {
  std::int64_t nodes = 0;
  std::int64_t edges = 0;
  for (const auto& graph : graphs) {
    nodes += graph.nodes();
    edges += static_cast<std::int64_t>(graph.sources.size());
  }
  const auto count = static_cast<std::int64_t>(graphs.size());
  GraphTensors made{at::empty({nodes, 11}, at::kFloat), at::empty({2, edges}, at::kLong),
                    at::empty({nodes}, at::kLong), at::empty({count}, at::kLong),
                    at::arange(count, at::kLong)};
  std::int64_t node = 0;
  std::int64_t edge = 0;
  auto* index = made.edge_index.data_ptr<std::int64_t>();
  for (std::size_t g = 0; g < graphs.size(); ++g) {
    const auto& graph = graphs[g];
    std::copy(graph.x.begin(), graph.x.end(), made.x.data_ptr<float>() + node * 11);
    for (std::size_t e = 0; e < graph.sources.size(); ++e, ++edge) {
      index[edge] = node + graph.sources[e];
      index[edges + edge] = node + graph.targets[e];
    }
    for (std::int64_t v = 0; v < graph.nodes(); ++v) {
      made.graph_of_node.data_ptr<std::int64_t>()[node++] = static_cast<std::int64_t>(g);
    }
    made.labels.data_ptr<std::int64_t>()[g] = graph.label;
  }
  return made;
}

inline bool same_bits(const at::Tensor& x, const at::Tensor& y) {
  return x.sizes() == y.sizes() && x.is_contiguous() && y.is_contiguous() &&
         std::memcmp(x.const_data_ptr(), y.const_data_ptr(), x.nbytes()) == 0;
}

/// The largest difference, as a share of the exact values' largest.
inline double gap(const at::Tensor& made, const at::Tensor& exact) {
  const auto size = std::max(exact.detach().abs().max().item<double>(), 1e-3);
  return (made.detach().to(at::kDouble) - exact.detach().to(at::kDouble))
             .abs()
             .max()
             .item<double>() /
         size;
}

/// The result of `run` with one thread, then with two.
template <class F>
auto with_one_and_two_threads(const F& run) {
  const int before = at::get_num_threads();
  at::set_num_threads(1);
  auto one = run();
  at::set_num_threads(2);
  auto two = run();
  at::set_num_threads(before);
  return std::pair{std::move(one), std::move(two)};
}

}  // namespace plimsoll::can_kd::testing
