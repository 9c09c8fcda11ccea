// SPDX-License-Identifier: Apache-2.0
//
// From ranks to the figures people compare.
//
// Threads: see cosir_eval.h.   Memory: see cosir_eval.h.
#include "recipes/cosir/eval.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/zeros.h>
#include <c10/core/GradMode.h>
#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <nlohmann/json.hpp>
#include <numbers>

#include "base/check.h"
#include "plimsoll/sample_order.h"
#include "run/control.h"

namespace plimsoll::cosir {
namespace {

constexpr double kRadiusShare = 0.95;
constexpr std::int64_t kReadRows = 2048;  // Rows per request to a source.

nlohmann::ordered_json json_of(const Retrieval& r) {
  return {{"r1", r.r1},
          {"r5", r.r5},
          {"r10", r.r10},
          {"mean_rank", r.mean_rank},
          {"median_rank", r.median_rank},
          {"map", r.map}};
}

Retrieval difference(const Retrieval& x, const Retrieval& y) {
  return {x.r1 - y.r1,
          x.r5 - y.r5,
          x.r10 - y.r10,
          x.mean_rank - y.mean_rank,
          x.median_rank - y.median_rank,
          x.map - y.map};
}

double share_within(const std::vector<std::int32_t>& ranks, std::int32_t most) {
  const auto within =
      std::count_if(ranks.begin(), ranks.end(), [most](std::int32_t rank) { return rank <= most; });
  return 100.0 * static_cast<double>(within) / static_cast<double>(ranks.size());
}

void add_chance(const PairSource& source, Evaluation& result) {
  std::int64_t groups = 0;
  std::int64_t texts = 0;
  double sum = 0.0;
  for (std::int64_t i = 0; i < source.pairs; ++i) {
    ++texts;
    const bool last = i + 1 == source.pairs || source.group(i + 1) != source.group(i);
    if (last) {  // The best of k positives among N in a random order stands at (N+1)/(k+1).
      sum += static_cast<double>(source.pairs + 1) / static_cast<double>(texts + 1);
      texts = 0;
      ++groups;
    }
  }
  result.chance_t2i = static_cast<double>(groups + 1) / 2.0;
  result.chance_i2t = sum / static_cast<double>(groups);
}

// Mean rank of each training pair's own image among its batch's, under its own condition.
Result<double> train_mean_rank(const Model& model, const TrainedRows& trained,
                               const EvalOptions& options) {
  const std::int64_t rows = std::min({options.batch_rows, kTrainBatchRowsMax, trained.rows});
  if (rows < 2) {
    return 0.0;
  }
  const std::int64_t batches = std::min(options.train_batches, trained.rows / rows);
  const SampleOrder order{trained.rows, options.seed, 0};
  double sum = 0.0;
  for (std::int64_t b = 0; b < batches; ++b) {
    if (StopSignals::asked()) {
      return given_up("an evaluation");
    }
    std::vector<std::int64_t> ranks;
    for (std::int64_t i = 0; i < rows; ++i) {
      ranks.push_back(order.at(b * rows + i));
    }
    PLIMSOLL_TRY(const auto block, trained.read(ranks));
    const auto out = modulate(model, project_text(model, block.text), block.conditions).out;
    const auto image = kernels::normalize_rows(project_image(model, block.image));
    sum += diagonal_rank_sum(out, image);
  }
  return sum / static_cast<double>(batches * rows);
}

}  // namespace

Retrieval summarise(const std::vector<std::int32_t>& ranks, const std::vector<float>& precision) {
  if (ranks.empty()) {
    return {};
  }
  Retrieval r{share_within(ranks, 1), share_within(ranks, 5), share_within(ranks, 10), 0, 0, 0};
  const auto n = static_cast<double>(ranks.size());
  for (const std::int32_t rank : ranks) {
    r.mean_rank += rank / n;
  }
  for (const float p : precision) {
    r.map += static_cast<double>(p) / n;
  }
  std::vector<std::int32_t> sorted = ranks;
  const auto middle = static_cast<std::ptrdiff_t>(sorted.size() / 2);
  std::nth_element(sorted.begin(), sorted.begin() + middle, sorted.end());
  r.median_rank = sorted[static_cast<std::size_t>(middle)];
  if (sorted.size() % 2 == 0) {  // The mean of the two in the middle.
    r.median_rank =
        (r.median_rank + *std::max_element(sorted.begin(), sorted.begin() + middle)) / 2;
  }
  return r;
}

std::string Evaluation::to_json() const {
  nlohmann::ordered_json j;
  j["raw"] = {{"t2i", json_of(raw_t2i)}, {"i2t", json_of(raw_i2t)}};
  j["oracle"] = {{"t2i", json_of(oracle_t2i)}, {"i2t", json_of(oracle_i2t)}};
  j["diff"] = {{"t2i", json_of(difference(oracle_t2i, raw_t2i))},
               {"i2t", json_of(difference(oracle_i2t, raw_i2t))}};
  j["chance"] = {{"t2i", chance_t2i}, {"i2t", chance_i2t}};
  j["pairs"] = pairs;
  j["train_mean_rank"] = train_mean_rank;
  return j.dump();
}

std::string Evaluation::to_text() const {
  std::string text = fmt::format("{:<14}{:>8}{:>8}{:>8}{:>12}{:>9}{:>8}   {} held-out pairs\n", "",
                                 "R@1", "R@5", "R@10", "mean rank", "median", "mAP", pairs);
  const auto line = [&text](const char* name, const Retrieval& r) {
    text += fmt::format("{:<14}{:>7.1f}%{:>7.1f}%{:>7.1f}%{:>12.1f}{:>9.1f}{:>8.3f}\n", name, r.r1,
                        r.r5, r.r10, r.mean_rank, r.median_rank, r.map);
  };
  line("raw t2i", raw_t2i);
  line("raw i2t", raw_i2t);
  line("oracle t2i", oracle_t2i);
  line("oracle i2t", oracle_i2t);
  text += fmt::format("chance         mean rank {:.1f} t2i, {:.1f} i2t", chance_t2i, chance_i2t);
  if (train_mean_rank > 0) {
    text += fmt::format("; training batches' own mean rank {:.1f}", train_mean_rank);
  }
  return text;
}

at::Tensor polar_grid(std::int64_t angles, const std::vector<double>& radii,
                      std::int64_t label_dim) {
  const auto count = static_cast<std::int64_t>(radii.size()) * angles;
  auto grid = at::zeros({count, label_dim}, at::kFloat);
  auto* c = grid.data_ptr<float>();
  for (const double radius : radii) {
    for (std::int64_t k = 0; k < angles; ++k, c += label_dim) {
      const double angle =
          2.0 * std::numbers::pi * static_cast<double>(k) / static_cast<double>(angles);
      c[0] = static_cast<float>(radius * std::cos(angle));
      c[1] = static_cast<float>(radius * std::sin(angle));
    }
  }
  return grid;
}

Result<double> radius_quantile(const TrainedRows& trained, double share) {
  const std::int64_t n = std::min(trained.rows, kRadiusSample);
  if (n == 0) {
    return 0.0;
  }
  auto lengths = at::empty({n}, at::kFloat);
  auto* length = lengths.data_ptr<float>();
  for (std::int64_t begin = 0; begin < n; begin += kReadRows) {
    std::vector<std::int64_t> ranks;
    for (std::int64_t i = begin; i < std::min(n, begin + kReadRows); ++i) {
      ranks.push_back(n == trained.rows
                          ? i
                          : static_cast<std::int64_t>(static_cast<double>(i) *
                                                      static_cast<double>(trained.rows) /
                                                      static_cast<double>(n)));
    }
    PLIMSOLL_TRY(const auto c, trained.conditions(ranks));
    const auto radius = kernels::polar_coordinates(c).radius;
    std::copy_n(radius.const_data_ptr<float>(), ranks.size(), length + begin);
  }
  const auto at = static_cast<std::int64_t>(share * static_cast<double>(n - 1));
  std::nth_element(length, length + at, length + n);
  return static_cast<double>(length[at]);
}

Result<Evaluation> evaluate(const Model& model, const PairSource& held_out,
                            const TrainedRows& trained, const EvalOptions& options) {
  const c10::AutoGradMode off{false};
  Evaluation result;
  result.pairs = held_out.pairs;
  PLIMSOLL_TRY(result.train_mean_rank, train_mean_rank(model, trained, options));
  if (held_out.pairs == 0) {
    return result;
  }
  PLIMSOLL_TRY(const double r_max, radius_quantile(trained, kRadiusShare));
  const auto grid =
      polar_grid(options.angles, {r_max / 3.0, r_max * 2.0 / 3.0, r_max}, model.shape.label_dim);
  const TurnSet turns = turn_set(model, grid, /*raw_first=*/true);
  PLIMSOLL_TRY(const Ranks images, rank_images(model, held_out, turns));
  PLIMSOLL_TRY(const Ranks texts, rank_texts(model, held_out, turns));
  result.raw_t2i = summarise(images.first, images.first_precision);
  result.raw_i2t = summarise(texts.first, texts.first_precision);
  result.oracle_t2i = summarise(images.best, images.best_precision);
  result.oracle_i2t = summarise(texts.best, texts.best_precision);
  add_chance(held_out, result);
  return result;
}

}  // namespace plimsoll::cosir
