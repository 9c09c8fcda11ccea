// SPDX-License-Identifier: Apache-2.0
//
// Goal: every kernel of contrast.h equals the plain formula, in value and in gradient, and does not
// depend on the number of threads.
// Method: random inputs in float32 against plain operators in float64 under autograd.
#include "kernels/contrast.h"

#include <ATen/ATen.h>
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/Parallel.h>
#include <gtest/gtest.h>
#include <torch/csrc/autograd/autograd.h>

#include <algorithm>
#include <cmath>
#include <cstring>

#include "kernels/contrast_loops.h"
#include "kernels/reference.h"

namespace plimsoll::kernels {
namespace {

using TensorList = std::vector<at::Tensor>;

// Float32 leaves and their float64 twins.
struct Twins {
  TensorList fast;
  TensorList exact;
  void add(const at::Tensor& x) {
    fast.push_back(x.detach().clone().set_requires_grad(true));
    exact.push_back(x.detach().to(at::kDouble).set_requires_grad(true));
  }
};

at::Tensor normals(at::IntArrayRef shape, std::uint64_t seed, double scale = 1.0) {
  return at::randn(shape, at::detail::createCPUGenerator(seed), at::kFloat) * scale;
}

double gap(const at::Tensor& fast, const at::Tensor& exact) {
  const auto scale = std::max(exact.detach().abs().max().item<double>(), 1e-2);
  return (fast.detach().to(at::kDouble) - exact.detach()).abs().max().item<double>() / scale;
}

// Compares gradients of a fixed random weighting of both outputs.
void expect_same(const TensorList& fast, const TensorList& exact, const Twins& leaves,
                 double tolerance) {
  at::Tensor total_fast = at::zeros({}, at::kFloat);
  at::Tensor total_exact = at::zeros({}, at::kDouble);
  for (std::size_t k = 0; k < fast.size(); ++k) {
    EXPECT_LT(gap(fast[k], exact[k]), tolerance) << "output " << k;
    const auto weight = normals(fast[k].sizes(), 1000 + k);
    total_fast = total_fast + (fast[k] * weight).sum();
    total_exact = total_exact + (exact[k] * weight.to(at::kDouble)).sum();
  }
  const auto g_fast = torch::autograd::grad({total_fast}, leaves.fast);
  const auto g_exact = torch::autograd::grad({total_exact}, leaves.exact);
  for (std::size_t k = 0; k < g_fast.size(); ++k) {
    EXPECT_TRUE(g_fast[k].isfinite().all().item<bool>());
    EXPECT_LT(gap(g_fast[k], g_exact[k]), tolerance) << "gradient " << k;
  }
}

bool same_bits(const at::Tensor& x, const at::Tensor& y) {
  return x.sizes() == y.sizes() &&
         std::memcmp(x.const_data_ptr(), y.const_data_ptr(), x.nbytes()) == 0;
}

TEST(ContrastTest, NormalisesRowsAndTheirGradients) {
  for (const std::int64_t dim : {5, 16, 100, 512}) {
    Twins x;
    x.add(normals({37, dim}, 1));
    expect_same({normalize_rows(x.fast[0])}, {reference::unit(x.exact[0])}, x, 2e-5);
  }
}

TEST(ContrastTest, CombinesLikeTheFormulaForAnyWidthAndSign) {
  for (const std::int64_t dim : {7, 64, 512}) {
    Twins x;
    x.add(normals({40, dim}, 2, 3.0));
    x.add(normals({40, dim}, 3));
    x.add(normals({40}, 4));
    x.add(normals({40}, 5, 0.8));  // Some scales are negative: they turn the result around.
    const auto fast = rotate_toward(x.fast[0], x.fast[1], x.fast[2], x.fast[3]);
    const auto out = reference::combine(x.exact[0], x.exact[1], x.exact[2], x.exact[3]);
    // The scale cancels, so its gradient is 0 up to rounding: compared by size alone.
    Twins without{{x.fast[0], x.fast[1], x.fast[2]}, {x.exact[0], x.exact[1], x.exact[2]}};
    expect_same({fast.out, fast.unit}, {out, reference::unit(x.exact[0])}, without, 5e-5);
    const auto again = rotate_toward(x.fast[0], x.fast[1], x.fast[2], x.fast[3]);
    const auto g = torch::autograd::grad({(again.out * normals({40, dim}, 6)).sum()}, {x.fast[3]});
    EXPECT_LT(g[0].abs().max().item<double>(), 1e-3);
  }
}

TEST(ContrastTest, KeepsTextConstantWhenItIsNotTrained) {
  const auto text = normals({8, 16}, 2);
  const auto theta = normals({8}, 3).set_requires_grad(true);
  const auto made = rotate_toward(text, normals({8, 16}, 4), theta, at::ones({8}));
  EXPECT_FALSE(made.unit.requires_grad());
  EXPECT_TRUE(made.out.requires_grad());
}

TEST(ContrastTest, SurvivesTextsAndDirectionsOfLengthZero) {
  auto text = at::zeros({3, 16}).set_requires_grad(true);
  auto direct = at::zeros({3, 16}).set_requires_grad(true);
  auto theta = normals({3}, 1).set_requires_grad(true);
  auto scale = at::ones({3}).set_requires_grad(true);
  const auto made = rotate_toward(text, direct, theta, scale);
  EXPECT_TRUE(made.out.isfinite().all().item<bool>());
  for (const auto& g : torch::autograd::grad({made.out.sum()}, {text, direct, theta, scale})) {
    EXPECT_TRUE(g.isfinite().all().item<bool>());
  }
}

TEST(ContrastTest, PolarFormFollowsTheFormulaInAnyDimension) {
  for (const std::int64_t label_dim : {2, 3, 5, 128}) {
    Twins c;
    c.add(normals({50, label_dim}, 9));
    const auto fast = polar_coordinates(c.fast[0]);
    expect_same({fast.radius, fast.angle},
                {c.exact[0].square().sum(1).sqrt(), reference::angle(c.exact[0])}, c, 2e-5);
  }
}

TEST(ContrastTest, PolarFormHasNoGradientAtTheOrigin) {
  for (const std::int64_t label_dim : {2, 5}) {
    auto c = at::zeros({4, label_dim});
    c[1][0] = -2.0;  // On the axis, where ‖(c₁ …)‖ has no derivative.
    c.set_requires_grad(true);
    const auto made = polar_coordinates(c);
    const auto g = torch::autograd::grad({(made.radius + made.angle).sum()}, {c})[0];
    EXPECT_TRUE(g.isfinite().all().item<bool>());
    EXPECT_EQ(g[0].abs().sum().item<double>(), 0.0);
    EXPECT_FLOAT_EQ(g[1][0].item<float>(), -1.0F);
    EXPECT_FLOAT_EQ(g[1][1].item<float>(), label_dim == 2 ? -0.5F : 0.0F);
  }
}

at::Tensor group_list(std::int64_t rows, bool repeated) {
  auto groups = at::arange(rows, at::kLong);
  return repeated ? groups.div(3, "floor").roll(1, 0).contiguous() : groups;
}

TEST(ContrastTest, SymmetricNceEqualsTwoCrossEntropies) {
  for (const bool repeated : {false, true}) {
    for (const std::int64_t rows : {2, 5, 33, 130}) {
      for (const double temperature : {0.025, 0.07, 1.0}) {
        Twins x;
        x.add(reference::unit(normals({rows, 24}, 11)));
        x.add(reference::unit(normals({rows, 24}, 12)));
        const auto groups = group_list(rows, repeated);
        expect_same({symmetric_info_nce(x.fast[0], x.fast[1], groups, temperature)},
                    {reference::nce(x.exact[0], x.exact[1], groups, temperature)}, x, 2e-4);
      }
    }
  }
}

TEST(ContrastTest, SymmetricNceStaysFiniteAtTheSmallestTemperature) {
  // Every similarity −1 but one: the smallest sums there can be.
  auto out = at::zeros({4, 8});
  out.select(1, 0).fill_(1.0);
  auto image = -out.clone();
  out.set_requires_grad(true);
  const auto loss = symmetric_info_nce(out, image, group_list(4, false), 0.025);
  EXPECT_NEAR(loss.item<double>(), std::log(4.0), 1e-5);
  EXPECT_TRUE(torch::autograd::grad({loss}, {out})[0].isfinite().all().item<bool>());
}

TEST(ContrastTest, NeighboursEqualTheFullComparison) {
  for (const std::int64_t label_dim : {2, 5, 128}) {
    for (const std::int64_t rows : {2, 3, 4, 31, 32, 33, 200}) {
      const auto c = normals({rows, label_dim}, 21);
      const auto found = nearest_neighbors(c);
      const auto plain = reference::neighbours<float>(c);
      for (std::int64_t i = 0; i < rows; ++i) {
        const auto at_i = static_cast<std::size_t>(i);
        for (std::size_t k = 0; k < 3; ++k) {
          const auto expected =
              k < plain.nearest[at_i].size() ? plain.nearest[at_i][k] : std::int64_t{-1};
          EXPECT_EQ(found.nearest[i][static_cast<std::int64_t>(k)].item<std::int64_t>(), expected)
              << "row " << i << " of " << rows;
        }
        // Cosines near 1 differ by less than a rounding: compared by value, in double.
        const auto x = reference::unit(c.to(at::kDouble));
        const auto cosine = [&](std::int64_t j) { return (x[i] * x[j]).sum().item<double>(); };
        EXPECT_NEAR(cosine(found.best_angle[i].item<std::int64_t>()),
                    cosine(plain.best_angle[at_i]), 1e-6);
        EXPECT_NEAR(found.best_cosine[i].item<double>(), cosine(plain.best_angle[at_i]), 1e-6);
      }
    }
  }
}

TEST(ContrastTest, NeighboursPreferTheLowerIndexOnATie) {
  // All conditions equal: every distance is 0 and every cosine the same.
  const auto found = nearest_neighbors(at::ones({70, 2}));
  EXPECT_EQ(found.nearest[0][0].item<std::int64_t>(), 1);
  EXPECT_EQ(found.nearest[0][2].item<std::int64_t>(), 3);
  EXPECT_EQ(found.nearest[69][0].item<std::int64_t>(), 0);
  EXPECT_EQ(found.nearest[69][2].item<std::int64_t>(), 2);
  EXPECT_EQ(found.best_angle[0].item<std::int64_t>(), 1);
  EXPECT_EQ(found.best_angle[69].item<std::int64_t>(), 0);
}

TEST(ContrastTest, DeltaTermsEqualPlainCosinesAndLengths) {
  for (const std::int64_t dim : {5, 96}) {
    const std::int64_t rows = 40;
    const auto pairs0 = at::arange(rows, at::kLong).roll(7, 0).contiguous();
    const auto pairs1 =
        at::arange(rows, at::kLong).div(4, "floor").contiguous();  // Many choose one.
    Twins x;
    x.add(normals({rows, dim}, 31));
    x.add(normals({rows, dim}, 32));
    const auto fast = displacement_cosines(x.fast[0], x.fast[1], pairs0, pairs1);
    const auto delta = x.exact[0] - x.exact[1];
    expect_same(
        {fast.length, fast.cosine0, fast.cosine1},
        {delta.square().sum(1).sqrt(), reference::cosine(delta, delta.index_select(0, pairs0)),
         reference::cosine(delta, delta.index_select(0, pairs1))},
        x, 5e-5);
  }
}

TEST(ContrastTest, DeltaTermsOfEqualRowsHaveNoGradient) {
  auto out = at::ones({4, 16}).set_requires_grad(true);
  const auto pairs = at::tensor({1, 0, 3, 2}, at::kLong);
  const auto made = displacement_cosines(out, at::ones({4, 16}), pairs, at::Tensor{});
  EXPECT_FALSE(made.cosine1.defined());
  const auto g = torch::autograd::grad({(made.length + made.cosine0).sum()}, {out})[0];
  EXPECT_EQ(g.abs().max().item<double>(), 0.0);
}

TEST(ContrastTest, BitsDoNotDependOnTheNumberOfThreads) {
  const auto run = [](int threads) {
    at::set_num_threads(threads);
    const std::int64_t rows = 150;
    const auto text = normals({rows, 64}, 1);
    const auto c = normals({rows, 5}, 2).set_requires_grad(true);
    const auto found = nearest_neighbors(c);
    const auto made = rotate_toward(text, normals({rows, 64}, 3), polar_coordinates(c).angle,
                                    polar_coordinates(c).radius);
    const auto picked = found.nearest.select(1, 0).contiguous();
    const auto moved = displacement_cosines(made.out, made.unit, picked, found.best_angle);
    const auto part = moved.cosine0.sum() + moved.cosine1.sum() + moved.length.sum();
    auto s = normals({rows, rows}, 5, 0.1);
    auto parts = at::empty({row_blocks(rows), rows});
    auto rows_sum = at::empty({rows});
    auto columns_sum = at::empty({rows});
    auto diagonal = at::empty({rows}, at::kDouble);
    exponentiate(s.data_ptr<float>(), rows, 0.07F, parts.data_ptr<float>(),
                 rows_sum.data_ptr<float>(), columns_sum.data_ptr<float>(),
                 diagonal.data_ptr<double>());
    nce_gradient(s.data_ptr<float>(), rows, 0.07F, rows_sum.data_ptr<float>(),
                 columns_sum.data_ptr<float>());
    return TensorList{torch::autograd::grad({part}, {c})[0], found.nearest, s};
  };
  const auto one = run(1);
  const auto two = run(2);
  const auto three = run(3);
  for (std::size_t k = 0; k < one.size(); ++k) {
    EXPECT_TRUE(same_bits(one[k], two[k])) << k;
    EXPECT_TRUE(same_bits(one[k], three[k])) << k;
  }
}

}  // namespace
}  // namespace plimsoll::kernels
