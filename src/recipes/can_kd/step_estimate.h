// SPDX-License-Identifier: Apache-2.0
//
// What a step of a task needs at most, from its models' shapes alone: for when none can be
// rehearsed.
//
// Reading order: shapes.h, this file, planning.h.
//
// Threads: pure functions.   Memory: none.
#pragma once

#include <cstdint>

#include "plan/step_trace.h"
#include "recipes/can_kd/config.h"
#include "recipes/can_kd/shapes.h"

namespace plimsoll::can_kd {

/// What decides how much a model holds: its weights, and the numbers it makes for each node and
/// edge.
struct ModelExtent {
  std::int64_t weights{0};       ///< Numbers.
  std::int64_t node_widths{0};   ///< Sum of its layers' widths.
  std::int64_t mixed_widths{0};  ///< Sum of the widths of the LSTM over layers, both ways.
  std::int64_t heads{0};         ///< Sum of its layers' heads.
  std::int64_t widest{0};        ///< Of one layer's input and output.
};

[[nodiscard]] ModelExtent extent_of(const GatShape& shape);
[[nodiscard]] ModelExtent extent_of(const VgaeShape& shape);
[[nodiscard]] ModelExtent extent_of(const TeacherShape& shape);

/// The models of a step and the graphs they see.
struct TaskExtent {
  ModelExtent model{};
  ModelExtent teacher{};  ///< Zeros: none.
  ModelExtent scorer{};   ///< The autoencoder that says how difficult graphs are. Zeros: none.
  StepSize step{};        ///< The largest one.
  StepSize answered{};    ///< The largest chunk that is validated or scored.
};

/// An upper bound of the tensors of a step and of its validation, in bytes; with weights,
/// gradients, moments and the best epoch's copy.
[[nodiscard]] std::int64_t tensors_at_most(const TaskExtent& extent, const CanKdConfig& config);

}  // namespace plimsoll::can_kd
