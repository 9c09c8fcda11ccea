// SPDX-License-Identifier: Apache-2.0
//
// The recipe `cosir`: trains one condition vector per image-text pair inside a memory limit.
//
// Reading order: docs/recipes/cosir.md, cosir.cpp (the whole run, top to bottom), cosir_model.h.
//
// Threads: one run at a time per process.
// Memory:  within the limit; see the table that a run prints before its first step.
#pragma once

#include <filesystem>
#include <string>

#include "plimsoll/result.h"
#include "recipes/cosir/config.h"
#include "recipes/cosir/summary.h"
#include "run/train_options.h"

namespace plimsoll {

class RankCrew;

/// Trains, or goes on training, until the last epoch or until asked to stop.
///
/// Requires: settings resolved; MKL_CBWR set (make_deterministic() says so).
/// Errors: kOverBudget before the first step, naming the smallest limit that would do and the
///         options to change; kInvalidArgument for options that do not fit the data; those of
///         the stores. After an error the last checkpoint is whole.
/// crew: nullptr, or the ranks that this one is the first of; the others lend_a_hand() (hands.h).
/// The limit is for all of them then, in equal shares.
Result<RunSummary> train_cosir(const CosirSettings& settings, const TrainOptions& options,
                               RankCrew* crew = nullptr);

/// Evaluates the published checkpoint of a run, changing nothing in it.
/// As JSON: {"step", "epoch", "recall": …}; docs/recipes/cosir.md names the keys.
Result<RecipeReport> eval_cosir(const CosirSettings& settings);

/// describe_cosir() and what it does; registry.h collects it.
Recipe cosir_recipe();

}  // namespace plimsoll
