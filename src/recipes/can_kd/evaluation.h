// SPDX-License-Identifier: Apache-2.0
//
// Evaluation: every finished model of a run on the graphs held out and on the test files.
//
// A classifier and the fusion say attack above one half; an autoencoder at the threshold that
// separates the graphs held out best (Youden's J), never one chosen on test files.
// Reading order: models.h, scores.h, curves.h, this file.
//
// Threads: single-owner.   Memory: one role's models; 13 bytes a graph scored, and the
//          points of two curves a model.
#pragma once

#include <filesystem>
#include <nlohmann/json_fwd.hpp>
#include <string>

#include "plimsoll/governor.h"
#include "plimsoll/result.h"
#include "recipes/can_kd/config.h"
#include "recipes/can_kd/data.h"

namespace plimsoll::can_kd {

struct Evaluated {
  /// {"teacher": {"vgae": {"parameters", "threshold", "held_out": {…}, "test": {…}}, …},
  /// "student": …, "original": {FILE: …}}.
  std::string json{"{}"};
  std::string text{};  ///< The same as tables.
  bool any{false};     ///< There was a model to evaluate.
};

/// What evaluate() does, for its memory alone: reads the models that are in RUN/models so far and
/// the published students that the options name, and lets each answer the scoring_chunk largest
/// graphs. Returns the peak. Errors: of their files, by name; those of rehearse_step().
Result<std::int64_t> rehearse_evaluation(const Governor& governor, const CanKdConfig& config,
                                         const Data& data, const std::filesystem::path& run);

/// Evaluates what is in RUN/models; with `write` leaves evaluation.json and evaluation.txt in
/// `run`. The file also has "curves": {ROLE: {MODEL: {"roc", "precision_recall"}}} of the test
/// files, at most kCurvePoints points each. Errors: of the models' files; kCorrupt, kIo.
Result<Evaluated> evaluate(const CanKdConfig& config, const Data& data,
                           const std::filesystem::path& run, bool write);

}  // namespace plimsoll::can_kd
