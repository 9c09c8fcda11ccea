// SPDX-License-Identifier: Apache-2.0
//
// Goal: each term of the loss, and the gradients of all of them together, equal the plain formula.
// Method: the model's forward pass again in float64 with plain operators (cosir_reference.h).
#include "recipes/cosir/loss.h"

#include <ATen/ATen.h>
#include <gtest/gtest.h>
#include <torch/csrc/autograd/autograd.h>

#include <cmath>
#include <numbers>

#include "kernels/reference.h"

namespace plimsoll::cosir {
namespace {

constexpr std::uint64_t kSeed = 5;

struct Case {
  std::int64_t label_dim;
  std::int64_t rows;
  bool projections;
  bool repeated;
};

struct World {
  Model model;
  LossInput in;
  std::vector<std::int64_t> ids;

  World(const World&) = delete;
  World& operator=(const World&) = delete;
  explicit World(const Case& c)
      : model(make_model({c.projections ? 20 : 24, 24, 24, c.label_dim, c.projections}, kSeed)) {
    for (std::int64_t i = 0; i < c.rows; ++i) {
      ids.push_back(1000 + 37 * i);
    }
    in.image = random_normal({c.rows, c.projections ? 20 : 24}, 2.0, kSeed, 90);
    in.text = random_normal({c.rows, 24}, 3.0, kSeed, 91);
    in.conditions = random_normal({c.rows, c.label_dim}, 1.0, kSeed, 92).set_requires_grad(true);
    in.groups = at::arange(c.rows, at::kLong);
    if (c.repeated) {
      in.groups = in.groups.div(4, "floor").contiguous();
    }
    in.ids = ids;
    in.epoch = 3;
  }
};

std::vector<at::Tensor> leaves(const World& s) {
  std::vector<at::Tensor> list{s.in.conditions};
  for (const auto& p : combiner_parameters(s.model)) {
    list.push_back(p.tensor);
  }
  for (const auto& p : projection_parameters(s.model)) {
    list.push_back(p.tensor);
  }
  return list;
}

// The whole loss in float64, in the order of COSIR's formulas. `leaf` follows leaves().
struct Plain {
  const World& world;
  std::vector<at::Tensor> leaf;

