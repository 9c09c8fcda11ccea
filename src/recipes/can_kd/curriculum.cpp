// SPDX-License-Identifier: Apache-2.0
//
// Threads: see curriculum.h.   Memory: see curriculum.h.
#include "recipes/can_kd/curriculum.h"

#include <algorithm>
#include <cmath>
#include <limits>

#include "base/check.h"
#include "base/philox.h"
#include "plimsoll/sample_order.h"
#include "recipes/can_kd/difficulties.h"
#include "recipes/can_kd/ordered_float.h"

namespace plimsoll::can_kd {
namespace {

// Keys of their own, so that no sample follows the order in which batches are drawn.
constexpr std::uint64_t kPoolStream = 0x706F6F6CULL;
constexpr std::uint64_t kBelowStream = 0x62656C6FULL;

std::int64_t wanted_normals(double ratio, std::int64_t attacks, std::int64_t normals) {
  if (attacks == 0) {
    return normals;
  }
  const double wanted = std::floor(ratio * static_cast<double>(attacks) + 0.5);
  return wanted >= static_cast<double>(normals) ? normals : static_cast<std::int64_t>(wanted);
}

/// Says of each graph in turn whether it is among `chosen` of `graphs`, without a list of them.
class Sample {
 public:
  Sample(std::int64_t graphs, std::int64_t chosen, std::uint64_t seed, std::int64_t epoch) noexcept
      : order_{graphs, mix64(seed), epoch}, chosen_{chosen}, all_{chosen >= graphs} {}
  [[nodiscard]] bool takes_next() noexcept {
    const std::int64_t graph = next_++;
    return all_ || (chosen_ > 0 && order_.position_of(graph) < chosen_);
  }

 private:
  SampleOrder order_;
  std::int64_t chosen_;
  bool all_;
  std::int64_t next_{0};
};

}  // namespace

CurriculumStage curriculum_stage(const CurriculumSchedule& schedule, std::int64_t epoch) {
  PLIMSOLL_CHECK(epoch >= 0, "epochs are counted from 0");
  const double last = static_cast<double>(schedule.epochs - 1);
  CurriculumStage stage;
  stage.progress = last > 0 ? std::min(1.0, static_cast<double>(epoch) / last) : 0.0;
  const auto between = [&stage](double start, double end) {
    return start + (end - start) * stage.progress;
  };
  stage.ratio = between(schedule.start_ratio, schedule.end_ratio);
  stage.percentile = between(schedule.start_percentile, schedule.end_percentile);
  return stage;
}

CurriculumChoice choose(std::span<const float> difficulties, std::span<const std::int64_t> normals,
                        std::span<const std::int64_t> attacks, const CurriculumStage& stage,
                        std::uint64_t seed, std::int64_t epoch) {
  PLIMSOLL_CHECK(difficulties.size() == normals.size(), "every normal graph has a difficulty");
  PLIMSOLL_CHECK(stage.percentile >= 0.0 && stage.percentile <= 100.0, "percentile in [0, 100]");
  PLIMSOLL_CHECK(stage.ratio >= 0.0, "a ratio is not negative");
  const auto count = static_cast<std::int64_t>(normals.size());
  CurriculumChoice choice;
  choice.attacks = static_cast<std::int64_t>(attacks.size());
  choice.normals = wanted_normals(stage.ratio, choice.attacks, count);
  choice.threshold = quantile_of(difficulties, stage.percentile / 100.0);
  const std::uint32_t lowest = ordered_bits(choice.threshold, kNanIsHighest);
  const auto in_pool = [&](std::size_t i) {
    return ordered_bits(difficulties[i], kNanIsHighest) >= lowest;
  };
  for (std::size_t i = 0; i < difficulties.size(); ++i) {
    choice.pool += in_pool(i) ? 1 : 0;
  }
  choice.from_below = std::max<std::int64_t>(0, choice.normals - choice.pool);
  Sample pool{choice.pool, choice.normals - choice.from_below, seed ^ kPoolStream, epoch};
  Sample below{count - choice.pool, choice.from_below, seed ^ kBelowStream, epoch};
  choice.graphs.reserve(static_cast<std::size_t>(choice.attacks + choice.normals));
  std::size_t attack = 0;
  for (std::size_t i = 0; i < normals.size(); ++i) {
    if (in_pool(i) ? pool.takes_next() : below.takes_next()) {
      while (attack < attacks.size() && attacks[attack] < normals[i]) {
        choice.graphs.push_back(attacks[attack++]);
      }
      choice.graphs.push_back(normals[i]);
    }
  }
  const auto rest = attacks.subspan(attack);
  choice.graphs.insert(choice.graphs.end(), rest.begin(), rest.end());
  return choice;
}

}  // namespace plimsoll::can_kd
