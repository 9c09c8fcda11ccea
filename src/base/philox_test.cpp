// SPDX-License-Identifier: Apache-2.0
//
// Philox-4x32-10 against the authors' known answers (Random123, kat_vectors).
#include <gtest/gtest.h>

#include <cmath>
#include <set>

#include "base/philox.h"

namespace plimsoll {
namespace {

TEST(PhiloxTest, GivesTheKnownAnswers) {
  EXPECT_EQ(philox(0, 0, 0), (PhiloxBlock{0x6627e8d5, 0xe169c58d, 0xbc57ac4c, 0x9b00dbd8}));
  EXPECT_EQ(philox(~0ULL, ~0ULL, ~0ULL),
            (PhiloxBlock{0x408f276d, 0x41c83b0e, 0xa20bc7c6, 0x6d5451fd}));
  // The digits of pi: counter 243f6a88 85a308d3 13198a2e 03707344, key a4093822 299f31d0.
  EXPECT_EQ(philox(0x299f31d0a4093822ULL, 0x0370734413198a2eULL, 0x85a308d3243f6a88ULL),
            (PhiloxBlock{0xd16cfe09, 0x94fdcceb, 0x5001e420, 0x24126ea1}));
}

TEST(PhiloxTest, MakesUniformsThatAreNeverZeroNorOne) {
  EXPECT_GT(uniform01(0), 0.0F);
  EXPECT_LT(uniform01(UINT32_MAX), 1.0F);
  EXPECT_LT(uniform01(0), uniform01(1U << 9));
}

TEST(PhiloxTest, MakesNormalsOfMeanZeroAndVarianceOne) {
  constexpr std::uint64_t kSeed = 4;
  constexpr int kDraws = 100'000;
  double sum = 0;
  double squares = 0;
  for (std::uint64_t i = 0; i < kDraws / 4; ++i) {
    const auto words = philox(kSeed, 1, i);
    for (const auto pair : {normal2(words[0], words[1]), normal2(words[2], words[3])}) {
      for (const float x : pair) {
        sum += x;
        squares += static_cast<double>(x) * x;
      }
    }
  }
  EXPECT_NEAR(sum / kDraws, 0, 5 / std::sqrt(kDraws)) << "seed " << kSeed;
  EXPECT_NEAR(squares / kDraws, 1, 5 * std::sqrt(2.0 / kDraws)) << "seed " << kSeed;
}

TEST(PhiloxTest, MixesWithoutCollisionsAndPinned) {
  std::set<std::uint64_t> seen;
  for (std::uint64_t i = 0; i < 10'000; ++i) {
    seen.insert(mix64(i));
  }
  EXPECT_EQ(seen.size(), 10'000U);             // It is a bijection.
  EXPECT_EQ(mix64(0), 0xE220A8397B1DCDAFULL);  // splitmix64's first output from state 0.
}

}  // namespace
}  // namespace plimsoll
