// SPDX-License-Identifier: Apache-2.0
//
// Goal: one layer of graph attention equals the formula, in value and in every gradient, and its
// bits depend on no number of threads. Method: random batches with parallel edges, edges to
// oneself, nodes and graphs without edges, against dense matrices [nodes, nodes] in float64 under
// autograd.
#include "recipes/can_kd/gat_conv.h"

#include <gtest/gtest.h>
#include <torch/csrc/autograd/autograd.h>

#include "kernels/row_loops.h"
#include "recipes/can_kd/random_graphs.h"
#include "torch/random_tensors.h"

namespace plimsoll::can_kd {
namespace {

using testing::batch_of;
using testing::gap;
using testing::random_graphs;
using testing::same_bits;

constexpr std::uint64_t kSeed = 20;

struct Case {
  GatConvShape shape;
  std::int64_t graphs;
};

const std::vector<Case> kCases = {{{7, 5, 3, true, 0.0}, 12},   {{18, 24, 4, true, 0.0}, 30},
                                  {{16, 64, 8, true, 0.0}, 10}, {{9, 8, 2, false, 0.0}, 20},
                                  {{10, 13, 1, false, 0.0}, 9}, {{12, 72, 2, true, 0.3}, 15},
                                  {{12, 11, 5, false, 0.5}, 15}};

// By the formula: M[i, j] counts the edges j → i, K[i, j] sums their factors of dropout.
at::Tensor reference(const std::vector<at::Tensor>& in, const Adjacency& a,
                     const GatConvShape& shape, const at::Tensor& keep) {
  const std::int64_t nodes = a.nodes;
  auto count = at::zeros({nodes, nodes, shape.heads}, at::kDouble);
  auto kept = at::zeros({nodes, nodes, shape.heads}, at::kDouble);
  auto counts = count.accessor<double, 3>();
  auto sums = kept.accessor<double, 3>();
  for (std::int64_t v = 0; v < nodes; ++v) {
    for (auto e = a.in_ptr[static_cast<std::size_t>(v)];
         e < a.in_ptr[static_cast<std::size_t>(v) + 1]; ++e) {
      const auto from = a.in_source[static_cast<std::size_t>(e)];
      for (std::int64_t h = 0; h < shape.heads; ++h) {
        counts[v][from][h] += 1.0;
        sums[v][from][h] += keep.defined() ? keep[e][h].item<double>() : 1.0;
      }
    }
  }
  const auto h = at::matmul(in[0], in[1].t()).view({nodes, shape.heads, shape.out});
  const auto source = (h * in[2]).sum(2);
  const auto target = (h * in[3]).sum(2);
  const auto score = at::leaky_relu(target.unsqueeze(1) + source.unsqueeze(0), 0.2);
  const auto exponential = at::exp(score - score.detach().max());
  const auto weight =
      kept * exponential / (count * exponential).sum(1, /*keepdim=*/true);  // [to, from, head]
  const auto out = at::einsum("ijh,jhc->ihc", {weight, h});
  return (shape.concat ? out.reshape({nodes, shape.width()}) : out.mean(1)) + in[4];
}

struct Made {
  at::Tensor y;
  std::vector<at::Tensor> gradients;
};

at::Tensor weighting(const at::Tensor& like) {
  return random_normal(like.sizes(), 1.0, kSeed, 99);
}

Made run(const GatConv& conv, const at::Tensor& x, const Adjacency& adjacency, const Mode& mode) {
  Made made;
  made.y = conv.forward(x, adjacency, mode, 3);
  made.gradients =
      torch::autograd::grad({(made.y * weighting(made.y)).sum()},
                            {x, conv.weight, conv.att_source, conv.att_target, conv.bias});
  return made;
}

GatConv random_conv(const GatConvShape& shape, std::uint64_t seed) {
  std::uint64_t stream = 0;
  GatConv conv = GatConv::make(shape, seed, stream);
  conv.bias = random_normal({shape.width()}, 0.5, seed, 40).set_requires_grad(true);
  return conv;
}

TEST(GatConvTest, EqualsTheDenseFormulaInValueAndInEveryGradient) {
  for (const auto& c : kCases) {
    const auto graphs = batch_of(random_graphs(c.graphs, 9, kSeed));
    const auto adjacency = make_adjacency(graphs);
    const auto conv = random_conv(c.shape, kSeed);
    const auto x =
        random_normal({graphs.nodes(), c.shape.in}, 1.0, kSeed, 41).set_requires_grad(true);
    const Mode mode{.training = true, .noise = 11};
    at::Tensor keep;
    if (c.shape.dropout > 0) {
      keep = at::empty({adjacency.edges, c.shape.heads}, at::kFloat);
      kernels::dropout_factors({mode.noise, 3, c.shape.dropout}, keep.numel(),
                               keep.data_ptr<float>());
    }
    const auto made = run(conv, x, adjacency, mode);
    std::vector<at::Tensor> exact;
    for (const auto& leaf : {x, conv.weight, conv.att_source, conv.att_target, conv.bias}) {
      exact.push_back(leaf.detach().to(at::kDouble).set_requires_grad(true));
    }
    const auto y = reference(exact, adjacency, c.shape, keep);
    EXPECT_LT(gap(made.y, y), 2e-6) << c.shape.heads << " × " << c.shape.out;
    const auto wanted =
        torch::autograd::grad({(y * weighting(made.y).to(at::kDouble)).sum()}, exact);
    for (std::size_t k = 0; k < wanted.size(); ++k) {
      EXPECT_LT(gap(made.gradients[k], wanted[k]), 5e-6)
          << c.shape.heads << " × " << c.shape.out << ", gradient " << k;
    }
  }
}

TEST(GatConvTest, GivesTheSameBitsForOneAndTwoThreads) {
  const auto graphs = batch_of(random_graphs(300, 40, kSeed + 1));
  const auto adjacency = make_adjacency(graphs);
  const auto conv = random_conv({18, 24, 4, true, 0.2}, kSeed);
  const auto x = random_normal({graphs.nodes(), 18}, 1.0, kSeed, 41).set_requires_grad(true);
  const auto [one, two] = testing::with_one_and_two_threads(
      [&] { return run(conv, x, adjacency, {.training = true, .noise = 4}); });
  EXPECT_TRUE(same_bits(one.y, two.y));
  for (std::size_t k = 0; k < one.gradients.size(); ++k) {
    EXPECT_TRUE(same_bits(one.gradients[k], two.gradients[k])) << "gradient " << k;
  }
}

TEST(GatConvTest, GivesANodeWithoutEdgesItsOwnRow) {
  testing::PlainGraph alone;
  alone.x.assign(11, 1.0F);
  const std::vector<testing::PlainGraph> three(3, alone);
  const auto graphs = batch_of(three);
  const auto adjacency = make_adjacency(graphs);
  EXPECT_EQ(adjacency.edges, 3);
  const auto conv = random_conv({6, 4, 2, true, 0.0}, kSeed);
  const auto x = random_normal({3, 6}, 1.0, kSeed, 8);
  const auto y = conv.forward(x, adjacency, {}, 0);
  EXPECT_LT(gap(y, at::matmul(x, conv.weight.t()) + conv.bias), 1e-6);
}

TEST(GatConvTest, TakesLargeScoresWithoutOverflow) {
  const auto graphs = batch_of(random_graphs(5, 9, kSeed));
  const auto adjacency = make_adjacency(graphs);
  const auto conv = random_conv({4, 8, 2, true, 0.0}, kSeed);
  const auto x = (random_normal({graphs.nodes(), 4}, 1e4, kSeed, 41)).set_requires_grad(true);
  const auto made = run(conv, x, adjacency, {});
  EXPECT_TRUE(made.y.isfinite().all().item<bool>());
  for (const auto& gradient : made.gradients) {
    EXPECT_TRUE(gradient.isfinite().all().item<bool>());
  }
}

TEST(AdjacencyTest, HoldsEveryEdgeTwiceInItsOrderAndEachNodesOwnLast) {
  for (std::uint64_t seed = 0; seed < 20; ++seed) {
    const auto graphs = batch_of(random_graphs(7, 12, seed));
    const auto a = make_adjacency(graphs);
    const auto* source = graphs.edge_index.const_data_ptr<std::int64_t>();
    const auto* target = source + graphs.edges();
    std::int64_t degree_max = 0;
    for (std::int64_t v = 0; v < graphs.nodes(); ++v) {
      std::vector<std::int64_t> in;
      bool own = false;
      for (std::int64_t e = 0; e < graphs.edges(); ++e) {
        own = own || (source[e] == v && target[e] == v);
        if (target[e] == v && source[e] != v) {
          in.push_back(source[e]);
        }
      }
      in.push_back(v);
      const auto at = static_cast<std::size_t>(v);
      const std::vector<std::int64_t> held(a.in_source.begin() + a.in_ptr[at],
                                           a.in_source.begin() + a.in_ptr[at + 1]);
      EXPECT_EQ(held, in) << "seed " << seed << ", node " << v;
      EXPECT_EQ(a.self_edge[at] != 0, own) << "seed " << seed << ", node " << v;
      degree_max = std::max<std::int64_t>(degree_max, static_cast<std::int64_t>(in.size()));
      for (auto e = a.out_ptr[at]; e < a.out_ptr[at + 1]; ++e) {
        const auto edge = static_cast<std::size_t>(a.out_edge[static_cast<std::size_t>(e)]);
        const auto to = static_cast<std::size_t>(a.out_target[static_cast<std::size_t>(e)]);
        EXPECT_EQ(a.in_source[edge], v) << "seed " << seed;
        EXPECT_TRUE(a.in_ptr[to] <= static_cast<std::int32_t>(edge) &&
                    static_cast<std::int32_t>(edge) < a.in_ptr[to + 1])
            << "seed " << seed;
      }
    }
    EXPECT_EQ(a.degree_max, degree_max);
    EXPECT_EQ(a.out_ptr.back(), a.edges);
    EXPECT_EQ(a.node_ptr.back(), a.nodes);
  }
}

TEST(AdjacencyTest, RefusesEdgesAndGraphsOutsideTheBatch) {
  auto graphs = batch_of(random_graphs(3, 5, kSeed));
  auto edge = graphs;
  edge.edge_index = at::full({2, 1}, graphs.nodes(), at::kLong);
  EXPECT_THROW(make_adjacency(edge), Exception);
  auto graph = graphs;
  graph.graph_of_node = at::full({graphs.nodes()}, 3, at::kLong);
  EXPECT_THROW(make_adjacency(graph), Exception);
}

}  // namespace
}  // namespace plimsoll::can_kd
