// SPDX-License-Identifier: Apache-2.0
//
// Goal: layers and losses equal torch's operators, in value and in gradient, and their bits depend
// on no number of threads. Method: random float32 inputs against plain operators in float64 under
// autograd.
#include "recipes/can_kd/layers.h"

#include <gtest/gtest.h>
#include <torch/csrc/autograd/autograd.h>

#include <array>
#include <functional>

#include "kernels/node_losses.h"
#include "recipes/can_kd/node_losses.h"
#include "recipes/can_kd/random_graphs.h"
#include "torch/random_tensors.h"

namespace plimsoll::can_kd {
namespace {

using testing::batch_of;
using testing::gap;
using testing::random_graphs;
using testing::same_bits;
using TensorList = std::vector<at::Tensor>;
using Formula = std::function<at::Tensor(const TensorList&)>;

constexpr std::uint64_t kSeed = 30;

at::Tensor normals(at::IntArrayRef shape, std::uint64_t stream, double scale = 1.0) {
  return random_normal(shape, scale, kSeed, stream);
}

TensorList leaves(const TensorList& values, at::ScalarType type) {
  TensorList made;
  for (const auto& value : values) {
    made.push_back(value.detach().to(type).clone().set_requires_grad(true));
  }
  return made;
}

TensorList value_and_gradients(const Formula& formula, const TensorList& in) {
  const auto y = formula(in);
  const auto weight = normals(y.sizes(), 900).to(y.scalar_type());
  auto made = torch::autograd::grad({(y * weight).sum()}, in);
  made.insert(made.begin(), y.detach());
  return made;
}

// Value, gradients, and both with one thread as with two.
void expect_same(const Formula& fast, const Formula& exact, const TensorList& values,
                 double tolerance) {
  const auto [one, two] = testing::with_one_and_two_threads(
      [&] { return value_and_gradients(fast, leaves(values, at::kFloat)); });
  const auto wanted = value_and_gradients(exact, leaves(values, at::kDouble));
  for (std::size_t k = 0; k < wanted.size(); ++k) {
    EXPECT_LT(gap(one[k], wanted[k]), tolerance) << (k == 0 ? "value" : "gradient ") << k;
    EXPECT_TRUE(same_bits(one[k].contiguous(), two[k].contiguous())) << "threads, " << k;
  }
}

TEST(LayersTest, DenseEqualsALinearLayer) {
  for (const auto& [rows, in, out] : {std::array<std::int64_t, 3>{700, 45, 37},
                                      {3000, 7, 10},
                                      {1, 16, 6},
                                      {257, 64, 64},
                                      {20, 300, 1}}) {
    expect_same([&](const TensorList& x) { return dense(x[0], x[1], x[2], {}); },
                [](const TensorList& x) { return at::linear(x[0], x[1], x[2]); },
                {normals({rows, in}, 1), normals({out, in}, 2), normals({out}, 3)}, 5e-6);
  }
}

TEST(LayersTest, DenseInBfloat16RoundsWhatItMultipliesAndSumsInFloat) {
  const auto round = [](const at::Tensor& x) { return x.to(at::kBFloat16).to(at::kDouble); };
  const auto x = normals({50, 64}, 1);
  const auto weight = normals({20, 64}, 2);
  const auto y = dense(x, weight, {}, {.bf16 = true});
  EXPECT_EQ(y.scalar_type(), at::kFloat);
  EXPECT_LT(gap(y, at::matmul(round(x), round(weight).t())), 1e-6);
  EXPECT_GT(gap(y, at::matmul(x.to(at::kDouble), weight.to(at::kDouble).t())), 1e-4);
}

TEST(LayersTest, DenseGivesARowTheSameBitsAnywhere) {
  const auto x = normals({101, 33}, 1);
  const auto weight = normals({21, 33}, 2);
  const auto all = dense(x, weight, {}, {});
  for (const std::int64_t first : {0, 1, 5, 50, 97}) {
    const auto some = dense(x.narrow(0, first, 4).contiguous(), weight, {}, {});
    EXPECT_TRUE(same_bits(some, all.narrow(0, first, 4).contiguous())) << first;
  }
}

TEST(LayersTest, BatchNormEqualsTorchsInTrainingAndInEvaluation) {
  for (const bool training : {true, false}) {
    const auto norm = BatchNorm::make(19);
    auto mean = norm.running_mean;
    mean.copy_(normals({19}, 5));
    const auto mean_before = mean.to(at::kDouble);
    auto exact_mean = mean_before.clone();
    auto exact_variance = at::ones({19}, at::kDouble);
    const Mode mode{.training = training, .noise = 7};
    expect_same(
        [&](const TensorList& in) {
          return BatchNorm{in[1], in[2], norm.running_mean, norm.running_variance}.relu_dropout(
              in[0], 0.0, mode, 1, /*again=*/true);
        },
        [&](const TensorList& in) {
          return at::relu(at::batch_norm(in[0], in[1], in[2], exact_mean, exact_variance, training,
                                         0.1, 1e-5, false));
        },
        {normals({600, 19}, 1, 3.0) + 2.0, normals({19}, 2), normals({19}, 3)}, 2e-5);
    EXPECT_TRUE(same_bits(norm.running_mean, mean_before.to(at::kFloat)));  // again moved nothing.
    (void)norm.relu_dropout(normals({600, 19}, 1, 3.0) + 2.0, 0.0, mode, 1, false);
    EXPECT_LT(gap(norm.running_mean, exact_mean), 1e-5);
    EXPECT_LT(gap(norm.running_variance, exact_variance), 1e-5);
  }
}

TEST(LayersTest, DropoutKeepsItsShareScalesItAndRepeatsItself) {
  const auto x = (normals({800, 61}, 1).abs() + 0.1).set_requires_grad(true);
  const Mode mode{.training = true, .noise = 3};
  const auto y = relu_dropout(x, 0.2, mode, 5);
  const auto kept = (y > 0).to(at::kDouble);
  EXPECT_NEAR(kept.mean().item<double>(), 0.8, 0.01);
  EXPECT_NEAR(kept.mean(0).min().item<double>(), 0.8, 0.08);
  EXPECT_LT(gap(y, x.to(at::kDouble) * kept * (65536.0 / (65536.0 - 13107.0))), 1e-6);
  const auto gradient = torch::autograd::grad({y.sum()}, {x})[0];
  EXPECT_LT(gap(gradient, kept * (65536.0 / (65536.0 - 13107.0))), 1e-6);
  EXPECT_TRUE(same_bits(y, relu_dropout(x, 0.2, mode, 5)));
  EXPECT_FALSE(same_bits(y, relu_dropout(x, 0.2, mode, 6)));
  EXPECT_FALSE(same_bits(y, relu_dropout(x, 0.2, {.training = true, .noise = 4}, 5)));
  EXPECT_TRUE(same_bits(relu_dropout(x, 0.2, {}, 5), x.detach()));
}

TEST(LayersTest, ReluKeepsWhatIsNoNumber) {
  auto x = at::ones({3, 3}, at::kFloat);
  x[1][1] = std::numeric_limits<float>::quiet_NaN();
  EXPECT_TRUE(relu_dropout(x, 0.0, {}, 0)[1][1].isnan().item<bool>());
  EXPECT_TRUE(logistic(x)[1][1].isnan().item<bool>());
}

TEST(LayersTest, LogisticEqualsTorchs) {
  expect_same([](const TensorList& in) { return logistic(in[0]); },
              [](const TensorList& in) { return at::sigmoid(in[0]); }, {normals({500, 7}, 1, 20.0)},
              2e-6);
}

TEST(LayersTest, SamplesHaveTheMeanAndTheDeviationTheyWereAskedFor) {
  const auto mean = at::full({4000, 8}, 2.0F).set_requires_grad(true);
  const auto log_variance = at::full({4000, 8}, -1.0F).set_requires_grad(true);
  const Mode mode{.training = true, .noise = 9};
  const auto z = sample_normal(mean, log_variance, mode, 1);
  EXPECT_NEAR(z.mean().item<double>(), 2.0, 0.02);
  EXPECT_NEAR(z.std().item<double>(), std::exp(-0.5), 0.01);
  const auto gradients = torch::autograd::grad({(z * z).sum()}, {mean, log_variance});
  EXPECT_LT(gap(gradients[0], 2.0 * z), 1e-6);
  EXPECT_LT(gap(gradients[1], z * (z - mean)), 1e-5);
  EXPECT_TRUE(same_bits(sample_normal(mean, log_variance, {}, 1), mean));
}

TEST(LayersTest, MeansOfNodesAndRowsOfTheTableEqualIndexing) {
  const auto graphs = batch_of(random_graphs(60, 12, kSeed));
  const auto adjacency = make_adjacency(graphs);
  const auto ids = graphs.x.select(1, 0).to(at::kLong);
  expect_same(
      [&](const TensorList& in) { return embed_nodes(in[0], graphs.x); },
      [&](const TensorList& in) {
        return at::cat(
            {in[0].index_select(0, ids), graphs.x.narrow(1, 1, kContinuous).to(at::kDouble)}, 1);
      },
      {normals({testing::kIds, 40}, 1)}, 1e-6);
  const auto sizes = at::bincount(graphs.graph_of_node).to(at::kDouble).unsqueeze(1);
  expect_same(
      [&](const TensorList& in) { return mean_of_nodes(in[0], adjacency); },
      [&](const TensorList& in) {
        return at::zeros({60, 13}, at::kDouble).index_add(0, graphs.graph_of_node, in[0]) / sizes;
      },
      {normals({graphs.nodes(), 13}, 2)}, 1e-6);
}

TEST(LayersTest, RefusesAnIdBeyondItsTable) {
  auto x = at::zeros({2, 11}, at::kFloat);
  x[1][0] = 5.0F;
  EXPECT_THROW(embed_nodes(normals({5, 3}, 1), x), Exception);
  EXPECT_NO_THROW(embed_nodes(normals({6, 3}, 1), x));
}

TEST(LayersTest, AttentionOverLayersEqualsTorchsLstm) {
  constexpr std::int64_t kWidth = 10;
  constexpr std::int64_t kLayers = 3;
  std::uint64_t stream = 0;
  const auto made = LayerAttention::make(kWidth, kLayers, kSeed, stream);
  std::vector<NamedTensor> parameters;
  made.add_parameters(parameters, "jk");
  TensorList values;
  for (std::int64_t l = 0; l < kLayers; ++l) {
    values.push_back(normals({130, kWidth}, 50 + static_cast<std::uint64_t>(l)));
  }
  for (const auto& parameter : parameters) {
    values.push_back(parameter.tensor);
  }
  values.pop_back();  // The score's bias: a softmax of scores does not see it.
  const auto& bias = made.score.bias;
  const auto hidden = kLayers * kWidth / 2;
  expect_same(
      [&](const TensorList& in) {
        const auto* p = in.data() + kLayers;
        const LayerAttention same{p[0], p[1], p[2], p[3], p[4], p[5], p[6], p[7], {p[8], bias}};
        return same.forward({in.begin(), in.begin() + kLayers}, {});
      },
      [&](const TensorList& in) {
        const TensorList weights(in.begin() + kLayers, in.begin() + kLayers + 8);
        const auto x = at::stack({in[0], in[1], in[2]}, 1);
        const auto zero = at::zeros({2, 130, hidden}, at::kDouble);
        const auto y = std::get<0>(
            at::lstm(x, {zero, zero}, weights, true, 1, 0.0, false, true, /*batch_first=*/true));
        const auto score = at::linear(y, in[kLayers + 8], bias.to(at::kDouble)).squeeze(2);
        return (x * at::softmax(score, 1).unsqueeze(2)).sum(1);
      },
      values, 1e-5);
}

TEST(LayersTest, CheckpointedLayersRunAgainAndGiveTheSameGradients) {
  const auto x = normals({40, 6}, 1).set_requires_grad(true);
  const auto weight = normals({5, 6}, 2).set_requires_grad(true);
  int first = 0;
  int again_runs = 0;
  const auto layer = [&](const TensorList& in, bool again) {
    (again ? again_runs : first) += 1;
    return relu_dropout(dense(in[0], in[1], {}, {}), 0.3, {.training = true, .noise = 2}, 4);
  };
  const auto plain = layer({x, weight}, false);
  const auto kept = checkpointed(layer, {x, weight});
  EXPECT_TRUE(same_bits(plain, kept));
  const auto wanted = torch::autograd::grad({(plain * plain).sum()}, {x, weight});
  const auto made = torch::autograd::grad({(kept * kept).sum()}, {x, weight});
  EXPECT_TRUE(same_bits(made[0], wanted[0]));
  EXPECT_TRUE(same_bits(made[1], wanted[1]));
  EXPECT_EQ(first, 2);
  EXPECT_EQ(again_runs, 1);
}

TEST(NodeLossesTest, EqualTheirFormulas) {
  const auto x = normals({2500, 4}, 1);
  expect_same([](const TensorList& in) { return kernels::mean_square(in[0], in[1]); },
              [](const TensorList& in) { return at::mse_loss(in[0], in[1]); },
              {x, normals({2500, 4}, 2)}, 1e-6);
  expect_same([](const TensorList& in) { return kernels::normal_divergence(in[0], in[1]); },
              [](const TensorList& in) {
                return -0.5 * (1.0 + in[1] - in[0] * in[0] - at::exp(in[1])).mean();
              },
              {x, normals({2500, 4}, 2, 2.0)}, 2e-6);
}

TEST(NodeLossesTest, EqualWholeLogitsAndWholeTargetsOverIds) {
  const auto graphs = batch_of(random_graphs(160, 16, kSeed));  // More than one block of rows.
  ASSERT_GT(graphs.nodes(), 1024);
  const auto adjacency = make_adjacency(graphs);
  const auto ids = graphs.x.select(1, 0).to(at::kLong).contiguous();
  const TensorList values{normals({graphs.nodes(), 9}, 1), normals({testing::kIds, 9}, 2),
                          normals({testing::kIds}, 3)};
  expect_same(
      [&](const TensorList& in) {
        return id_cross_entropy(in[0], {in[1], in[2]}, ids, {});
      },
      [&](const TensorList& in) {
        return at::cross_entropy_loss(at::linear(in[0], in[1], in[2]), ids);
      },
      values, 3e-6);
  auto targets = at::zeros({graphs.nodes(), testing::kIds}, at::kDouble);
  const auto* source = graphs.edge_index.const_data_ptr<std::int64_t>();
  for (std::int64_t e = 0; e < graphs.edges(); ++e) {
    targets[source[e]][ids[source[graphs.edges() + e]].item<std::int64_t>()] = 1.0;
  }
  expect_same(
      [&](const TensorList& in) {
        return neighbour_cross_entropy(in[0], {in[1], in[2]}, ids, adjacency, {});
      },
      [&](const TensorList& in) {
        return at::binary_cross_entropy_with_logits(at::linear(in[0], in[1], in[2]), targets);
      },
      values, 3e-6);
  const auto rows = id_cross_entropy_rows(values[0], {values[1], values[2]}, ids);
  const auto wanted = at::cross_entropy_loss(at::linear(values[0], values[1], values[2]), ids, {},
                                             at::Reduction::None);
  EXPECT_LT(gap(rows, wanted), 2e-6);
}

}  // namespace
}  // namespace plimsoll::can_kd
