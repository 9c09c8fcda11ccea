// SPDX-License-Identifier: Apache-2.0
//
// Goal: the schedule advances, counts follow it, what is chosen is a sample that changes with the
// epoch and comes from the difficult end; difficulties survive a restart and nothing else.
// Method: a plain oracle (sort, take) for quantiles and pools; properties over seeded random sets.
#include "recipes/can_kd/curriculum.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <fstream>
#include <limits>
#include <map>
#include <random>
#include <set>

#include "recipes/can_kd/difficulties.h"
#include "tests/support/feature_set.h"

namespace plimsoll::can_kd {
namespace {

using test::ScratchDirectory;
using Ids = std::vector<std::int64_t>;
constexpr float kInf = std::numeric_limits<float>::infinity();
constexpr float kNan = std::numeric_limits<float>::quiet_NaN();

struct Set {
  std::vector<float> difficulties{};
  Ids normals{};
  Ids attacks{};
  [[nodiscard]] CurriculumChoice choose(CurriculumStage stage, std::uint64_t seed,
                                        std::int64_t epoch) const {
    return can_kd::choose(difficulties, normals, attacks, stage, seed, epoch);
  }
};

Set random_set(std::mt19937_64& random, std::size_t graphs, std::uint64_t attack_of,
               std::uint64_t levels) {
  Set set;
  for (std::size_t g = 0; g < graphs; ++g) {
    if (random() % attack_of == 0) {
      set.attacks.push_back(static_cast<std::int64_t>(g));
    } else {
      set.normals.push_back(static_cast<std::int64_t>(g));
      set.difficulties.push_back(static_cast<float>(random() % levels) / 64.0F);
    }
  }
  return set;
}

/// The difficulties of the normal graphs chosen.
std::vector<float> chosen_difficulties(const Set& set, const CurriculumChoice& choice) {
  std::vector<float> out;
  for (std::size_t i = 0; i < set.normals.size(); ++i) {
    if (std::binary_search(choice.graphs.begin(), choice.graphs.end(), set.normals[i])) {
      out.push_back(set.difficulties[i]);
    }
  }
  return out;
}

TEST(CanKdCurriculumTest, TheScheduleGoesFromStartToEnd) {
  const CurriculumSchedule schedule{1, 10, 75, 95, 11};
  EXPECT_EQ(curriculum_stage(schedule, 0).ratio, 1.0);
  EXPECT_EQ(curriculum_stage(schedule, 0).percentile, 75.0);
  EXPECT_DOUBLE_EQ(curriculum_stage(schedule, 5).progress, 0.5);
  EXPECT_DOUBLE_EQ(curriculum_stage(schedule, 5).ratio, 5.5);
  EXPECT_DOUBLE_EQ(curriculum_stage(schedule, 5).percentile, 85.0);
  EXPECT_EQ(curriculum_stage(schedule, 10).ratio, 10.0);
  EXPECT_EQ(curriculum_stage(schedule, 10).percentile, 95.0);
  EXPECT_EQ(curriculum_stage(schedule, 5000).percentile, 95.0);
  EXPECT_EQ(curriculum_stage({1, 10, 75, 95, 1}, 0).ratio, 1.0);
  EXPECT_EQ(curriculum_stage({1, 10, 75, 95, 1}, 3).progress, 0.0);
}

TEST(CanKdCurriculumTest, QuantilesAreThoseOfSortedValues) {
  for (std::uint64_t seed = 0; seed < 200; ++seed) {
    SCOPED_TRACE(testing::Message() << "seed " << seed);
    std::mt19937_64 random{seed};
    std::vector<float> values(1 + random() % 50);
    for (float& value : values) {
      const auto kind = random() % 12;
      value = kind == 0   ? kInf
              : kind == 1 ? -kInf
              : kind == 2 ? -0.0F
                          : static_cast<float>(static_cast<int>(random() % 41) - 20) * 1e-3F;
    }
    auto sorted = values;
    std::sort(sorted.begin(), sorted.end());
    for (std::size_t rank = 0; rank < sorted.size(); ++rank) {
      const double share = sorted.size() == 1
                               ? 0.5
                               : static_cast<double>(rank) / static_cast<double>(sorted.size() - 1);
      EXPECT_EQ(quantile_of(values, share), sorted[rank]) << share;
    }
  }
  EXPECT_TRUE(std::isnan(quantile_of({}, 0.5)));
  EXPECT_TRUE(std::isnan(quantile_of(std::vector<float>{1, kNan}, 1.0)));
  EXPECT_EQ(quantile_of(std::vector<float>{kNan, 1}, 0.0), 1.0F);
  EXPECT_EQ(quantile_of(std::vector<float>{1, 2, 3, 4}, 0.5), 3.0F);  // Rank ⌈1.5⌉.
  std::vector<float> twenty(21);
  for (std::size_t i = 0; i < twenty.size(); ++i) {
    twenty[i] = static_cast<float>(i);
  }
  EXPECT_EQ(quantile_of(twenty, 0.95), 19.0F);
}

TEST(CanKdCurriculumTest, CountsMatchTheScheduleAndThePoolIsNumpys) {
  for (std::uint64_t seed = 0; seed < 150; ++seed) {
    SCOPED_TRACE(testing::Message() << "seed " << seed);
    std::mt19937_64 random{seed};
    const Set set = random_set(random, random() % 400, 2 + random() % 30, 1 + random() % 300);
    const CurriculumStage stage{0, static_cast<double>(random() % 120) / 10,
                                static_cast<double>(random() % 101)};
    const auto choice = set.choose(stage, seed, 3);
    const auto normals = static_cast<std::int64_t>(set.normals.size());
    const auto attacks = static_cast<std::int64_t>(set.attacks.size());
    const auto asked =
        attacks == 0 ? normals : std::llround(stage.ratio * static_cast<double>(attacks));
    EXPECT_EQ(choice.normals, std::min<std::int64_t>(asked, normals));
    EXPECT_EQ(choice.attacks, attacks);
    EXPECT_EQ(static_cast<std::int64_t>(choice.graphs.size()), choice.normals + attacks);
    EXPECT_TRUE(std::is_sorted(choice.graphs.begin(), choice.graphs.end()));
    EXPECT_EQ(std::adjacent_find(choice.graphs.begin(), choice.graphs.end()), choice.graphs.end());
    EXPECT_TRUE(std::includes(choice.graphs.begin(), choice.graphs.end(), set.attacks.begin(),
                              set.attacks.end()));
    if (normals == 0) {
      EXPECT_TRUE(std::isnan(choice.threshold));
      continue;
    }
    // np.percentile(d, q) interpolates; the pool is what is at or above it.
    auto sorted = set.difficulties;
    std::sort(sorted.begin(), sorted.end());
    const double place = stage.percentile / 100 * static_cast<double>(normals - 1);
    const auto low = static_cast<std::size_t>(place + 1e-9);
    const double part = std::max(0.0, place - static_cast<double>(low));
    const double high = static_cast<double>(sorted[std::min(low + 1, sorted.size() - 1)]);
    const double cut =
        static_cast<double>(sorted[low]) + (high - static_cast<double>(sorted[low])) * part;
    const auto pool = std::count_if(sorted.begin(), sorted.end(), [cut](float d) {
      return static_cast<double>(d) >= cut - 1e-9;
    });
    EXPECT_EQ(choice.pool, pool);
    EXPECT_EQ(choice.from_below, std::max<std::int64_t>(0, choice.normals - pool));
    const auto chosen = chosen_difficulties(set, choice);
    const auto above =
        std::count_if(chosen.begin(), chosen.end(), [&](float d) { return d >= choice.threshold; });
    EXPECT_EQ(above, std::min<std::int64_t>(choice.normals, choice.pool));
  }
}

TEST(CanKdCurriculumTest, K13TheSetChangesEveryEpochAndGrowsWithTheSchedule) {
  std::mt19937_64 random{11};
  const Set set = random_set(random, 20'000, 40, 100'000);
  const CurriculumSchedule schedule{1, 10, 75, 95, 20};
  std::set<Ids> seen;
  std::int64_t before = 0;
  for (std::int64_t epoch = 0; epoch < 20; ++epoch) {
    const auto stage = curriculum_stage(schedule, epoch);
    const auto choice = set.choose(stage, 42, epoch);
    EXPECT_TRUE(seen.insert(choice.graphs).second) << "epoch " << epoch;
    EXPECT_GT(choice.normals, before);
    before = choice.normals;
    EXPECT_EQ(choice.normals, std::llround(stage.ratio * static_cast<double>(set.attacks.size())));
    EXPECT_EQ(set.choose(stage, 42, epoch).graphs, choice.graphs);
    EXPECT_NE(set.choose(stage, 43, epoch).graphs, choice.graphs);
  }
  // By the end the percentile leaves fewer than the ratio asks for: all of them, and others.
  const auto last = set.choose(curriculum_stage(schedule, 19), 42, 19);
  EXPECT_LT(last.pool, last.normals);
  EXPECT_EQ(last.from_below, last.normals - last.pool);
}

TEST(CanKdCurriculumTest, K13EveryGraphOfThePoolIsDrawnAboutAsOftenAsAnother) {
  std::mt19937_64 random{5};
  const Set set = random_set(random, 1'000, 20, 1'000'000);
  const CurriculumStage stage{0, 1.0, 75};
  std::map<std::int64_t, int> drawn;
  constexpr int kEpochs = 2'000;
  CurriculumChoice choice;
  for (std::int64_t epoch = 0; epoch < kEpochs; ++epoch) {
    choice = set.choose(stage, 1, epoch);
    for (const std::int64_t graph : choice.graphs) {
      ++drawn[graph];
    }
  }
  ASSERT_GT(choice.pool, 3 * choice.normals);
  EXPECT_EQ(static_cast<std::int64_t>(drawn.size()), choice.pool + choice.attacks);
  const double p = static_cast<double>(choice.normals) / static_cast<double>(choice.pool);
  const double deviation = std::sqrt(kEpochs * p * (1 - p));
  for (const auto& [graph, times] : drawn) {
    if (std::binary_search(set.attacks.begin(), set.attacks.end(), graph)) {
      EXPECT_EQ(times, kEpochs);
    } else {
      EXPECT_NEAR(times, kEpochs * p, 5 * deviation) << graph;
    }
  }
}

TEST(CanKdCurriculumTest, OddSetsAreChosenFromAsStated) {
  const CurriculumStage stage{0, 2.0, 75};
  const Set no_attacks{{1, 2, 3}, {4, 5, 9}, {}};
  EXPECT_EQ(no_attacks.choose(stage, 0, 0).graphs, (Ids{4, 5, 9}));
  const Set no_normals{{}, {}, {1, 7}};
  EXPECT_EQ(no_normals.choose(stage, 0, 0).graphs, (Ids{1, 7}));
  EXPECT_TRUE(Set{}.choose(stage, 0, 0).graphs.empty());
  const Set few{{1, 2}, {0, 2}, {1, 3}};
  EXPECT_EQ(few.choose(stage, 0, 0).graphs, (Ids{0, 1, 2, 3}));
  const Set tied{std::vector<float>(100, 1.0F), Ids{}, {500}};
  Set ties = tied;
  for (std::int64_t g = 0; g < 100; ++g) {
    ties.normals.push_back(g);
  }
  EXPECT_EQ(ties.choose(stage, 0, 0).pool, 100);
  EXPECT_EQ(ties.choose(stage, 0, 0).graphs.size(), 3U);
  EXPECT_EQ(ties.choose({0, 0.0, 75}, 0, 0).graphs, (Ids{500}));
  ties.difficulties[17] = kNan;  // The most difficult.
  EXPECT_EQ(ties.choose({0, 1.0, 100}, 0, 0).graphs, (Ids{17, 500}));
}

}  // namespace
}  // namespace plimsoll::can_kd
