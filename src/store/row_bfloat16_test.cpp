// SPDX-License-Identifier: Apache-2.0
//
// Goal: rounding to bfloat16 is exact where it can be, nearest or unbiased where it cannot, and a
// step of a bfloat16 record has the bits of a plain loop. Method: all bfloat16, all random numbers,
// and tests/support/embedding_oracle.h.
#include "store/row_bfloat16.h"

#include <algorithm>
#include <array>
#include <bit>
#include <cmath>
#include <limits>
#include <vector>

#include "base/bfloat16.h"
#include "store/row_init.h"
#include "store/row_record.h"
#include "tests/support/embedding_table_fixture.h"

namespace plimsoll {
namespace {

using namespace test;

constexpr float kInfinity = std::numeric_limits<float>::infinity();

TEST(Bfloat16Test, EveryValueComesBackHoweverItIsRounded) {
  for (std::uint32_t bits = 0; bits < 65536; ++bits) {
    const float value = widen_bfloat16(static_cast<std::uint16_t>(bits));
    if (std::isnan(value)) {
      EXPECT_TRUE(std::isnan(widen_bfloat16(nearest_bfloat16(value)))) << bits;
      EXPECT_TRUE(std::isnan(widen_bfloat16(stochastic_bfloat16(value, 65535)))) << bits;
      continue;
    }
    ASSERT_EQ(nearest_bfloat16(value), bits);
    for (const std::uint32_t random : {0U, 1U, 32768U, 65535U}) {
      ASSERT_EQ(stochastic_bfloat16(value, random), bits) << random;
    }
  }
}

TEST(Bfloat16Test, RoundsToTheNearerAndOfTwoAsNearToTheEven) {
  std::mt19937_64 random(11);
  for (int i = 0; i < 200'000; ++i) {
    auto bits = static_cast<std::uint32_t>(random());
    bits = i % 4 == 0 ? (bits & 0xFFFF0000U) | 0x8000U : bits;  // Half way.
    const auto value = std::bit_cast<float>(bits);
    if (!std::isnan(value)) {
      const float wanted = std::isinf(value) ? value : plain_nearest_bfloat16(value);
      ASSERT_EQ(std::bit_cast<std::uint32_t>(widen_bfloat16(nearest_bfloat16(value))),
                std::bit_cast<std::uint32_t>(wanted))
          << std::hex << bits;
    }
  }
  EXPECT_EQ(widen_bfloat16(nearest_bfloat16(std::numeric_limits<float>::max())), kInfinity);
  EXPECT_EQ(widen_bfloat16(nearest_bfloat16(1.00390625F)), 1.0F);  // Between 1 and 1 + 2⁻⁷.
  EXPECT_EQ(widen_bfloat16(nearest_bfloat16(1.01171875F)), 1.015625F);
}

// Exactly: over all random numbers the mean of the results is the value.
TEST(Bfloat16Test, IsUnbiasedOverAllRandomNumbers) {
  for (const float value : {1.0001F, -1.0001F, 3.14159F, -1e-20F, 1e-40F, 123456.7F}) {
    double sum = 0.0;
    for (std::uint32_t random = 0; random < 65536; ++random) {
      sum += static_cast<double>(widen_bfloat16(stochastic_bfloat16(value, random)));
    }
    EXPECT_DOUBLE_EQ(sum / 65536, static_cast<double>(value));
  }
}

TEST(RowBfloat16Test, GivesTheBitsOfPhiloxOneByOneForEveryWidth) {
  std::mt19937_64 random(3);
  for (const std::int64_t dim : {1, 2, 7, 8, 9, 63, 64, 65, 128, 200, 1000}) {
    const auto width = static_cast<std::size_t>(dim);
    for (const std::uint32_t sequence : {0U, 1U, 4'000'000'000U}) {
      const auto weights = random_floats(width, random);
      const auto id = static_cast<std::int64_t>(random());
      std::vector<std::uint16_t> stored(width + 1, 0xABCD);
      round_row_stochastic({rounding_seed(5), id, sequence}, weights.data(), dim, stored.data());
      EXPECT_EQ(stored[width], 0xABCD);
      for (std::size_t k = 0; k < width; ++k) {
        ASSERT_EQ(widen_bfloat16(stored[k]),
                  plain_stochastic_bfloat16(5, id, sequence, k, weights[k]))
            << "dim " << dim << " weight " << k;
      }
      std::vector<float> back(width);
      widen_row(stored.data(), dim, back.data());
      std::vector<std::uint16_t> nearest(width);
      round_row(weights.data(), dim, nearest.data());
      for (std::size_t k = 0; k < width; ++k) {
        ASSERT_EQ(back[k], widen_bfloat16(stored[k]));
        ASSERT_EQ(nearest[k], nearest_bfloat16(weights[k]));
      }
    }
  }
}

// Each random number takes part in one rounding: the mean over rows and steps is that of
// independent ones, within five of its standard deviations.
TEST(RowBfloat16Test, IsUnbiasedOverIdsAndSteps) {
  constexpr std::int64_t kDim = 128;
  constexpr double kStep = 0x1p-7;  // Between neighbours, from 1 to 2.
  for (const double part : {0.05, 0.5, 0.9}) {
    const std::vector<float> weights(kDim, static_cast<float>(1.0 + part * kStep));
    std::vector<std::uint16_t> stored(kDim);
    std::vector<double> of_weight(kDim, 0.0);
    double all = 0.0;
    constexpr int kTimes = 4000;
    for (int time = 0; time < kTimes; ++time) {
      round_row_stochastic({77, time / 20, static_cast<std::uint32_t>(time % 20)}, weights.data(),
                           kDim, stored.data());
      for (std::size_t k = 0; k < stored.size(); ++k) {
        const double up = widen_bfloat16(stored[k]) > 1.0F ? 1.0 : 0.0;
        of_weight[k] += up;
        all += up;
      }
    }
    const double deviation = std::sqrt(part * (1 - part));
    EXPECT_NEAR(all / (kTimes * kDim), part, 5 * deviation / std::sqrt(kTimes * kDim)) << part;
    for (const double ups : of_weight) {
      EXPECT_NEAR(ups / kTimes, part, 5 * deviation / std::sqrt(kTimes)) << part;
    }
  }
}

struct Record {
  Record(const TableShape& table_shape, const RowInit& init, std::int64_t id)
      : shape(table_shape), bytes(static_cast<std::size_t>(shape.record_bytes)) {
    init_record(shape, init, id, id, bytes.data());
  }
  [[nodiscard]] std::vector<float> values() const {
    std::vector<float> out(static_cast<std::size_t>(shape.floats()));
    read_values(shape, bytes.data(), out.data());
    return out;
  }
  TableShape shape;
  std::vector<std::byte> bytes;
};

TEST(RecordStepTest, GivesTheBitsOfAPlainLoopForEveryOptimizerAndWidth) {
  const RowInit init{.kind = RowInitKind::kUniform, .scale = 1.0F, .seed = 8};
  for (const auto kind : kRowOptimizers) {
    for (const std::int64_t dim : {1, 2, 3, 7, 8, 31, 128, 301}) {
      for (const auto dtype : {RowDType::kFloat32, RowDType::kBFloat16}) {
        const RowOptimizerOptions options{
            .kind = kind, .learning_rate = 0.05F, .weight_decay = 0.01F};
        EmbeddingOracle oracle(dim, options, init, dtype);
        const TableShape shape =
            table_shape(1, dim, optimizer_slots(kind), optimizer_row_slots(kind), dtype);
        std::vector<AdamCorrection> corrections(RowOptimizerStep::kCorrections);
        const RecordStep step(shape, init, options, corrections);
        Record record(shape, init, 3);
        std::vector<float> scratch(static_cast<std::size_t>(shape.scratch_floats()));
        std::mt19937_64 random(static_cast<std::uint64_t>(dim));
        for (int t = 0; t < 20; ++t) {
          const auto grad = random_floats(static_cast<std::size_t>(dim), random);
          step.step(record.bytes.data(), 3, grad.data(), 0.5, scratch.data());
          oracle.apply(std::vector<std::int64_t>{3}, grad, 0.5F);
        }
        const auto& row = oracle.row(3);
        std::vector<float> wanted = row.weights;
        const auto& one = row.slot1;
        wanted.insert(wanted.end(), one.begin(),
                      one.begin() + (shape.slots > 0 ? dim : shape.row_slots));
        wanted.insert(wanted.end(), row.slot2.begin(),
                      row.slot2.begin() + (shape.slots > 1 ? dim : 0));
        ASSERT_EQ(record.values(), wanted) << optimizer_name(kind) << " dim " << dim;
        RowHeader header;
        std::memcpy(&header, record.bytes.data(), sizeof header);
        EXPECT_EQ(header.sequence, 20U);
        if (dtype == RowDType::kBFloat16 && dim % 2 == 1) {  // Between weights and slots.
          const auto pad = static_cast<std::size_t>(kRowHeaderBytes + 2 * dim);
          EXPECT_EQ(record.bytes[pad], std::byte{0});
          EXPECT_EQ(record.bytes[pad + 1], std::byte{0});
        }
      }
    }
  }
}

// A step of a hundredth of the distance between neighbours, ten thousand times.
TEST(RecordStepTest, StepsTooSmallForBfloat16CountOnAverage) {
  constexpr std::int64_t kDim = 64;
  constexpr float kStep = 0x1p-7F / 100;
  const RowInit zeros{.kind = RowInitKind::kZeros};
  const TableShape shape = table_shape(1, kDim, 0, 0, RowDType::kBFloat16);
  std::vector<AdamCorrection> corrections(RowOptimizerStep::kCorrections);
  const RecordStep step(shape, zeros, {.kind = RowOptimizer::kSgd, .learning_rate = 1.0F},
                        corrections);
  Record record(shape, zeros, 9);
  const std::vector<float> ones(kDim, 1.0F);
  write_values(shape, 0, ones.data(), kDim, record.bytes.data());
  const std::vector<float> grad(kDim, -kStep);
  std::vector<float> scratch(kDim);
  constexpr int kSteps = 10'000;
  for (int t = 0; t < kSteps; ++t) {
    step.step(record.bytes.data(), 9, grad.data(), 1.0, scratch.data());
  }
  const auto values = record.values();
  double mean = 0.0;
  for (const float value : values) {
    mean += static_cast<double>(value) / kDim;
  }
  const double moved = static_cast<double>(kSteps) * static_cast<double>(kStep);  // 0.78
  // A walk of steps that are 0 or 2⁻⁷: its deviation, of the mean of 64 weights.
  const double deviation = 0x1p-7 * std::sqrt(kSteps * 0.01 * 0.99 / kDim);
  EXPECT_NEAR(mean, 1.0 + moved, 5 * deviation);
  EXPECT_EQ(nearest_bfloat16(1.0F + kStep), nearest_bfloat16(1.0F)) << "to the nearest: no step";
}

}  // namespace
}  // namespace plimsoll