  at::Tensor branch(std::size_t at, const at::Tensor& x) const {
    const auto column = x.unsqueeze(1);
    auto h = at::relu(at::matmul(column, leaf[at].t()) + leaf[at + 1]);
    const auto mean = h.mean(1, true);
    const auto spread = (h - mean).square().mean(1, true);
    h = (h - mean) / (spread + 1e-5).sqrt() * leaf[at + 2] + leaf[at + 3];
    return (at::matmul(h, leaf[at + 4].t()) + leaf[at + 5] + column * leaf[at + 6] + leaf[at + 7])
        .squeeze(1);
  }
  at::Tensor out(const at::Tensor& text, const at::Tensor& c) const {
    const auto s = 0.8 + 0.4 * branch(1, c.square().sum(1).sqrt());
    const auto theta = std::numbers::pi / 6.0 * branch(9, kernels::reference::angle(c));
    const auto w = world.model.direction_weight.to(at::kDouble);
    const auto d = at::matmul(c, w.t()) + world.model.direction_bias.to(at::kDouble);
    return kernels::reference::combine(text, d, theta, s);
  }
  std::array<at::Tensor, kTerms> terms(double temperature) const {
    const auto c = leaf[0];
    auto text = world.in.text.to(at::kDouble);
    auto image = world.in.image.to(at::kDouble);
    if (world.model.shape.projections) {
      image = at::matmul(kernels::reference::unit(image), leaf[17].t()) + leaf[18];
      text = at::matmul(kernels::reference::unit(text), leaf[19].t()) + leaf[20];
    }
    const auto made = out(text, c);
    const auto delta = made - kernels::reference::unit(text);
    const auto found = kernels::reference::neighbours<float>(world.in.conditions);
    const auto rows = static_cast<std::int64_t>(world.ids.size());
    auto nearest = at::full({rows, 3}, -1, at::kLong);
    for (std::int64_t i = 0; i < rows; ++i) {
      for (std::size_t k = 0; k < found.nearest[static_cast<std::size_t>(i)].size(); ++k) {
        nearest[i][static_cast<std::int64_t>(k)] = found.nearest[static_cast<std::size_t>(i)][k];
      }
    }
    const auto picked = pick_neighbours(nearest, world.ids, kSeed, world.in.epoch);
    const auto angle = at::tensor(found.best_angle, at::kLong);
    const auto r = c.square().sum(1).sqrt();

    std::array<at::Tensor, kTerms> t;
    t[kInfoNce] = kernels::reference::nce(made, kernels::reference::unit(image), world.in.groups,
                                          temperature);
    const auto apart = (c - c.index_select(0, picked)).square().sum(1).sqrt();
    t[kLaplacian] =
        ((1 - kernels::reference::cosine(delta, delta.index_select(0, picked))) * (-apart).exp())
            .mean();
    t[kAngular] = (1 - kernels::reference::cosine(delta, delta.index_select(0, angle))).mean();
    const auto cosine =
        (kernels::reference::unit(c) * kernels::reference::unit(c).index_select(0, angle)).sum(1);
    const auto near = (cosine > std::cos(15.0 * std::numbers::pi / 180.0)).nonzero().squeeze(1);
    const auto first = near.narrow(0, 0, std::min<std::int64_t>(50, near.size(0)));
    const auto length = delta.square().sum(1).sqrt();
    const auto other = angle.index_select(0, first);
    const auto ordered = r.index_select(0, first) <= r.index_select(0, other);
    const auto low = at::where(ordered, first, other);
    const auto high = at::where(ordered, other, first);
    t[kRadius] =
        first.size(0) == 0
            ? at::zeros({}, at::kDouble)
            : at::relu(0.05 - (length.index_select(0, high) - length.index_select(0, low))).mean();
    const auto texts = text.narrow(0, 0, std::min<std::int64_t>(64, rows));
    std::vector<at::Tensor> moved;
    for (int k = 0; k < 4; ++k) {
      auto anchor = at::zeros({1, c.size(1)}, at::kDouble);
      anchor[0][k % 2] = (k < 2 ? 1.0 : -1.0) * r.detach().mean().item<double>();
      moved.push_back(
          (out(texts, anchor.expand({texts.size(0), -1})) - kernels::reference::unit(texts))
              .mean(0, true));
    }
    t[kRotation] = at::zeros({}, at::kDouble);
    for (std::size_t k = 0; k < 4; ++k) {
      t[kRotation] =
          t[kRotation] +
          kernels::reference::cosine(moved[k], moved[(k + 1) % 4]).square().squeeze(0) / 4;
    }
    t[kBoundary] = at::relu(r - 10.0).square().mean();
    return t;
  }
};

class CosirLossTest : public testing::TestWithParam<Case> {};

TEST_P(CosirLossTest, EachTermEqualsThePlainFormulaInValueAndGradient) {
  for (int only = 0; only < kTerms; ++only) {
    World world{GetParam()};
    if (only == kBoundary) {  // Inactive for small radii.
      world.in.conditions = (world.in.conditions.detach() * 9.0).set_requires_grad(true);
    }
    LossOptions options{{}, 0.07, kSeed};
    options.weights[static_cast<std::size_t>(only)] = 1.0;
    const Loss loss = compute_loss(world.model, world.in, options);

    Plain plain{world, {}};
    for (const auto& leaf : leaves(world)) {
      plain.leaf.push_back(leaf.detach().to(at::kDouble).set_requires_grad(true));
    }
    const auto exact = plain.terms(0.07)[static_cast<std::size_t>(only)];
    EXPECT_NEAR(loss.values[static_cast<std::size_t>(only)], exact.item<double>(),
                2e-5 * std::max(1.0, std::abs(exact.item<double>())))
        << kTermNames[static_cast<std::size_t>(only)];
    EXPECT_NEAR(loss.total.item<double>(), exact.item<double>(),
                2e-5 * std::max(1.0, std::abs(exact.item<double>())));
    if (!exact.requires_grad()) {
      continue;
    }
    const auto fast = torch::autograd::grad({loss.total}, leaves(world), {}, std::nullopt, false,
                                            /*allow_unused=*/true);
    const auto slow = torch::autograd::grad({exact}, plain.leaf, {}, std::nullopt, false,
                                            /*allow_unused=*/true);
    double scale = 1e-3;
    for (const auto& g : slow) {
      scale = g.defined() ? std::max(scale, g.abs().max().item<double>()) : scale;
    }
    for (std::size_t k = 0; k < fast.size(); ++k) {
      const auto x = fast[k].defined() ? fast[k].to(at::kDouble) : at::zeros_like(plain.leaf[k]);
      const auto y = slow[k].defined() ? slow[k] : at::zeros_like(plain.leaf[k]);
      EXPECT_LT((x - y).abs().max().item<double>() / scale, 2e-4)
          << kTermNames[static_cast<std::size_t>(only)] << ", leaf " << k;
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Shapes, CosirLossTest,
                         testing::Values(Case{2, 40, false, false}, Case{2, 40, false, true},
                                         Case{5, 40, false, false}, Case{5, 80, true, true},
                                         Case{2, 70, true, false}, Case{2, 3, false, false},
                                         Case{2, 2, false, false}));

TEST(CosirLossTermsTest, WeightsMultiplyTheTerms) {
  World world{{2, 30, false, false}};
  const LossOptions all{{1.0, 0.7, 0.3, 0.3, 0.3, 0.0}, 0.07, kSeed};
  const Loss loss = compute_loss(world.model, world.in, all);
  double sum = 0.0;
  for (std::size_t k = 0; k < kTerms; ++k) {
    sum += all.weights[k] * loss.values[k];
  }
  EXPECT_NEAR(loss.total.item<double>(), sum, 1e-5);
  EXPECT_EQ(loss.values[kBoundary], 0.0);
}

TEST(CosirLossTermsTest, ConditionsAtTheOriginGiveFiniteGradients) {
  for (const std::int64_t label_dim : {2, 5}) {
    World world{{label_dim, 16, true, true}};
    world.in.conditions = at::zeros({16, label_dim}).set_requires_grad(true);
    const LossOptions all{{1.0, 0.7, 0.3, 0.3, 0.3, 0.1}, 0.07, kSeed};
    const Loss loss = compute_loss(world.model, world.in, all);
    EXPECT_TRUE(loss.total.isfinite().item<bool>());
    for (const auto& g : torch::autograd::grad({loss.total}, leaves(world))) {
      EXPECT_TRUE(g.isfinite().all().item<bool>());
    }
  }
}

TEST(CosirLossTermsTest, PickedNeighbourDependsOnSeedIdAndEpochAlone) {
  const auto nearest = at::arange(60, at::kLong).view({20, 3});
  std::vector<std::int64_t> ids;
  for (std::int64_t i = 0; i < 20; ++i) {
    ids.push_back(i * i);
  }
  const auto a = pick_neighbours(nearest, ids, 1, 0);
  EXPECT_TRUE(a.equal(pick_neighbours(nearest, ids, 1, 0)));
  EXPECT_FALSE(a.equal(pick_neighbours(nearest, ids, 1, 1)));
  EXPECT_FALSE(a.equal(pick_neighbours(nearest, ids, 2, 0)));
  for (std::int64_t i = 0; i < 20; ++i) {
    EXPECT_EQ(a[i].item<std::int64_t>() / 3, i);
  }
}

TEST(CosirModelTest, DirectionsAreOrthonormal) {
  for (const std::int64_t label_dim : {2, 5, 24}) {
    const auto w = make_model({24, 24, 24, label_dim, false}, 1).direction_weight.to(at::kDouble);
    EXPECT_LT((at::matmul(w.t(), w) - at::eye(label_dim, at::kDouble)).abs().max().item<double>(),
              1e-6);
  }
}

TEST(CosirModelTest, NoStartTurnsTextsAround) {
  for (std::uint64_t seed = 0; seed < 1000; ++seed) {
    const auto model = make_model({4, 4, 4, 2, false}, seed);
    const auto one = at::ones({1});
    EXPECT_GT(turn(model, {one, one}).scale.item<float>(), 0.0F) << "seed " << seed;
  }
}

TEST(CosirModelTest, OutputsHaveNormOneAndIgnoreTheLengthOfTheText) {
  World world{{2, 30, false, false}};
  const auto out = modulate(world.model, world.in.text, world.in.conditions).out;
  EXPECT_LT((out.norm(2, 1) - 1.0).abs().max().item<double>(), 1e-5);
  const auto longer = modulate(world.model, world.in.text * 8.0, world.in.conditions).out;
  EXPECT_LT((out - longer).abs().max().item<double>(), 1e-6);
}

TEST(CosirModelTest, RefusesWidthsThatDoNotFit) {
  CosirConfig config;
  config.projections = "false";
  const auto refused = resolve_shape(config, 1280, 384);
  ASSERT_FALSE(refused.has_value());
  EXPECT_NE(refused.error().to_string().find("projections"), std::string::npos);
  config.projections = "auto";
  EXPECT_TRUE(resolve_shape(config, 1280, 384).or_throw().projections);
  EXPECT_EQ(resolve_shape(config, 1280, 384).or_throw().dim, 256);
  EXPECT_FALSE(resolve_shape(config, 512, 512).or_throw().projections);
  EXPECT_EQ(resolve_shape(config, 512, 512).or_throw().dim, 512);
  config.label_dim = 600;
  EXPECT_FALSE(resolve_shape(config, 512, 512).has_value());
}

}  // namespace
}  // namespace plimsoll::cosir
