// SPDX-License-Identifier: Apache-2.0
//
// Two passes, text to image and image to text, over blocks of queries and blocks of the gallery.
//
// The right answer's own similarity is taken from the very block it is compared with, so that it
// counts itself exactly once and ties are ties to the last bit.
//
// Threads: see cosir_ranks.h.   Memory: see cosir_ranks.h.
#include "recipes/cosir/ranks.h"

#include <ATen/ops/arange.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/mm.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/zeros.h>
#include <c10/core/GradMode.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>

#include "base/check.h"
#include "kernels/contrast_loops.h"
#include "kernels/recall.h"
#include "run/control.h"

namespace plimsoll::cosir {
namespace {

float* values(const at::Tensor& x) {
  return x.data_ptr<float>();
}

std::vector<std::int64_t> range(std::int64_t begin, std::int64_t end) {
  std::vector<std::int64_t> list(static_cast<std::size_t>(end - begin));
  std::iota(list.begin(), list.end(), begin);
  return list;
}

// The pairs of a source seen as groups: where each begins, and which group a pair is in.
struct Groups {
  std::vector<std::int32_t> first;  // First pair of each group; one more entry at the end.
  std::vector<std::int32_t> of;     // Group of each pair.
  [[nodiscard]] std::int64_t size() const { return static_cast<std::int64_t>(first.size()) - 1; }
  [[nodiscard]] std::int64_t at(std::int64_t pair) const {
    return of[static_cast<std::size_t>(pair)];
  }
};

Groups find_groups(const PairSource& source) {
  Groups groups;
  for (std::int64_t i = 0; i < source.pairs; ++i) {
    if (i == 0 || source.group(i) != source.group(i - 1)) {
      groups.first.push_back(static_cast<std::int32_t>(i));
    }
    groups.of.push_back(static_cast<std::int32_t>(groups.first.size()) - 1);
  }
  groups.first.push_back(static_cast<std::int32_t>(source.pairs));
  return groups;
}

Result<at::Tensor> image_units(const Model& model, const PairSource& source,
                               const std::vector<std::int64_t>& pairs) {
  PLIMSOLL_TRY(const auto raw, source.images(pairs));
  return kernels::normalize_rows(project_image(model, raw));
}

// Texts of norm 1, and what each condition makes of them: sim = a·(t̂·img) + b·(p·img).
struct TurnedTexts {
  at::Tensor unit;  // [n, dim]
  at::Tensor a;     // f·cosθ, [K, n]
  at::Tensor b;     // f·sinθ, [K, n]
};

Result<TurnedTexts> turned_texts(const Model& model, const PairSource& source,
                                 const std::vector<std::int64_t>& pairs, const TurnSet& turns) {
  PLIMSOLL_TRY(const auto raw, source.texts(pairs));
  const auto text = project_text(model, raw).contiguous();
  const std::int64_t n = text.size(0);
  auto length = at::empty({n}, text.options());
  TurnedTexts made{at::empty_like(text), at::empty({turns.size(), n}, text.options()),
                   at::mm(turns.course, text.t())};
  kernels::unit_rows(values(text), n, text.size(1), values(made.unit), values(length));
  const auto squares = turns.course.square().sum(1);
  const float* lengths = values(length);
  for (std::int64_t k = 0; k < turns.size(); ++k) {
    const float course = values(squares)[k];
    const float cosine = values(turns.cosine)[k];
    const float sine = values(turns.sine)[k];
    const float scale = values(turns.scale)[k];
    float* a = values(made.a) + k * n;
    float* b = values(made.b) + k * n;
    for (std::int64_t j = 0; j < n; ++j) {
      if (turns.raw_first && k == 0) {
        a[j] = 1.0F;
        b[j] = 0.0F;
        continue;
      }
      const float t = lengths[j];
      const float unit = t > kernels::kNormFloor ? 1.0F : t / kernels::kNormFloor;  // ‖t̂‖
      const float along = b[j] / std::max(t, kernels::kNormFloor);                  // t̂·p
      const float square =
          cosine * cosine * unit * unit + 2.0F * cosine * sine * along + sine * sine * course;
      const float v = std::sqrt(std::max(0.0F, square));
      const float u_by = 1.0F / std::max(v, kernels::kNormFloor);
      const float stretch = scale * t;
      const float x = std::fabs(stretch) * v * u_by;
      const float f = stretch / std::max(x, kernels::kNormFloor) * u_by;
      a[j] = f * cosine;
      b[j] = f * sine;
    }
  }
  return made;
}

TurnSet slice(const TurnSet& turns, std::int64_t begin, std::int64_t count) {
  return {turns.course.narrow(0, begin, count), turns.cosine.narrow(0, begin, count),
          turns.sine.narrow(0, begin, count), turns.scale.narrow(0, begin, count),
          turns.raw_first && begin == 0};
}

// Calls body(begin, end) for blocks of a gallery; `begin` is a multiple of kGalleryBlock.
template <class F>
Result<void> for_gallery(std::int64_t from, std::int64_t to, std::int64_t size, const F& body) {
  for (std::int64_t begin = from / kGalleryBlock * kGalleryBlock; begin < to;
       begin += kGalleryBlock) {
    if (StopSignals::asked()) {
      return given_up("an evaluation");
    }
    PLIMSOLL_TRY_VOID(body(begin, std::min(size, begin + kGalleryBlock)));
  }
  return {};
}

// Folds the ranks of one query under a block of conditions into the result.
struct Fold {
  Ranks& ranks;
  bool first_block;
  void rank(std::int64_t query, std::int64_t k, std::int32_t rank) const {
    auto& best = ranks.best[static_cast<std::size_t>(query)];
    best = std::min(best, rank);
    if (first_block && k == 0) {
      auto& first = ranks.first[static_cast<std::size_t>(query)];
      first = std::min(first, rank);
    }
  }
  void precision(std::int64_t query, std::int64_t k, float precision) const {
    auto& best = ranks.best_precision[static_cast<std::size_t>(query)];
    best = std::max(best, precision);
    if (first_block && k == 0) {
      ranks.first_precision[static_cast<std::size_t>(query)] = precision;
    }
  }
};

Ranks empty_ranks(std::int64_t queries) {
  const auto n = static_cast<std::size_t>(queries);
  constexpr auto kLast = std::numeric_limits<std::int32_t>::max();
  return {std::vector<std::int32_t>(n, kLast), std::vector<std::int32_t>(n, kLast),
          std::vector<float>(n, 0.0F), std::vector<float>(n, 0.0F)};
}

// A block of texts looking for images: their turned forms, the similarity of each to its own image
// under each condition, and how many images reach it.
struct TextQueries {
  TurnedTexts texts;
  at::Tensor least;  // [queries, K]
  at::Tensor ranks;  // int32 [queries, K]
  std::int64_t count{0};
  std::int64_t queries{0};

