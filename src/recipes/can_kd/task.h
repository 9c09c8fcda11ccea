// SPDX-License-Identifier: Apache-2.0
//
// Task: one piece of a can-kd run; a run is a fixed list of them.
//
//   teacher: autoencoder → curriculum → normal → fusion, the student the same, then evaluation.
//
// Reading order: this file, can_kd.cpp.
//
// Threads: values.   Memory: none.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "recipes/can_kd/config.h"

namespace plimsoll::can_kd {

enum class Role : std::uint8_t { kTeacher, kStudent };

enum class Stage : std::uint8_t {
  kAutoencoder,  ///< The VGAE, on every training graph.
  kCurriculum,   ///< The classifier, on attacks and normal graphs chosen by difficulty.
  kNormal,       ///< The classifier, on every training graph.
  kFusion,       ///< The network that weighs both models' answers.
  kEvaluation,   ///< Of every model there is.
};

struct Task {
  Role role{Role::kTeacher};
  Stage stage{Stage::kAutoencoder};

  /// "teacher_vgae", "student_gat_curriculum", "student_gat_normal", "teacher_fusion",
  /// "evaluation": of its model's file.
  [[nodiscard]] std::string name() const;
  /// Tells the noise of one task from that of another.
  [[nodiscard]] std::uint64_t number() const noexcept;
  bool operator==(const Task&) const = default;
};

/// Every task of a run, in order.
[[nodiscard]] std::vector<Task> all_tasks();

/// Those that --stage and --model-size ask for.
[[nodiscard]] std::vector<Task> wanted_tasks(const CanKdConfig& config);

/// The classifier's task that fusion and evaluation look at (fusion_gat).
[[nodiscard]] Task classifier_task(Role role, const CanKdConfig& config);

/// "autoencoder", "curriculum", …
[[nodiscard]] const char* stage_name(Stage stage) noexcept;
/// "teacher" or "student".
[[nodiscard]] const char* role_name(Role role) noexcept;

}  // namespace plimsoll::can_kd
