// SPDX-License-Identifier: Apache-2.0
//
// Difficulties, one number for each normal graph, in few: quantiles of a scoring.
//
// Reading order: curriculum.h, this file.
//
// Threads: pure functions.   Memory: 4 KiB for any number of graphs.
#pragma once

#include <array>
#include <cstdint>
#include <span>

namespace plimsoll::can_kd {

/// The value at rank ⌈share × (n − 1)⌉ in ascending order (NaN highest, −0 is 0); NaN of none.
/// Requires: 0 <= share <= 1.
[[nodiscard]] float quantile_of(std::span<const float> values, double share);

inline constexpr std::array<double, 5> kDifficultyShares{0.05, 0.25, 0.5, 0.75, 0.95};

/// How difficult the normal graphs were at one scoring.
struct DifficultyPoint {
  std::int64_t epoch{0};
  std::array<float, 5> quantiles{};  ///< At kDifficultyShares.
  float threshold{0};                ///< That of the curriculum in this epoch.
};

/// Of one scoring. Requires: values are difficulties, one for each normal graph.
[[nodiscard]] DifficultyPoint difficulty_point(std::span<const float> values, std::int64_t epoch,
                                               float threshold);

}  // namespace plimsoll::can_kd
