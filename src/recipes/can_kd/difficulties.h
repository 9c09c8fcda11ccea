// SPDX-License-Identifier: Apache-2.0
//
// Difficulties, one number for each normal graph, in few: quantiles of a scoring.
//
// Reading order: curriculum.h, this file.
//
// Threads: pure functions.   Memory: 4 KiB for any number of graphs.
#pragma once

#include <span>

namespace plimsoll::can_kd {

/// The value at rank ⌈share × (n − 1)⌉ in ascending order (NaN highest, −0 is 0); NaN of none.
/// Requires: 0 <= share <= 1.
[[nodiscard]] float quantile_of(std::span<const float> values, double share);

}  // namespace plimsoll::can_kd
