// SPDX-License-Identifier: Apache-2.0
//
// Goal: counted ranks equal the definition, in both directions, with groups and with ties.
// Method: every pair of text and image compared in float64 by plain operators.
#include "recipes/cosir/eval.h"

#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include <cmath>
#include <nlohmann/json.hpp>

#include "kernels/reference.h"

namespace plimsoll::cosir {
namespace {

constexpr std::uint64_t kSeed = 3;

// A source over two tensors and a group per pair.
PairSource source_of(const at::Tensor& images, const at::Tensor& texts,
                     const std::vector<std::int64_t>& groups) {
  const auto pick = [](const at::Tensor& from) {
    return [from](const std::vector<std::int64_t>& rows) -> Result<at::Tensor> {
      return from.index_select(0, at::tensor(rows, at::kLong));
    };
  };
  return {static_cast<std::int64_t>(groups.size()),
          [groups](std::int64_t pair) { return groups[static_cast<std::size_t>(pair)]; },
          pick(images), pick(texts)};
}

struct World {
  Model model;
  std::vector<std::int64_t> groups;
  at::Tensor images, texts;  // [n, width]; the pairs of a group share an image.

  World(std::int64_t n, std::int64_t group_size, bool projections)
      : model(make_model({projections ? 20 : 16, 16, 16, 3, projections}, kSeed)),
        texts(random_normal({n, 16}, 2.0, kSeed, 51)) {
    for (std::int64_t i = 0; i < n; ++i) {
      groups.push_back(7 + i / group_size * 10);
    }
    const auto each = random_normal({n, projections ? 20 : 16}, 1.0, kSeed, 50);
    std::vector<std::int64_t> first;
    for (std::int64_t i = 0; i < n; ++i) {
      first.push_back(i / group_size * group_size);
    }
    images = each.index_select(0, at::tensor(first, at::kLong));
    if (!projections) {  // Some of the image shows in the text, so that ranks are not all alike.
      texts = texts + 2.0 * images;
    }
  }
  [[nodiscard]] PairSource source() const { return source_of(images, texts, groups); }
};

// Similarity of every text (row) to every pair's image, under raw or a condition, in float64.
at::Tensor similarity(const World& w, const at::Tensor* condition) {
  const auto image = project_image(w.model, w.images).detach().to(at::kDouble);
  const auto text = project_text(w.model, w.texts).detach().to(at::kDouble);
  auto out = kernels::reference::unit(text);
  if (condition != nullptr) {
    const auto by = turn(w.model, kernels::polar_coordinates(*condition));
    const auto n = text.size(0);
    out = kernels::reference::combine(
        text, direction(w.model, *condition).detach().to(at::kDouble).expand({n, -1}),
        by.theta.detach().to(at::kDouble).expand({n}),
        by.scale.detach().to(at::kDouble).expand({n}));
  }
  return at::matmul(out, kernels::reference::unit(image).t());
}

// The range of ranks that rounding to float32 leaves open.
struct Bounds {
  std::int32_t low{1 << 30};
  std::int32_t high{1 << 30};
  void take(std::int32_t l, std::int32_t h) {
    low = std::min(low, l);
    high = std::min(high, h);
  }
};

constexpr double kRounding = 2e-6;

void expect_ranks(const World& w, const at::Tensor& conditions) {
  const auto turns = turn_set(w.model, conditions, true);
  const auto images = rank_images(w.model, w.source(), turns).or_throw();
  const auto texts = rank_texts(w.model, w.source(), turns).or_throw();
  const auto n = static_cast<std::int64_t>(w.groups.size());
  std::vector<std::int64_t> first;  // First pair of each group.
  for (std::int64_t i = 0; i < n; ++i) {
    if (i == 0 ||
        w.groups[static_cast<std::size_t>(i)] != w.groups[static_cast<std::size_t>(i - 1)]) {
      first.push_back(i);
    }
  }
  std::vector<Bounds> image_best(static_cast<std::size_t>(n));
  std::vector<Bounds> text_best(first.size());
  for (std::int64_t k = -1; k < conditions.size(0); ++k) {
    const auto condition = k < 0 ? at::Tensor{} : conditions.narrow(0, k, 1);
    const auto s = similarity(w, k < 0 ? nullptr : &condition).contiguous();
    const auto* at_s = s.data_ptr<double>();
    for (std::int64_t i = 0; i < n; ++i) {
      const auto group = static_cast<std::size_t>(std::upper_bound(first.begin(), first.end(), i) -
                                                  first.begin() - 1);
      const double own = at_s[i * n + first[group]];
      Bounds image;
      Bounds text;
      std::int32_t above[2][2] = {};
      for (const std::int64_t j : first) {
        above[0][0] += j != first[group] && at_s[i * n + j] >= own + kRounding ? 1 : 0;
        above[0][1] += j != first[group] && at_s[i * n + j] >= own - kRounding ? 1 : 0;
      }
      for (std::int64_t j = 0; j < n; ++j) {
        above[1][0] += j != i && at_s[j * n + first[group]] >= own + kRounding ? 1 : 0;
        above[1][1] += j != i && at_s[j * n + first[group]] >= own - kRounding ? 1 : 0;
      }
      image.take(1 + above[0][0], 1 + above[0][1]);
      text.take(1 + above[1][0], 1 + above[1][1]);
      image_best[static_cast<std::size_t>(i)].take(image.low, image.high);
      text_best[group].take(text.low, text.high);
      if (k < 0) {
        EXPECT_LE(image.low, images.first[static_cast<std::size_t>(i)]);
        EXPECT_GE(image.high, images.first[static_cast<std::size_t>(i)]);
      }
    }
    if (k < 0) {
      for (std::size_t g = 0; g < first.size(); ++g) {
        EXPECT_LE(text_best[g].low, texts.first[g]);
        EXPECT_GE(text_best[g].high, texts.first[g]);
      }
    }
  }
  for (std::size_t i = 0; i < image_best.size(); ++i) {
    EXPECT_LE(image_best[i].low, images.best[i]) << "text " << i;
    EXPECT_GE(image_best[i].high, images.best[i]) << "text " << i;
    EXPECT_FLOAT_EQ(images.best_precision[i], 1.0F / static_cast<float>(images.best[i]));
  }
  for (std::size_t g = 0; g < text_best.size(); ++g) {
    EXPECT_LE(text_best[g].low, texts.best[g]) << "image " << g;
    EXPECT_GE(text_best[g].high, texts.best[g]) << "image " << g;
  }
}

TEST(CosirEvalTest, RanksEqualTheDefinitionForAnyGrouping) {
  for (const bool projections : {false, true}) {
    for (const std::int64_t group_size : {1, 5}) {
      const World w{60, group_size, projections};
      expect_ranks(w, polar_grid(4, {0.5, 3.0}, 3));
    }
  }
}

TEST(CosirEvalTest, RanksEqualTheDefinitionAcrossBlockBorders) {
  const World w{kQueryBlock + 37, 3, false};  // 549 is no multiple of 3: a group is cut short.
  expect_ranks(w, polar_grid(2, {1.0}, 3));
}

TEST(CosirEvalTest, ManyConditionsAreTakenInBlocks) {
  const World w{20, 2, false};
  expect_ranks(w, polar_grid(kConditionBlock + 9, {2.0}, 3));
}

// Rows of four ones among eight places: norm 2, so every similarity is an exact quarter.
at::Tensor exact_rows(std::initializer_list<std::initializer_list<int>> ones) {
  auto x = at::zeros({static_cast<std::int64_t>(ones.size()), 8});
  std::int64_t row = 0;
  for (const auto& places : ones) {
    for (const int place : places) {
      x[row][place] = 1.0;
    }
    ++row;
  }
  return x;
}

TEST(CosirEvalTest, TiesCountAgainstTheRightAnswer) {
  const auto images = exact_rows({{0, 1, 2, 3}, {0, 1, 2, 3}, {0, 1, 4, 5}, {4, 5, 6, 7}});
  const auto texts = images.clone();
  const auto model = make_model({8, 8, 8, 2, false}, kSeed);
  const auto source = source_of(images, texts, {0, 1, 2, 3});
  const auto raw = turn_set(model, at::zeros({1, 2}), true);
  const auto to_image = rank_images(model, source, raw).or_throw();
  const auto to_text = rank_texts(model, source, raw).or_throw();
  // Images 0 and 1 are equal: each stands behind the other.
  EXPECT_EQ(to_image.first, (std::vector<std::int32_t>{2, 2, 1, 1}));
  EXPECT_EQ(to_text.first, (std::vector<std::int32_t>{2, 2, 1, 1}));
}

TEST(CosirEvalTest, AveragePrecisionCoversAllTextsOfAnImage) {
  // Image A has texts at places 1 and 3 of four, image B at 1 and 2 (similarities 1, ¾, ½, ¼ …).
  const auto images = exact_rows({{0, 1, 2, 3}, {0, 1, 2, 3}, {4, 5, 6, 7}, {4, 5, 6, 7}});
  const auto texts = exact_rows({{0, 1, 2, 3}, {0, 4, 5, 6}, {4, 5, 6, 7}, {0, 1, 4, 5}});
  const auto model = make_model({8, 8, 8, 2, false}, kSeed);
  const auto source = source_of(images, texts, {5, 5, 9, 9});
  const auto ranks = rank_texts(model, source, turn_set(model, at::zeros({1, 2}), true)).or_throw();
  // To A: 1, ¼, 0, ½. Its texts stand at 1 and 3: AP = (1/1 + 2/3) / 2.
  // To B: 0, ¾, 1, ½. Its texts stand at 1 and 3: the same.
  EXPECT_EQ(ranks.first, (std::vector<std::int32_t>{1, 1}));
  EXPECT_FLOAT_EQ(ranks.first_precision[0], (1.0F + 2.0F / 3.0F) / 2.0F);
  EXPECT_FLOAT_EQ(ranks.first_precision[1], (1.0F + 2.0F / 3.0F) / 2.0F);
}

TEST(CosirEvalTest, SummarisesRanksAsDefined) {
  const auto r = summarise({1, 3, 7, 20}, {1.0F, 0.5F, 0.25F, 0.25F});
  EXPECT_DOUBLE_EQ(r.r1, 25.0);
  EXPECT_DOUBLE_EQ(r.r5, 50.0);
  EXPECT_DOUBLE_EQ(r.r10, 75.0);
  EXPECT_DOUBLE_EQ(r.mean_rank, 7.75);
  EXPECT_DOUBLE_EQ(r.median_rank, 5.0);
  EXPECT_DOUBLE_EQ(r.map, 0.5);
  EXPECT_DOUBLE_EQ(summarise({4, 1, 9}, {0, 0, 0}).median_rank, 4.0);
}

TEST(CosirEvalTest, DiagonalRanksCountWhatIsAtLeastAsSimilar) {
  const auto a = exact_rows({{0, 1, 2, 3}, {4, 5, 6, 7}, {0, 1, 4, 5}});
  auto b = a.clone();
  EXPECT_DOUBLE_EQ(diagonal_rank_sum(a, b), 3.0);
  b[2] = a[0];  // Ties with row 0, and is no longer what row 2 looks for.
  EXPECT_DOUBLE_EQ(diagonal_rank_sum(a, b), 2.0 + 1.0 + 3.0);
}

TrainedRows trained_of(const World& w, const at::Tensor& conditions) {
  const auto pick = [](const at::Tensor& x, const std::vector<std::int64_t>& rows) {
    return x.index_select(0, at::tensor(rows, at::kLong));
  };
  TrainedRows trained;
  trained.rows = conditions.size(0);
  trained.conditions = [=](const auto& rows) -> Result<at::Tensor> {
    return pick(conditions, rows);
  };
  trained.read = [=, images = w.images,
                  texts = w.texts](const auto& rows) -> Result<TrainedRows::Block> {
    return TrainedRows::Block{pick(images, rows), pick(texts, rows), pick(conditions, rows)};
  };
  return trained;
}

TEST(CosirEvalTest, EvaluationKnowsChanceAndItsJsonHasEveryKey) {
  const World w{60, 5, false};
  const auto c = random_normal({60, 3}, 1.0, kSeed, 60);
  const auto result =
      evaluate(w.model, w.source(), trained_of(w, c), {.angles = 12, .batch_rows = 20}).or_throw();
  EXPECT_DOUBLE_EQ(result.chance_t2i, 6.5);
  EXPECT_NEAR(result.chance_i2t, 61.0 / 6.0, 1e-9);
  EXPECT_LE(result.oracle_t2i.mean_rank, result.raw_t2i.mean_rank);
  EXPECT_GE(result.oracle_i2t.r1, result.raw_i2t.r1);
  EXPECT_GE(result.train_mean_rank, 1.0);
  EXPECT_LE(result.train_mean_rank, 20.0);
  const auto j = nlohmann::json::parse(result.to_json());
  for (const char* side : {"raw", "oracle", "diff"}) {
    for (const char* way : {"t2i", "i2t"}) {
      for (const char* key : {"r1", "r5", "r10", "mean_rank", "median_rank", "map"}) {
        EXPECT_TRUE(j.at(side).at(way).at(key).is_number());
      }
    }
  }
  EXPECT_EQ(j.at("pairs"), 60);
  EXPECT_DOUBLE_EQ(j.at("diff").at("t2i").at("mean_rank"),
                   result.oracle_t2i.mean_rank - result.raw_t2i.mean_rank);
}

TEST(CosirEvalTest, NoHeldOutPairsIsNoError) {
  const World w{20, 1, false};
  auto source = w.source();
  source.pairs = 0;
  const auto result =
      evaluate(w.model, source, trained_of(w, at::ones({20, 3})), {.batch_rows = 10}).or_throw();
  EXPECT_EQ(result.pairs, 0);
  EXPECT_GE(result.train_mean_rank, 1.0);
}

TEST(CosirEvalTest, RadiusQuantileIsTheValueAtItsPlace) {
  const World w{101, 1, false};
  auto c = at::zeros({101, 3});
  c.select(1, 2).copy_(at::arange(101, at::kFloat).flip(0));
  EXPECT_DOUBLE_EQ(radius_quantile(trained_of(w, c), 0.95).or_throw(), 95.0);
  EXPECT_DOUBLE_EQ(radius_quantile(trained_of(w, c), 0.5).or_throw(), 50.0);
}

TEST(CosirEvalTest, PolarGridGoesRoundThePlaneOfTheFirstTwoAxes) {
  const auto grid = polar_grid(4, {1.0, 2.0}, 5);
  EXPECT_EQ(grid.size(0), 8);
  EXPECT_NEAR(grid[1][1].item<double>(), 1.0, 1e-6);
  EXPECT_NEAR(grid[6][0].item<double>(), -2.0, 1e-6);
  EXPECT_EQ(grid.narrow(1, 2, 3).abs().max().item<double>(), 0.0);
}

}  // namespace
}  // namespace plimsoll::cosir
