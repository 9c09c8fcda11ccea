// SPDX-License-Identifier: Apache-2.0
//
// Which graphs an epoch of the curriculum trains on: every attack, and a sample of normal graphs
// that grows and hardens with the epochs.
//
// Reading order: this file, difficulties.h.
//
// Threads: pure functions.
// Memory:  8 bytes a chosen graph, the result; beside it 4 KiB for any number of graphs.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

namespace plimsoll::can_kd {

struct CurriculumSchedule {
  double start_ratio{1.0};        ///< Normal graphs for each attack in epoch 0, …
  double end_ratio{10.0};         ///< … and in the last.
  double start_percentile{75.0};  ///< Of difficulty; normal graphs at or above it come first.
  double end_percentile{95.0};
  std::int64_t epochs{300};
};

struct CurriculumStage {
  double progress{0};  ///< epoch / (epochs − 1), at most 1; 0 of a single epoch.
  double ratio{0};
  double percentile{0};
};

/// Requires: epoch >= 0.
[[nodiscard]] CurriculumStage curriculum_stage(const CurriculumSchedule& schedule,
                                               std::int64_t epoch);

struct CurriculumChoice {
  std::vector<std::int64_t> graphs{};  ///< Ascending: every attack, and the normal graphs chosen.
  std::int64_t attacks{0};
  std::int64_t normals{0};     ///< Of those in `graphs`.
  std::int64_t pool{0};        ///< Normal graphs at or above the percentile.
  std::int64_t from_below{0};  ///< Chosen below it, because the pool was smaller than asked for.
  float threshold{0};          ///< The difficulty at the percentile; NaN without normal graphs.
};

/// The graphs of one epoch.
///
/// Of `normals` round(ratio × attacks) are chosen, and never more than there are: a sample of those
/// at or above the percentile, drawn by (seed, epoch); if these are too few all of them, and a
/// sample of the rest. Without attacks: every normal graph. Percentiles are NumPy's (linear); a
/// difficulty that is NaN is the highest.
///
/// Requires: difficulties[i] is that of normals[i]; normals and attacks ascending, without
///           duplicates; 0 <= percentile <= 100; ratio >= 0.
[[nodiscard]] CurriculumChoice choose(std::span<const float> difficulties,
                                      std::span<const std::int64_t> normals,
                                      std::span<const std::int64_t> attacks,
                                      const CurriculumStage& stage, std::uint64_t seed,
                                      std::int64_t epoch);

}  // namespace plimsoll::can_kd
