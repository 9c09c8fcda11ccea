// SPDX-License-Identifier: Apache-2.0
//
// Threads: see curves.h.   Memory: see curves.h.
#include "recipes/can_kd/curves.h"

#include <algorithm>
#include <cmath>
#include <limits>

#include "base/check.h"
#include "recipes/can_kd/ordered_float.h"

namespace plimsoll::can_kd {
namespace {

constexpr std::uint32_t kNanIsLowest = 0;

double rate(std::int64_t part, std::int64_t whole) {
  return static_cast<double>(part) / static_cast<double>(whole);
}

/// The points `point_of` makes of the steps, thinned to `points_max`; `first` precedes them.
template <class PointOf>
std::vector<CurvePoint> walk(const Ranking& ranking, const PointOf& point_of,
                             const CurvePoint* first, std::int64_t points_max) {
  PLIMSOLL_CHECK(points_max >= 2, "a curve has at least two points");
  std::int64_t points = 0;
  double length = 0.0;  // |Δx| + |Δy| along the exact curve.
  const auto each = [&](auto&& visit) {
    CurvePoint before{};
    bool any = false;
    const auto see = [&](const CurvePoint& point) {
      visit(point, any ? std::abs(point.x - before.x) + std::abs(point.y - before.y) : 0.0);
      before = point;
      any = true;
    };
    if (first != nullptr) {
      see(*first);
    }
    for (RankStep step; ranking.advance(step);) {
      see(point_of(step));
    }
  };
  each([&](const CurvePoint& /*point*/, double moved) {
    ++points;
    length += moved;
  });
  std::vector<CurvePoint> out;
  out.reserve(static_cast<std::size_t>(std::min(points, points_max)));
  const bool all = points <= points_max;
  const double spacing = length / static_cast<double>(points_max - 1);
  std::int64_t seen = 0;
  double travelled = 0.0;
  double mark = 0.0;
  each([&](const CurvePoint& point, double moved) {
    ++seen;
    travelled += moved;
    const bool room = static_cast<std::int64_t>(out.size()) < points_max - 1;
    if (all || seen == points || (room && travelled >= mark)) {
      out.push_back(point);
      mark = spacing > 0.0 ? (std::floor(travelled / spacing) + 1.0) * spacing : length;
    }
  });
  return out;
}

}  // namespace

Ranking::Ranking(std::span<const float> scores, std::span<const std::uint8_t> labels) {
  PLIMSOLL_CHECK(scores.size() == labels.size(), "every score has a label");
  PLIMSOLL_CHECK(scores.size() <= std::size_t{1} << 31, "areas are summed in 64 bits");
  keys_.reserve(scores.size());
  for (std::size_t i = 0; i < scores.size(); ++i) {
    PLIMSOLL_CHECK(labels[i] <= 1, "a label is 0 or 1");
    const std::uint64_t falling = ~ordered_bits(scores[i], kNanIsLowest);
    keys_.push_back(falling << 32 | labels[i]);
    attacks_ += labels[i];
  }
  std::sort(keys_.begin(), keys_.end());
}

bool Ranking::advance(RankStep& step) const noexcept {
  if (step.next >= keys_.size()) {
    return false;
  }
  const std::uint64_t falling = keys_[step.next] >> 32;
  step.score = from_ordered_bits(~static_cast<std::uint32_t>(falling));
  for (; step.next < keys_.size() && keys_[step.next] >> 32 == falling; ++step.next) {
    const auto attack = static_cast<std::int64_t>(keys_[step.next] & 1U);
    step.tp += attack;
    step.fp += 1 - attack;
  }
  return true;
}

std::vector<CurvePoint> roc_curve(std::span<const float> scores,
                                  std::span<const std::uint8_t> labels, std::int64_t points_max) {
  const Ranking ranking{scores, labels};
  if (ranking.attacks() == 0 || ranking.normals() == 0) {
    return {};
  }
  const CurvePoint none{0.0, 0.0, std::numeric_limits<double>::infinity()};
  const auto point_of = [&ranking](const RankStep& step) {
    return CurvePoint{rate(step.fp, ranking.normals()), rate(step.tp, ranking.attacks()),
                      static_cast<double>(step.score)};
  };
  return walk(ranking, point_of, &none, points_max);
}

std::vector<CurvePoint> pr_curve(std::span<const float> scores,
                                 std::span<const std::uint8_t> labels, std::int64_t points_max) {
  const Ranking ranking{scores, labels};
  if (ranking.attacks() == 0) {
    return {};
  }
  const auto point_of = [&ranking](const RankStep& step) {
    return CurvePoint{rate(step.tp, ranking.attacks()), rate(step.tp, step.tp + step.fp),
                      static_cast<double>(step.score)};
  };
  // Beyond full recall precision only falls: those thresholds are no use to anyone, yet exact.
  return walk(ranking, point_of, nullptr, points_max);
}

}  // namespace plimsoll::can_kd
