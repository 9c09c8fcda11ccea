// SPDX-License-Identifier: Apache-2.0
//
// C15: the original evaluation sorted similarities per condition and held features it never used.
// Goal: the peak of an evaluation depends neither on the number of conditions nor on the gallery.
// Method: features computed when asked for, so that the arena holds the evaluation's own alone.
#include <gtest/gtest.h>

#include "plimsoll/torch.h"
#include "recipes/cosir/eval.h"

namespace plimsoll::cosir {
namespace {

constexpr std::int64_t kDim = 64;

at::Tensor features(const std::vector<std::int64_t>& rows, std::uint64_t stream) {
  return random_normal({static_cast<std::int64_t>(rows.size()), kDim}, 1.0, stream,
                       static_cast<std::uint64_t>(rows.front()));
}

std::int64_t peak_of(std::int64_t pairs, std::int64_t conditions) {
  const Model model = make_model({kDim, kDim, kDim, 2, false}, 1);
  PairSource source;
  source.pairs = pairs;
  source.group = [](std::int64_t pair) { return pair; };
  source.images = [](const auto& rows) -> Result<at::Tensor> { return features(rows, 1); };
  source.texts = [](const auto& rows) -> Result<at::Tensor> { return features(rows, 2); };
  const auto turns = turn_set(model, polar_grid(conditions, {1.0}, 2), true);
  const std::int64_t held = TensorArena::stats().live_bytes;
  TensorArena::reset_peak();
  const auto images = rank_images(model, source, turns).or_throw();
  const auto texts = rank_texts(model, source, turns).or_throw();
  EXPECT_EQ(images.best.size(), static_cast<std::size_t>(pairs));
  EXPECT_EQ(texts.best.size(), static_cast<std::size_t>(pairs));
  return TensorArena::stats().live_peak_bytes - held;
}

TEST(CosirC15Test, PeakOfAnEvaluationGrowsNeitherWithConditionsNorWithTheGallery) {
  TensorArena::install().or_throw();
  auto governor = Governor::create({.memory_limit = "4GiB"}).or_throw();
  TensorArena::attach(governor).or_throw();
  const std::int64_t usual = peak_of(2 * kGalleryBlock, kConditionBlock - 1);
  EXPECT_GT(usual, kQueryBlock * kGalleryBlock * 4);  // It was measured at all.
  constexpr std::int64_t kSlack = 256 << 10;          // A tail block may round to another class.
  EXPECT_LE(peak_of(4 * kGalleryBlock, kConditionBlock - 1), usual + kSlack);
  EXPECT_LE(peak_of(2 * kGalleryBlock, 3 * kConditionBlock), usual + kSlack);
  TensorArena::detach();
}

}  // namespace
}  // namespace plimsoll::cosir
