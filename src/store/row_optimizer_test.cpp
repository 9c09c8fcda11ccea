// SPDX-License-Identifier: Apache-2.0
//
// Goal: the fused optimizers give the bits of a plain loop for every width and step count, and the
// numbers of torch.optim. Method: tests/support/embedding_oracle.h, and values from torch.
#include "store/row_optimizer.h"

#include <array>
#include <bit>
#include <cmath>
#include <limits>

#include "tests/support/embedding_table_fixture.h"

namespace plimsoll {
namespace {

using namespace test;

struct Stepper {
  explicit Stepper(const RowOptimizerOptions& options, std::int64_t dim)
      : step(options, corrections, dim) {}
  std::vector<AdamCorrection> corrections =
      std::vector<AdamCorrection>(RowOptimizerStep::kCorrections);
  RowOptimizerStep step;
};

TEST(RowOptimizerTest, GivesTheBitsOfAPlainLoopForEveryWidthAndStep) {
  const RowInit zeros{.kind = RowInitKind::kUniform, .scale = 1.0F};
  for (const auto kind : kRowOptimizers) {
    for (const float beta1 : {0.9F, 0.3F}) {
      for (const std::int64_t dim : {1, 2, 3, 7, 8, 9, 16, 31, 128, 300}) {
        const RowOptimizerOptions options{
            .kind = kind, .learning_rate = 0.05F, .beta1 = beta1, .weight_decay = 0.01F};
        EmbeddingOracle oracle(dim, options, zeros);
        Stepper stepper(options, dim);
        const auto width = static_cast<std::size_t>(dim);
        std::vector<float> values = oracle.row(3).weights;
        values.resize(3 * width + 1, 0.0F);
        std::mt19937_64 random(static_cast<std::uint64_t>(dim));
        for (std::uint32_t t = 0; t < 30; ++t) {
          const auto grad = random_floats(width, random);
          stepper.step.step(values.data(), values.data() + dim, grad.data(), t, 0.5);
          oracle.apply(std::vector<std::int64_t>{3}, grad, 0.5F);
        }
        const auto& row = oracle.row(3);
        for (std::size_t k = 0; k < width; ++k) {
          ASSERT_EQ(std::bit_cast<std::uint32_t>(values[k]),
                    std::bit_cast<std::uint32_t>(row.weights[k]))
              << optimizer_name(kind) << " dim " << dim << " beta1 " << beta1;
        }
        for (std::size_t k = 0; k < static_cast<std::size_t>(optimizer_slots(kind) > 0 ? dim : 0);
             ++k) {
          ASSERT_EQ(values[width + k], row.slot1[k]) << optimizer_name(kind);
        }
        if (kind == RowOptimizer::kRowAdagrad) {
          ASSERT_EQ(values[width], row.slot1[0]) << "dim " << dim;
        }
      }
    }
  }
}

TEST(RowOptimizerTest, CorrectionsGoOnBeyondTheTable) {
  const RowOptimizerOptions options{.learning_rate = 0.1F};
  Stepper stepper(options, 1);
  for (const std::uint32_t before : {0U, 1U, 1022U, 1023U, 1024U, 5000U, 1'000'000U}) {
    std::array<float, 3> values{1.0F, 0.5F, 0.25F};
    const float grad = 0.125F;
    stepper.step.step(values.data(), values.data() + 1, &grad, before, 1.0);
    const auto exact = adam_correction(options, std::int64_t{before} + 1);
    const double moment1 = 0.5 + (1 - 0.9) * (0.125 - 0.5);
    const double moment2 = 0.25 * 0.999 + 0.001 * 0.125 * 0.125;
    const double wanted = 1.0 - 0.1 / exact.bias1 * moment1 / (std::sqrt(moment2) / exact.root2);
    EXPECT_NEAR(values[0], wanted, 1e-5) << before;
  }
}

// Source: torch 2.13.0, foreach=False, three steps of AdamW, Adagrad, SGD, Adam and
// SparseAdam.
TEST(RowOptimizerTest, AgreesWithTorch) {
  constexpr std::array<float, 4> kStart{0.5F, -1.25F, 3.0F, 0.0078125F};
  constexpr std::array<std::array<float, 4>, 3> kGrads{
      {{0.1F, -0.2F, 0.3F, 1e-4F}, {0.5F, 0.25F, -0.125F, -2e-4F}, {-1.0F, 1e-6F, 0.75F, 3e-4F}}};
  const auto run = [&](const RowOptimizerOptions& options) {
    Stepper stepper(options, 4);
    std::vector<float> values(12, 0.0F);
    std::copy(kStart.begin(), kStart.end(), values.begin());
    for (std::uint32_t t = 0; t < 3; ++t) {
      stepper.step.step(values.data(), values.data() + 4, kGrads[t].data(), t, 1.0);
    }
    return values;
  };
  const auto expect = [](const std::vector<float>& got, const std::array<float, 4>& wanted) {
    for (std::size_t k = 0; k < 4; ++k) {
      EXPECT_NEAR(got[k], wanted[k], 4e-7F * std::max(1.0F, std::abs(wanted[k])));
    }
  };
  expect(run({.kind = RowOptimizer::kAdamW, .learning_rate = 0.01F, .weight_decay = 0.05F}),
         {0.483323574F, -1.2410202F, 2.97530961F, -0.00196149433F});
  expect(run({.kind = RowOptimizer::kAdagrad,
              .learning_rate = 0.01F,
              .epsilon = 1e-10F,
              .weight_decay = 0.05F}),
         {0.489025503F, -1.24392843F, 2.98051596F, -0.00304513238F});
  expect(run({.kind = RowOptimizer::kAdamWFresh, .learning_rate = 0.5F, .weight_decay = 0.05F}),
         {0.000617206097F, -1.66581118F, 2.29276586F, -0.480531573F});
  expect(run({.kind = RowOptimizer::kSgd, .learning_rate = 0.1F, .weight_decay = 0.05F}),
         {0.532887161F, -1.23641813F, 2.86296129F, 0.00767589686F});
  expect(run({.kind = RowOptimizer::kSgdMomentum,
              .learning_rate = 0.1F,
              .weight_decay = 0.05F,
              .momentum = 0.8F}),
         {0.472987205F, -1.21382821F, 2.79652119F, 0.00759038981F});
  expect(run({.kind = RowOptimizer::kAdam, .learning_rate = 0.01F, .weight_decay = 0.05F}),
         {0.48351568F, -1.2368387F, 2.97473693F, -0.00632135617F});
  // SparseAdam adds epsilon before it corrects the bias, where it weighs 1 ÷ sqrt(1 − beta2) as
  // much: a step is up to lr × 32 × epsilon ÷ |gradient| apart.
  const auto adam = run({.kind = RowOptimizer::kAdam, .learning_rate = 0.01F});
  const std::array<float, 4> sparse{0.484058946F, -1.24288523F, 2.97979617F, -0.00192962401F};
  for (std::size_t k = 0; k < 4; ++k) {
    const float apart = 32 * 1e-8F / std::abs(k == 1 ? 1e-6F : kGrads[0][k]);
    EXPECT_NEAR(adam[k], sparse[k], 3 * 0.01F * apart + 4e-7F) << k;
  }
}

TEST(RowOptimizerTest, RowAdagradDividesAWholeRowByOneNumber) {
  const RowOptimizerOptions options{
      .kind = RowOptimizer::kRowAdagrad, .learning_rate = 0.5F, .epsilon = 0.0F};
  Stepper stepper(options, 4);
  std::vector<float> values(5, 0.0F);
  const std::array<float, 4> grad{1.0F, -2.0F, 2.0F, 4.0F};  // Mean square 6.25, root 2.5.
  stepper.step.step(values.data(), values.data() + 4, grad.data(), 0, 1.0);
  EXPECT_EQ(values, (std::vector<float>{-0.2F, 0.4F, -0.4F, -0.8F, 6.25F}));
  stepper.step.step(values.data(), values.data() + 4, grad.data(), 1, 1.0);
  EXPECT_FLOAT_EQ(values[4], 12.5F);
  EXPECT_FLOAT_EQ(values[0], -0.2F - 0.5F / std::sqrt(12.5F));
}

TEST(RowOptimizerTest, FindsEveryValueThatIsNotFinite) {
  std::vector<float> values(67, std::numeric_limits<float>::max());
  EXPECT_TRUE(all_finite(values.data(), 67));
  for (std::size_t at = 0; at < values.size(); ++at) {
    for (const float bad :
         {std::numeric_limits<float>::infinity(), -std::numeric_limits<float>::infinity(),
          std::numeric_limits<float>::quiet_NaN()}) {
      auto some = values;
      some[at] = bad;
      EXPECT_FALSE(all_finite(some.data(), 67)) << at;
    }
  }
}

TEST(RowOptimizerTest, NamesANumberThatMakesNoSense) {
  EXPECT_TRUE(check_optimizer({}));
  const auto text = check_optimizer({.beta2 = 1.0F}).error().to_string();
  EXPECT_NE(text.find("optimizer.beta2 = 1"), std::string::npos) << text;
  EXPECT_FALSE(check_optimizer({.epsilon = -1.0F}));
  EXPECT_FALSE(check_optimizer({.momentum = 1.0F}));
  EXPECT_FALSE(check_optimizer({.weight_decay = std::numeric_limits<float>::quiet_NaN()}));
}

}  // namespace
}  // namespace plimsoll
