// SPDX-License-Identifier: Apache-2.0
//
// From options to the shapes of models, and from a step's place in the run to its noise.
//
// Reading order: config.h, task.h, this file.
//
// Threads: pure functions.   Memory: none.
#pragma once

#include <cstdint>
#include <string>
#include <variant>
#include <vector>

#include "plimsoll/result.h"
#include "recipes/can_kd/config.h"
#include "recipes/can_kd/gat_jk.h"
#include "recipes/can_kd/mode.h"
#include "recipes/can_kd/task.h"
#include "recipes/can_kd/vgae.h"

namespace plimsoll::can_kd {

[[nodiscard]] const CanKdSizes& sizes_of(const CanKdConfig& config, Role role) noexcept;

/// `ids`: rows of the embedding table, GraphSetInfo::table_rows().
[[nodiscard]] GatShape gat_shape(const CanKdConfig& config, Role role, std::int64_t ids);
/// Requires: vgae_hidden_dims is well formed (its field accepts nothing else).
[[nodiscard]] VgaeShape vgae_shape(const CanKdConfig& config, Role role, std::int64_t ids);

/// Of a model that teaches: a classifier, or an autoencoder.
using TeacherShape = std::variant<GatShape, VgaeShape>;

/// Of the teacher that a run trains itself for this task.
[[nodiscard]] TeacherShape own_teacher_shape(const CanKdConfig& config, const Task& task,
                                             std::int64_t ids);

/// What decides the first weights of a task's model.
[[nodiscard]] std::uint64_t weight_seed(const CanKdConfig& config, const Task& task) noexcept;

/// The noise (dropout, sampling of z) of the batch that begins at `position` of an epoch.
[[nodiscard]] std::uint64_t step_noise(const CanKdConfig& config, const Task& task,
                                       std::int64_t epoch, std::int64_t position) noexcept;

/// How a training step runs with these options.
[[nodiscard]] Mode training_mode(const CanKdConfig& config, std::uint64_t noise) noexcept;
/// How a model answers when nobody trains it: bits of a graph depend on that graph alone.
[[nodiscard]] Mode answering_mode() noexcept;

}  // namespace plimsoll::can_kd
