// SPDX-License-Identifier: Apache-2.0
//
// ROC and precision-recall curves, and the ranking under every figure of scores.h.
//
// Reading order: scores.h, this file.
//
// Threads: pure functions; a Ranking is immutable.
// Memory:  a Ranking 8 bytes a graph; a curve 24 bytes a point.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

namespace plimsoll::can_kd {

/// One threshold: how many attacks and normal graphs have this score or a higher one.
struct RankStep {
  std::size_t next{0};  ///< Where the scores below begin.
  float score{0};       ///< NaN before the first, and of scores that are NaN.
  std::int64_t tp{0};
  std::int64_t fp{0};
};

/// Scores in descending order, equal ones together; −0 is 0, NaN is below −infinity.
class Ranking {
 public:
  /// Requires: as many labels (0 or 1) as scores, at most 2^31.
  Ranking(std::span<const float> scores, std::span<const std::uint8_t> labels);

  [[nodiscard]] std::int64_t attacks() const noexcept { return attacks_; }
  [[nodiscard]] std::int64_t normals() const noexcept {
    return static_cast<std::int64_t>(keys_.size()) - attacks_;
  }

  /// Moves `step` (RankStep{} before the first) to the next lower score; false when there is none.
  bool advance(RankStep& step) const noexcept;

 private:
  std::vector<std::uint64_t> keys_;  // Upper half: rises as the score falls; lowest bit: attack.
  std::int64_t attacks_{0};
};

inline constexpr std::int64_t kCurvePoints = 500;  ///< Most of a curve in evaluation.json.

struct CurvePoint {
  double x{0};
  double y{0};
  double threshold{0};  ///< +infinity at the beginning of a ROC curve: no alarms.
};

/// False positive rate → recall, from (0, 0) to (1, 1). Empty with one class only.
///
/// At most `points_max` points (two or more), first and last among them: beyond that, those spread
/// evenly along the curve; each is a point of the exact curve.
[[nodiscard]] std::vector<CurvePoint> roc_curve(std::span<const float> scores,
                                                std::span<const std::uint8_t> labels,
                                                std::int64_t points_max);

/// Recall → precision, from the highest score to recall 1. Empty without attacks.
[[nodiscard]] std::vector<CurvePoint> pr_curve(std::span<const float> scores,
                                               std::span<const std::uint8_t> labels,
                                               std::int64_t points_max);

}  // namespace plimsoll::can_kd
