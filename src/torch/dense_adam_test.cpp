// SPDX-License-Identifier: Apache-2.0
#include "torch/dense_adam.h"

#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include <cmath>

namespace plimsoll {
namespace {

at::Tensor waves(std::int64_t n, double phase) {
  return (at::arange(n, at::kFloat) * 0.37 + phase).sin();
}

class DenseAdamDecay : public ::testing::TestWithParam<bool> {};

TEST_P(DenseAdamDecay, FollowsTheFormulaForManySteps) {
  const bool decoupled = GetParam();
  const DenseAdamOptions options{0.01, 0.9, 0.999, 1e-8, 0.05, decoupled};
  auto x = waves(50, 0.1);
  auto exact = x.to(at::kDouble);
  auto first = at::zeros({50}, at::kDouble);
  auto second = at::zeros({50}, at::kDouble);
  DenseAdam optimizer({{"x", x}}, options);
  for (int step = 1; step <= 20; ++step) {
    const auto g = waves(50, step);
    const double scale = 1.0 / step;
    optimizer.step({g}, scale);
    auto e = g.to(at::kDouble);
    const double rate = options.learning_rate * scale;
    if (decoupled) {
      exact = exact * (1.0 - rate * options.weight_decay);
    } else {
      e = e + exact * options.weight_decay;
    }
    first = first * 0.9 + e * 0.1;
    second = second * 0.999 + e * e * 0.001;
    exact = exact - rate * (first / (1.0 - std::pow(0.9, step))) /
                        ((second / (1.0 - std::pow(0.999, step))).sqrt() + 1e-8);
  }
  EXPECT_LT((x.to(at::kDouble) - exact).abs().max().item<double>(), 1e-6);
}

INSTANTIATE_TEST_SUITE_P(Both, DenseAdamDecay, ::testing::Bool(),
                         [](const auto& which) { return which.param ? "AdamW" : "Adam"; });

TEST(DenseAdamTest, GoesOnFromItsStateAsIfItHadNeverStopped) {
  auto x = waves(20, 0.1);
  DenseAdam one({{"x", x}}, {});
  one.step({waves(20, 1)}, 1.0);
  auto y = x.clone();
  DenseAdam two({{"x", y}}, {});
  const auto from = one.state();
  const auto to = two.state();
  ASSERT_EQ(from.size(), 3U);
  for (std::size_t k = 0; k < from.size(); ++k) {
    EXPECT_EQ(from[k].name, to[k].name);
    to[k].tensor.copy_(from[k].tensor);
  }
  one.step({waves(20, 2)}, 0.5);
  two.step({waves(20, 2)}, 0.5);
  EXPECT_TRUE(x.equal(y));
}

TEST(DenseAdamTest, NoParametersIsNoWork) {
  DenseAdam none({}, {});
  none.step({}, 1.0);
  EXPECT_TRUE(none.state().empty());
}

}  // namespace
}  // namespace plimsoll
