// SPDX-License-Identifier: Apache-2.0
//
// Goal: the next use of a page is the one a plain set of ticks names. Method: random adds and
// passes by seed, within the reach and beyond it.
#include "store/embedding_next_use.h"

#include <random>
#include <set>

#include <gtest/gtest.h>

namespace plimsoll {
namespace {

TEST(NextUseTest, NamesTheFirstOfTheTicksWithinItsReach) {
  for (const std::uint64_t seed : {1U, 2U, 3U}) {
    SCOPED_TRACE(seed);
    std::mt19937_64 random(seed);
    std::uint32_t tick = 0xFFFFF000U;  // Numbers may wrap; those of the plain set do not.
    std::uint64_t plain_tick = tick;
    NextUse next(tick);
    std::set<std::uint64_t> plain{plain_tick};
    for (int round = 0; round < 20'000; ++round) {
      if (random() % 2 == 0) {
        const auto step = random() % 12;
        tick += static_cast<std::uint32_t>(step);
        plain_tick += step;
        if (plain_tick - *plain.begin() <= NextUse::kReach) {
          plain.insert(plain_tick);
        }
        next.add(tick);
      } else {
        plain.erase(plain.begin());
        ASSERT_EQ(next.pass(), !plain.empty()) << "round " << round;
        if (plain.empty()) {
          tick += 1;
          plain_tick += 1;
          next = NextUse(tick);
          plain = {plain_tick};
        }
      }
      ASSERT_EQ(next.first(), static_cast<std::uint32_t>(*plain.begin())) << "round " << round;
    }
  }
}

}  // namespace
}  // namespace plimsoll
