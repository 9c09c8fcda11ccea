// SPDX-License-Identifier: Apache-2.0
//
// Goal: the models give the same bits for any number of threads and with checkpointing or without;
// a graph's inference depends on no other graph of its batch; gradients are those of the loss.
// Method: random batches; bits compared; finite differences along the gradient; random companions.
#include <gtest/gtest.h>
#include <torch/csrc/autograd/autograd.h>

#include <functional>

#include "recipes/can_kd/gat_jk.h"
#include "recipes/can_kd/q_network.h"
#include "recipes/can_kd/random_graphs.h"
#include "recipes/can_kd/vgae.h"
#include "torch/random_tensors.h"

namespace plimsoll::can_kd {
namespace {

using testing::batch_of;
using testing::gap;
using testing::random_graphs;
using testing::same_bits;
using TensorList = std::vector<at::Tensor>;

constexpr std::uint64_t kSeed = 40;

GatShape gat_shape(bool lstm) {
  return {.ids = testing::kIds,
          .embedding = 6,
          .hidden = 12,
          .layers = 3,
          .heads = 4,
          .fc_layers = 3,
          .lstm = lstm,
          .dropout = 0.2,
          .attention_dropout = lstm ? 0.1 : 0.0};
}

VgaeShape vgae_shape() {
  return {.ids = testing::kIds, .embedding = 5, .hidden = {24, 14, 6}, .heads = 4, .dropout = 0.15};
}

struct Batch {
  GraphTensors graphs;
  Adjacency adjacency;
};

Batch make_batch(std::span<const testing::PlainGraph> graphs) {
  Batch batch{batch_of(graphs), {}};
  batch.adjacency = make_adjacency(batch.graphs);
  return batch;
}

TensorList tensors(const std::vector<NamedTensor>& named) {
  TensorList list;
  for (const auto& one : named) {
    list.push_back(one.tensor);
  }
  return list;
}

at::Tensor gat_loss(const GatClassifier& model, const Batch& batch, const Mode& mode) {
  return at::cross_entropy_loss(model.forward(batch.graphs, batch.adjacency, mode),
                                batch.graphs.labels);
}

at::Tensor loss_of_vgae(const Vgae& model, const Batch& batch, const Mode& mode) {
  return vgae_loss(model.forward(batch.graphs, batch.adjacency, mode), batch.graphs,
                   batch.adjacency)
      .total;
}

// The loss, then its gradients.
template <class Model, class Loss>
TensorList step(const Model& model, const Loss& loss, const Batch& batch, const Mode& mode) {
  const auto value = loss(model, batch, mode);
  auto made = torch::autograd::grad({value}, tensors(model.parameters()));
  made.insert(made.begin(), value.detach());
  return made;
}

void expect_same(const TensorList& x, const TensorList& y, const char* what) {
  ASSERT_EQ(x.size(), y.size());
  for (std::size_t k = 0; k < x.size(); ++k) {
    EXPECT_TRUE(same_bits(x[k].contiguous(), y[k].contiguous())) << what << ", tensor " << k;
  }
}

// Along the gradient, the loss changes by its length.
template <class Model, class Loss>
void expect_descent(const Model& model, const Loss& loss, const Batch& batch, const Mode& mode) {
  const auto made = step(model, loss, batch, mode);
  const auto parameters = tensors(model.parameters());
  double square = 0.0;
  for (std::size_t k = 1; k < made.size(); ++k) {
    square += made[k].to(at::kDouble).square().sum().template item<double>();
  }
  const double length = std::sqrt(square);
  const auto moved = [&](double by) {
    const c10::AutoGradMode off{false};
    for (std::size_t k = 0; k < parameters.size(); ++k) {
      parameters[k].add_(made[k + 1], by / length);
    }
    return loss(model, batch, mode).template item<double>();
  };
  constexpr double kStep = 2e-3;
  const double ahead = moved(kStep);
  const double back = moved(-2 * kStep);
  moved(kStep);
  EXPECT_NEAR((ahead - back) / (2 * kStep), length, 0.02 * length);
}

TEST(GatClassifierTest, GivesTheSameBitsForAnyThreadsAndWithCheckpointing) {
  for (const bool lstm : {false, true}) {
    const auto batch = make_batch(random_graphs(150, 25, kSeed));
    const GatClassifier model(gat_shape(lstm), kSeed);
    Mode mode{.training = true, .noise = 5};
    const auto run = [&] { return step(model, gat_loss, batch, mode); };
    const auto [one, two] = testing::with_one_and_two_threads(run);
    expect_same(one, two, "threads");
    mode.checkpointing = true;
    expect_same(one, run(), "checkpointing");
    mode.noise = 6;
    EXPECT_FALSE(same_bits(one[0], run()[0]));
  }
}

TEST(GatClassifierTest, HasTheGradientsOfItsLoss) {
  for (const bool lstm : {false, true}) {
    const auto batch = make_batch(random_graphs(40, 10, kSeed));
    expect_descent(GatClassifier(gat_shape(lstm), kSeed), gat_loss, batch,
                   {.training = true, .noise = 5});
  }
}

TEST(VgaeTest, GivesTheSameBitsForAnyThreadsAndWithCheckpointing) {
  const auto batch = make_batch(random_graphs(150, 25, kSeed));
  Mode mode{.training = true, .noise = 5};
  const auto run = [&] {
    const Vgae model(vgae_shape(), kSeed);  // Fresh running statistics.
    auto made = step(model, loss_of_vgae, batch, mode);
    for (const auto& buffer : model.buffers()) {
      made.push_back(buffer.tensor);
    }
    return made;
  };
  const auto [one, two] = testing::with_one_and_two_threads(run);
  expect_same(one, two, "threads");
  mode.checkpointing = true;
  expect_same(one, run(), "checkpointing");
}

TEST(VgaeTest, HasTheGradientsOfItsLoss) {
  const auto batch = make_batch(random_graphs(40, 10, kSeed));
  expect_descent(Vgae(vgae_shape(), kSeed), loss_of_vgae, batch, {.training = true, .noise = 5});
}

TEST(VgaeTest, HasTheShapesItPromises) {
  const auto batch = make_batch(random_graphs(9, 10, kSeed));
  const Vgae model(vgae_shape(), kSeed);
  const auto out = model.forward(batch.graphs, batch.adjacency, {.training = true, .noise = 1});
  const auto nodes = batch.graphs.nodes();
  EXPECT_EQ(out.z.sizes(), (at::IntArrayRef{nodes, 6}));
  EXPECT_EQ(out.log_variance.sizes(), out.mean.sizes());
  EXPECT_EQ(out.reconstruction.sizes(), (at::IntArrayRef{nodes, kContinuous}));
  EXPECT_TRUE(((out.reconstruction > 0) & (out.reconstruction < 1)).all().item<bool>());
  EXPECT_EQ(id_logits(out).sizes(), (at::IntArrayRef{nodes, testing::kIds}));
  EXPECT_EQ(neighbour_logits(out).sizes(), (at::IntArrayRef{nodes, testing::kIds}));
  const auto loss = vgae_loss(out, batch.graphs, batch.adjacency);
  EXPECT_LT(
      gap(loss.total, loss.mse + 0.1 * loss.id + 0.05 * loss.neighbours + 0.01 * loss.divergence),
      1e-6);
}

TEST(VgaeTest, ErrorsOfGraphsAreMeansOverTheirNodes) {
  const auto batch = make_batch(random_graphs(30, 10, kSeed));
  const Vgae model(vgae_shape(), kSeed);
  const auto out = model.forward(batch.graphs, batch.adjacency, {});
  const auto errors = graph_errors(out, batch.graphs, batch.adjacency);
  const auto ids = batch.graphs.x.select(1, 0).to(at::kLong);
  const auto of_nodes =
      (out.reconstruction - batch.graphs.x.narrow(1, 1, kContinuous)).square().mean(1) +
      0.1 * at::cross_entropy_loss(id_logits(out), ids, {}, at::Reduction::None);
  for (std::int64_t g = 0; g < 30; ++g) {
    const auto mine = of_nodes.masked_select(batch.graphs.graph_of_node == g).mean();
    EXPECT_NEAR(errors[g].item<double>(), mine.item<double>(), 1e-5) << "graph " << g;
  }
}

// Everything inference says of a graph: of a batch, the rows of graph g.
struct Said {
  at::Tensor logits, reconstruction, mean, errors;
};

Said say(const GatClassifier& gat, const Vgae& vgae, const Batch& batch, std::int64_t g) {
  const c10::AutoGradMode off{false};
  const Mode mode;
  const auto out = vgae.forward(batch.graphs, batch.adjacency, mode);
  const auto first = batch.adjacency.node_ptr[static_cast<std::size_t>(g)];
  const auto count = batch.adjacency.node_ptr[static_cast<std::size_t>(g) + 1] - first;
  return {gat.forward(batch.graphs, batch.adjacency, mode).narrow(0, g, 1).contiguous(),
          out.reconstruction.narrow(0, first, count).contiguous(),
          out.mean.narrow(0, first, count).contiguous(),
          graph_errors(out, batch.graphs, batch.adjacency).narrow(0, g, 1).contiguous()};
}

// Cached outputs of a teacher stand for any batch's: they must not depend on a graph's companions.
TEST(ModelsTest, K9InferenceSaysTheSameOfAGraphAloneAndInAnyBatch) {
  const auto graphs = random_graphs(60, 30, kSeed);
  for (const bool lstm : {false, true}) {
    const GatClassifier gat(gat_shape(lstm), kSeed);
    const Vgae vgae(vgae_shape(), kSeed);
    for (std::uint64_t seed = 0; seed < 6; ++seed) {
      testing::Draws draw(seed);
      std::vector<testing::PlainGraph> chosen;
      const std::int64_t count = 1 + draw.below(50);
      for (std::int64_t k = 0; k < count; ++k) {
        chosen.push_back(graphs[static_cast<std::size_t>(draw.below(60))]);
      }
      const std::int64_t g = draw.below(count);
      const auto together = say(gat, vgae, make_batch(chosen), g);
      const auto alone =
          say(gat, vgae, make_batch(std::span(chosen).subspan(static_cast<std::size_t>(g), 1)), 0);
      EXPECT_TRUE(same_bits(together.logits, alone.logits)) << "seed " << seed;
      EXPECT_TRUE(same_bits(together.reconstruction, alone.reconstruction)) << "seed " << seed;
      EXPECT_TRUE(same_bits(together.mean, alone.mean)) << "seed " << seed;
      EXPECT_TRUE(same_bits(together.errors, alone.errors)) << "seed " << seed;
    }
  }
}

TEST(ModelsTest, K15InferenceTakesTheMeanOfTheLatentAndRepeatsItself) {
  const auto batch = make_batch(random_graphs(20, 10, kSeed));
  const Vgae model(vgae_shape(), kSeed);
  const auto first = model.forward(batch.graphs, batch.adjacency, {.noise = 1});
  const auto second = model.forward(batch.graphs, batch.adjacency, {.noise = 2});
  EXPECT_TRUE(same_bits(first.z, first.mean));
  EXPECT_TRUE(same_bits(first.reconstruction, second.reconstruction));
  const auto sampled = model.forward(batch.graphs, batch.adjacency, {.training = true, .noise = 1});
  EXPECT_FALSE(same_bits(sampled.z, sampled.mean));
}

TEST(ModelsTest, K16HugeVariancesGiveNoNanInBfloat16) {
  const auto batch = make_batch(random_graphs(40, 10, kSeed));
  const Vgae model(vgae_shape(), kSeed);
  for (const auto& parameter : model.parameters()) {
    if (parameter.name == "log_variance.weight" || parameter.name == "mean.weight") {
      const c10::AutoGradMode off{false};
      parameter.tensor.mul_(1e6);
    }
  }
  const Mode mode{.training = true, .noise = 3, .bf16 = true};
  const auto out = model.forward(batch.graphs, batch.adjacency, mode);
  EXPECT_LE(out.log_variance.abs().max().item<double>(), kLogVarianceMax);
  EXPECT_GT(out.log_variance.abs().max().item<double>(), kLogVarianceMax - 1);
  for (const auto& made : step(model, loss_of_vgae, batch, mode)) {
    EXPECT_FALSE(made.isnan().any().item<bool>());
  }
}

TEST(ModelsTest, K18TheDenseLayersDoNotHoldMostOfAModel) {
  const std::int64_t ids = 501;
  const GatClassifier teacher({ids, 32, 64, 5, 8, 3, false, 0.2, 0.0}, kSeed);
  const GatClassifier student({ids, 8, 24, 2, 4, 1, false, 0.2, 0.0}, kSeed);
  std::int64_t widest = 0;
  for (const auto& parameter : teacher.parameters()) {
    if (parameter.name.starts_with("dense.") && parameter.tensor.dim() == 2) {
      widest = std::max(widest, parameter.tensor.size(0));
    }
  }
  EXPECT_EQ(widest, 64 * 8);
  const auto large = parameter_count(teacher.parameters());
  const auto small = parameter_count(student.parameters());
  EXPECT_LT(large, 3'000'000);  // The original's: 13.1 M in the dense layers alone.
  EXPECT_LT(static_cast<double>(small), 0.05 * static_cast<double>(large));
  const Vgae large_vgae({ids, 64, {1024, 512, 96}, 4, 0.15}, kSeed);
  const Vgae small_vgae({ids, 4, {80, 40, 16}, 1, 0.15}, kSeed);
  EXPECT_LT(static_cast<double>(parameter_count(small_vgae.parameters())),
            0.05 * static_cast<double>(parameter_count(large_vgae.parameters())));
}

TEST(ModelsTest, ItsSizeIsKnownWithoutItsMemory) {
  for (const bool lstm : {false, true}) {
    const auto drawn = parameter_count(GatClassifier(gat_shape(lstm), kSeed).parameters());
    const UndrawnWeights shapes(UndrawnWeights::Kind::kShapes);
    const GatClassifier sized(gat_shape(lstm), kSeed);
    EXPECT_EQ(parameter_count(sized.parameters()), drawn);
    for (const auto& parameter : sized.parameters()) {
      EXPECT_TRUE(parameter.tensor.is_meta() || parameter.tensor.dim() == 1) << parameter.name;
    }
  }
  const auto drawn = parameter_count(Vgae(vgae_shape(), kSeed).parameters());
  const UndrawnWeights shapes(UndrawnWeights::Kind::kShapes);
  EXPECT_EQ(parameter_count(Vgae(vgae_shape(), kSeed).parameters()), drawn);
}

TEST(ModelsTest, TakesTheUnknownIdAndABatchOfOneNode) {
  testing::PlainGraph alone;
  alone.x.assign(11, 0.5F);
  alone.x[0] = static_cast<float>(testing::kIds - 1);  // The last row of the table.
  const auto batch = make_batch(std::span(&alone, 1));
  const GatClassifier gat(gat_shape(false), kSeed);
  const Vgae vgae(vgae_shape(), kSeed);
  const Mode mode{.training = true, .noise = 1};
  for (const auto& made : step(gat, gat_loss, batch, mode)) {
    EXPECT_TRUE(made.isfinite().all().item<bool>());
  }
  for (const auto& made : step(vgae, loss_of_vgae, batch, mode)) {
    EXPECT_TRUE(made.isfinite().all().item<bool>());
  }
}

TEST(ModelsTest, EveryParameterTakesAGradientAndHasANameOfItsOwn) {
  const auto batch = make_batch(random_graphs(60, 12, kSeed));
  const auto check = [](const std::vector<NamedTensor>& parameters, const TensorList& made) {
    std::vector<std::string> names;
    for (std::size_t k = 0; k < parameters.size(); ++k) {
      if (parameters[k].name != "jk.score.bias") {  // A softmax of scores does not see it.
        EXPECT_GT(made[k + 1].abs().max().item<double>(), 0.0) << parameters[k].name;
      }
      EXPECT_TRUE(parameters[k].tensor.is_contiguous()) << parameters[k].name;
      names.push_back(parameters[k].name);
    }
    std::sort(names.begin(), names.end());
    EXPECT_EQ(std::adjacent_find(names.begin(), names.end()), names.end());
  };
  const Mode mode{.training = true, .noise = 1};
  const GatClassifier gat(gat_shape(true), kSeed);
  check(gat.parameters(), step(gat, gat_loss, batch, mode));
  const Vgae vgae(vgae_shape(), kSeed);
  check(vgae.parameters(), step(vgae, loss_of_vgae, batch, mode));
}

TEST(QNetworkTest, CopiesAnotherAndRunsRowByRow) {
  const QNetwork one(32, 1);
  QNetwork two(32, 2);
  const auto states = random_normal({50, kFusionState}, 1.0, kSeed, 3);
  const auto y = one.forward(states, {});
  EXPECT_EQ(y.sizes(), (at::IntArrayRef{50, kFusionActions}));
  EXPECT_FALSE(same_bits(y, two.forward(states, {})));
  two.copy_from(one);
  EXPECT_TRUE(same_bits(y, two.forward(states, {})));
}

}  // namespace
}  // namespace plimsoll::can_kd