  [[nodiscard]] float a(std::int64_t q, std::int64_t k) const {
    return values(texts.a)[k * queries + q];
  }
  [[nodiscard]] float b(std::int64_t q, std::int64_t k) const {
    return values(texts.b)[k * queries + q];
  }
  // Takes query q's own similarities from column j of a gallery block.
  void take_own(std::int64_t q, std::int64_t j, const at::Tensor& s, const at::Tensor& p) {
    const std::int64_t width = s.size(1);
    for (std::int64_t k = 0; k < count; ++k) {
      values(least)[q * count + k] =
          a(q, k) * values(s)[q * width + j] + b(q, k) * values(p)[k * width + j];
    }
  }
  void count_block(const at::Tensor& s, const at::Tensor& p) {
    kernels::count_turned_queries({queries, s.size(1), count, values(s), values(p), values(texts.a),
                                   values(texts.b), values(least)},
                                  ranks.data_ptr<std::int32_t>());
  }
};

Result<void> image_block(const Model& model, const PairSource& source, const Groups& groups,
                         const TurnSet& turns, std::int64_t q0, std::int64_t q1, const Fold& fold) {
  TextQueries all;
  all.queries = q1 - q0;
  all.count = turns.size();
  PLIMSOLL_TRY(all.texts, turned_texts(model, source, range(q0, q1), turns));
  all.least = at::empty({all.queries, all.count}, at::kFloat);
  all.ranks = at::zeros({all.queries, all.count}, at::kInt);
  at::Tensor s;
  at::Tensor p;
  const auto load_block = [&](std::int64_t begin, std::int64_t end) -> Result<void> {
    const std::vector<std::int64_t> pairs(groups.first.begin() + begin, groups.first.begin() + end);
    s = p = at::Tensor{};  // Before the next block is made.
    PLIMSOLL_TRY(const auto images, image_units(model, source, pairs));
    s = at::mm(all.texts.unit, images.t());
    p = at::mm(turns.course, images.t());
    return {};
  };
  const auto own = [&](std::int64_t q) { return groups.at(q0 + q); };

  const auto take_own = [&](std::int64_t begin, std::int64_t end) -> Result<void> {
    PLIMSOLL_TRY_VOID(load_block(begin, end));
    for (std::int64_t q = 0; q < all.queries; ++q) {
      if (own(q) >= begin && own(q) < end) {
        all.take_own(q, own(q) - begin, s, p);
      }
    }
    return {};
  };
  PLIMSOLL_TRY_VOID(for_gallery(own(0), own(all.queries - 1) + 1, groups.size(), take_own));
  const auto count_all = [&](std::int64_t begin, std::int64_t end) -> Result<void> {
    PLIMSOLL_TRY_VOID(load_block(begin, end));
    all.count_block(s, p);
    return {};
  };
  PLIMSOLL_TRY_VOID(for_gallery(0, groups.size(), groups.size(), count_all));
  for (std::int64_t q = 0; q < all.queries; ++q) {
    for (std::int64_t k = 0; k < all.count; ++k) {
      const std::int32_t rank = all.ranks.data_ptr<std::int32_t>()[q * all.count + k];
      fold.rank(q0 + q, k, rank);
      fold.precision(q0 + q, k, 1.0F / static_cast<float>(rank));
    }
  }
  return {};
}

// Sums of precisions of the image whose texts are being visited, one per condition. An image's
// texts may lie in two query blocks.
struct OpenImage {
  std::int64_t group{-1};
  std::vector<float> sums;
};

// A block of images, one per text of theirs, looking for texts.
struct ImageQueries {
  at::Tensor images;  // Of norm 1, [queries, dim].
  at::Tensor p;       // p·img, [queries, K]
  at::Tensor least;   // [queries, K]
  at::Tensor ranks;   // int32 [2, queries, K]: among all texts, and among the image's own.
  std::int64_t first{0};
  std::int64_t queries{0};
  std::int64_t count{0};

