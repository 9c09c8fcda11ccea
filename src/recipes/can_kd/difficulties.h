// SPDX-License-Identifier: Apache-2.0
//
// Difficulties: one number for each normal graph, kept between scorings and across resumes.
//
// Reading order: curriculum.h, this file.
//
// Threads: single-owner.
// Memory:  leased (Tag::kOther): 4 bytes a graph. Quantiles take 4 KiB for any number of graphs.
#pragma once

#include <array>
#include <cstdint>
#include <filesystem>
#include <span>
#include <string>
#include <vector>

#include "plimsoll/governor.h"
#include "plimsoll/result.h"

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

class Difficulties {
 public:
  /// All zero. Errors: kOverBudget.
  static Result<Difficulties> make(Governor governor, std::int64_t graphs);

  /// What save() wrote for the same graphs by the same scorer.
  /// Errors: kNotFound, kCorrupt, kIo, kOverBudget; kInvalidArgument for another number of graphs
  ///         or another `of`, naming both.
  static Result<Difficulties> load(Governor governor, const std::filesystem::path& path,
                                   std::int64_t graphs, const std::string& of);

  /// A safetensors file: `difficulty` F32 [graphs], durable, replaced whole. `of` says what was
  /// scored by what (the set's fingerprint and the model's digest). Errors: kIo.
  [[nodiscard]] Result<void> save(const std::filesystem::path& path, const std::string& of) const;

  /// Where a scorer writes: by place among the normal graphs, ascending.
  [[nodiscard]] std::span<float> values() noexcept { return values_; }
  [[nodiscard]] std::span<const float> values() const noexcept { return values_; }
  [[nodiscard]] std::int64_t epoch() const noexcept { return epoch_; }  ///< Of the scoring; −1.
  void scored(std::int64_t epoch) noexcept { epoch_ = epoch; }

  [[nodiscard]] DifficultyPoint point(float threshold) const;

 private:
  Difficulties(Lease lease, std::int64_t graphs);
  Lease lease_;
  std::vector<float> values_;
  std::int64_t epoch_{-1};
};

}  // namespace plimsoll::can_kd
