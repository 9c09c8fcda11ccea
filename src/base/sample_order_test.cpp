// SPDX-License-Identifier: Apache-2.0
//
// Goal: an order is a permutation, invertible, spread evenly, and the same for ever.
// Method: exhaustive checks for many sizes, frequency counts over epochs, and pinned values.
#include <gtest/gtest.h>

#include <cstdlib>
#include <vector>

#include "base/philox.h"
#include "plimsoll/sample_order.h"

namespace plimsoll {
namespace {

void expect_permutation(std::int64_t samples, std::uint64_t seed, std::int64_t epoch) {
  SCOPED_TRACE(testing::Message() << samples << " samples, seed " << seed << ", epoch " << epoch);
  const SampleOrder order(samples, seed, epoch);
  ASSERT_EQ(order.samples(), samples);
  std::vector<bool> seen(static_cast<std::size_t>(samples));
  for (std::int64_t p = 0; p < samples; ++p) {
    const std::int64_t sample = order.at(p);
    ASSERT_GE(sample, 0);
    ASSERT_LT(sample, samples);
    ASSERT_FALSE(seen[static_cast<std::size_t>(sample)]) << "position " << p;
    seen[static_cast<std::size_t>(sample)] = true;
    ASSERT_EQ(order.position_of(sample), p);
  }
}

TEST(SampleOrderTest, VisitsEverySampleOnceAndCanBeInverted) {
  for (std::int64_t samples = 0; samples <= 1100; ++samples) {
    expect_permutation(samples, 7, samples % 5);
  }
  for (const std::int64_t samples : {65535, 65536, 65537, 1'000'003}) {
    expect_permutation(samples, 123, 2);
  }
}

TEST(SampleOrderTest, InvertsInVeryLargeSets) {
  for (const std::int64_t samples : {(1LL << 40) + 12345, (1LL << 61) + 1, 1LL << 62}) {
    const SampleOrder order(samples, 5, 9);
    for (std::uint64_t i = 0; i < 2000; ++i) {
      const auto words = philox(99, 0, i);
      const auto wide = static_cast<std::uint64_t>(words[0]) << 32 | words[1];
      const auto position = static_cast<std::int64_t>(wide % static_cast<std::uint64_t>(samples));
      ASSERT_EQ(order.position_of(order.at(position)), position) << samples;
      ASSERT_EQ(order.at(order.position_of(position)), position) << samples;
    }
  }
}

TEST(SampleOrderTest, NeverChanges) {
  // Runs on disk resume by these values: a failure here means that old runs cannot be resumed.
  const auto head = [](const SampleOrder& order) {
    std::vector<std::int64_t> first;
    for (std::int64_t p = 0; p < 6 && p < order.samples(); ++p) {
      first.push_back(order.at(p));
    }
    return first;
  };
  using Samples = std::vector<std::int64_t>;
  EXPECT_EQ(head(SampleOrder(3, 0, 0)), (Samples{2, 0, 1}));
  EXPECT_EQ(head(SampleOrder(1000, 7, 0)), (Samples{687, 37, 448, 954, 256, 58}));
  EXPECT_EQ(head(SampleOrder(1000, 7, 1)), (Samples{805, 970, 780, 531, 873, 246}));
  EXPECT_EQ(head(SampleOrder(40'000'000, 1, 3)),
            (Samples{36064089, 31755491, 38155896, 37136464, 38657767, 34769203}));
}

TEST(SampleOrderTest, DiffersBySeedAndByEpoch) {
  const SampleOrder base(100'000, 1, 1);
  for (const SampleOrder& other : {SampleOrder(100'000, 2, 1), SampleOrder(100'000, 1, 2)}) {
    int same = 0;
    for (std::int64_t p = 0; p < base.samples(); ++p) {
      same += base.at(p) == other.at(p) ? 1 : 0;
    }
    EXPECT_LT(same, 12);  // Two random permutations share one place on average.
  }
}

// Pearson's statistic over a grid of (where it stood, what stood there), divided by its freedom.
double unevenness(const std::vector<double>& counts, std::size_t side) {
  double total = 0;
  for (const double count : counts) {
    total += count;
  }
  const double expected = total / static_cast<double>(counts.size());
  double sum = 0;
  for (const double count : counts) {
    sum += (count - expected) * (count - expected) / expected;
  }
  return sum / static_cast<double>((side - 1) * (side - 1));
}

TEST(SampleOrderTest, IsEvenOverEpochsForTinySets) {
  constexpr std::int64_t kEpochs = 20'000;
  for (const std::int64_t samples : {2, 3, 4, 5, 7, 8, 12, 16, 33}) {
    const auto side = static_cast<std::size_t>(samples);
    std::vector<double> counts(side * side);
    for (std::int64_t epoch = 0; epoch < kEpochs; ++epoch) {
      const SampleOrder order(samples, 17, epoch);
      for (std::int64_t p = 0; p < samples; ++p) {
        counts[static_cast<std::size_t>(p * samples + order.at(p))] += 1;
      }
    }
    // With so few degrees of freedom as two or three samples have, four sigma reach far.
    EXPECT_LT(unevenness(counts, side), samples < 4 ? 32.0 : 1.8) << samples << " samples";
  }
}

TEST(SampleOrderTest, SpreadsNeighboursOverTheWholeSet) {
  constexpr std::size_t kSide = 16;
  for (const std::int64_t samples : {65'539, 100'000, 262'144}) {
    const SampleOrder order(samples, 3, 0);
    std::vector<double> places(kSide * kSide);
    std::vector<double> pairs(kSide * kSide);
    std::int64_t adjacent = 0;
    const auto part = [&](std::int64_t x) {
      return static_cast<std::size_t>(x) * kSide / static_cast<std::size_t>(samples);
    };
    for (std::int64_t p = 0; p + 1 < samples; ++p) {
      places[part(p) * kSide + part(order.at(p))] += 1;
      pairs[part(order.at(p)) * kSide + part(order.at(p + 1))] += 1;
      adjacent += std::abs(order.at(p + 1) - order.at(p)) == 1 ? 1 : 0;
    }
    EXPECT_LT(unevenness(places, kSide), 1.45) << samples;  // 5 sigma above 1.
    EXPECT_LT(unevenness(pairs, kSide), 1.45) << samples;
    EXPECT_LE(adjacent, 12) << samples;  // Two on average.
  }
}

}  // namespace
}  // namespace plimsoll