  [[nodiscard]] std::int32_t* all() const { return ranks.data_ptr<std::int32_t>(); }
  [[nodiscard]] std::int32_t* same() const { return all() + queries * count; }

  void take_own(std::int64_t q, std::int64_t j, const at::Tensor& s, const TurnedTexts& texts) {
    const std::int64_t width = s.size(1);
    for (std::int64_t k = 0; k < count; ++k) {
      values(least)[q * count + k] = values(texts.a)[k * width + j] * values(s)[q * width + j] +
                                     values(texts.b)[k * width + j] * values(p)[q * count + k];
    }
  }
  void count_block(const Groups& groups, std::int64_t begin, const at::Tensor& s,
                   const TurnedTexts& texts) {
    const std::int64_t width = s.size(1);
    const auto within = [&](std::int32_t pair) {
      return std::clamp<std::int64_t>(pair - begin, 0, width);
    };
    std::vector<std::int64_t> low;
    std::vector<std::int64_t> high;
    for (std::int64_t q = 0; q < queries; ++q) {
      const auto group = static_cast<std::size_t>(groups.at(first + q));
      low.push_back(within(groups.first[group]));
      high.push_back(within(groups.first[group + 1]));
    }
    kernels::count_turned_gallery({queries, width, count, values(s), values(p), values(texts.a),
                                   values(texts.b), values(least), low.data(), high.data()},
                                  all(), same());
  }
};

// Folds the ranks of a block's texts into their images'. Precisions are complete with the image's
// last text.
void fold_images(const ImageQueries& block, const Groups& groups, const Fold& fold,
                 OpenImage& open) {
  for (std::int64_t q = 0; q < block.queries; ++q) {
    const std::int64_t group = groups.at(block.first + q);
    const auto at_group = static_cast<std::size_t>(group);
    if (group != open.group) {
      open.group = group;
      open.sums.assign(static_cast<std::size_t>(block.count), 0.0F);
    }
    const bool complete = block.first + q + 1 == groups.first[at_group + 1];
    const auto texts = static_cast<float>(groups.first[at_group + 1] - groups.first[at_group]);
    for (std::int64_t k = 0; k < block.count; ++k) {
      const std::int64_t at = q * block.count + k;
      auto& sum = open.sums[static_cast<std::size_t>(k)];
      sum += static_cast<float>(block.same()[at]) / static_cast<float>(block.all()[at]);
      fold.rank(group, k, block.all()[at]);
      if (complete) {
        fold.precision(group, k, sum / texts);
      }
    }
  }
}

Result<void> text_block(const Model& model, const PairSource& source, const Groups& groups,
                        const TurnSet& turns, std::int64_t q0, std::int64_t q1, const Fold& fold,
                        OpenImage& open) {
  ImageQueries block;
  block.first = q0;
  block.queries = q1 - q0;
  block.count = turns.size();
  std::vector<std::int64_t> firsts;
  for (std::int64_t q = q0; q < q1; ++q) {
    firsts.push_back(groups.first[static_cast<std::size_t>(groups.at(q))]);
  }
  PLIMSOLL_TRY(block.images, image_units(model, source, firsts));
  block.p = at::mm(block.images, turns.course.t());
  block.least = at::empty({block.queries, block.count}, at::kFloat);
  block.ranks = at::zeros({2, block.queries, block.count}, at::kInt);
  TurnedTexts texts;
  at::Tensor s;
  const auto load_block = [&](std::int64_t begin, std::int64_t end) -> Result<void> {
    texts = TurnedTexts{};
    s = at::Tensor{};
    PLIMSOLL_TRY(texts, turned_texts(model, source, range(begin, end), turns));
    s = at::mm(block.images, texts.unit.t());
    return {};
  };

  const auto take_own = [&](std::int64_t begin, std::int64_t end) -> Result<void> {
    PLIMSOLL_TRY_VOID(load_block(begin, end));
    for (std::int64_t q = 0; q < block.queries; ++q) {
      if (q0 + q >= begin && q0 + q < end) {
        block.take_own(q, q0 + q - begin, s, texts);
      }
    }
    return {};
  };
  PLIMSOLL_TRY_VOID(for_gallery(q0, q1, source.pairs, take_own));
  const auto count_all = [&](std::int64_t begin, std::int64_t end) -> Result<void> {
    PLIMSOLL_TRY_VOID(load_block(begin, end));
    block.count_block(groups, begin, s, texts);
    return {};
  };
  PLIMSOLL_TRY_VOID(for_gallery(0, source.pairs, source.pairs, count_all));
  fold_images(block, groups, fold, open);
  return {};
}

}  // namespace

TurnSet turn_set(const Model& model, const at::Tensor& conditions, bool raw_first) {
  const c10::AutoGradMode off{false};
  const Turn by = turn(model, kernels::polar_coordinates(conditions));
  TurnSet set{kernels::normalize_rows(direction(model, conditions)), by.theta.cos(), by.theta.sin(),
              by.scale.contiguous(), raw_first};
  if (raw_first) {
    const auto one = at::ones({1}, at::kFloat);
    set.course = at::cat({at::zeros({1, set.course.size(1)}, at::kFloat), set.course});
    set.cosine = at::cat({one, set.cosine});
    set.sine = at::cat({one - 1.0, set.sine});
    set.scale = at::cat({one, set.scale});
  }
  return set;
}

Result<Ranks> rank_images(const Model& model, const PairSource& source, const TurnSet& turns) {
  const c10::AutoGradMode off{false};
  const Groups groups = find_groups(source);
  Ranks ranks = empty_ranks(source.pairs);
  for (std::int64_t k0 = 0; k0 < turns.size(); k0 += kConditionBlock) {
    const auto part = slice(turns, k0, std::min(kConditionBlock, turns.size() - k0));
    for (std::int64_t q0 = 0; q0 < source.pairs; q0 += kQueryBlock) {
      PLIMSOLL_TRY_VOID(image_block(model, source, groups, part, q0,
                                    std::min(source.pairs, q0 + kQueryBlock),
                                    Fold{ranks, k0 == 0}));
    }
  }
  return ranks;
}

Result<Ranks> rank_texts(const Model& model, const PairSource& source, const TurnSet& turns) {
  const c10::AutoGradMode off{false};
  const Groups groups = find_groups(source);
  Ranks ranks = empty_ranks(groups.size());
  for (std::int64_t k0 = 0; k0 < turns.size(); k0 += kConditionBlock) {
    const auto part = slice(turns, k0, std::min(kConditionBlock, turns.size() - k0));
    OpenImage open;
    for (std::int64_t q0 = 0; q0 < source.pairs; q0 += kQueryBlock) {
      PLIMSOLL_TRY_VOID(text_block(model, source, groups, part, q0,
                                   std::min(source.pairs, q0 + kQueryBlock), Fold{ranks, k0 == 0},
                                   open));
    }
  }
  return ranks;
}

double diagonal_rank_sum(const at::Tensor& a, const at::Tensor& b) {
  const c10::AutoGradMode off{false};
  const std::int64_t n = a.size(0);
  double sum = 0.0;
  for (std::int64_t begin = 0; begin < n; begin += kQueryBlock) {
    const std::int64_t rows = std::min(kQueryBlock, n - begin);
    const auto s = at::mm(a.narrow(0, begin, rows), b.t());
    const auto own = at::arange(begin, begin + rows, at::kLong);
    sum += kernels::recall_ranks(s, own).sum().item<double>();
  }
  return sum;
}

}  // namespace plimsoll::cosir
