// SPDX-License-Identifier: Apache-2.0
//
// What a detector is worth: counts and rates at a threshold, areas under curves, by file and kind.
//
// A graph is called an attack when its score is at or above the threshold. Everything is exact with
// tied scores: what has one score is called as one. A figure that is 0/0 (a precision without
// alarms, an AUC with one class) is NaN, printed "-" and null in JSON.
// docs/recipes/can-kd-scores.md defines each figure. Reading order: this file, curves.h.
//
// Threads: pure functions.
// Memory:  8 bytes a graph while the scores are sorted; by files, another 5.
#pragma once

#include <cstdint>
#include <nlohmann/json_fwd.hpp>
#include <span>
#include <string>
#include <string_view>
#include <vector>

namespace plimsoll::can_kd {

struct BinaryScores {
  std::int64_t graphs{0};
  std::int64_t tp{0}, fp{0}, tn{0}, fn{0};  ///< Positive: an attack.
  std::int64_t not_numbers{0};  ///< Scores that are NaN: below all others, never an alarm.
  double threshold{0};
  double accuracy{0};
  double precision{0};
  double recall{0};  ///< Also the true positive rate.
  double f1{0};
  double specificity{0};
  double balanced_accuracy{0};  ///< Mean of recall and specificity.
  double mcc{0};                ///< Matthews' correlation.
  double fpr{0};
  double fnr{0};
  double auc{0};     ///< Under the ROC curve: P(attack above normal) + ½ P(equal).
  double pr_auc{0};  ///< Average precision: Σ (recall step) × precision; no interpolation.
  double kappa{0};   ///< Cohen's.
  /// Most recall that any threshold reaches with a false positive rate of at most 5, 1, 0.1 %.
  double detection_at_fpr_5{0}, detection_at_fpr_1{0}, detection_at_fpr_01{0};
};

/// Requires: as many labels (0 or 1) as scores, at most 2^31.
[[nodiscard]] BinaryScores score(std::span<const float> scores,
                                 std::span<const std::uint8_t> labels, double threshold);

/// The score at which recall − false positive rate (Youden's J) is greatest; of several, the
/// highest, which raises the fewest alarms. +infinity (no alarms at all) when no score is better
/// than that: an upside-down detector, no attacks, no scores. A class that is absent has rate 0, so
/// without normal graphs it is the lowest score.
[[nodiscard]] double youden_threshold(std::span<const float> scores,
                                      std::span<const std::uint8_t> labels);

/// {"graphs", "tp", …} by the members' names; NaN and infinity are null.
[[nodiscard]] nlohmann::ordered_json to_json(const BinaryScores& scores);

struct NamedScores {
  std::string name{};
  BinaryScores scores{};
};

/// A line of column names, then one a row: graphs, attacks, F1, precision, recall, FPR, AUC,
/// PR-AUC, MCC, detection at 1 % and 0.1 %. Ends with a newline.
[[nodiscard]] std::string score_table(std::span<const NamedScores> rows);

/// What a file's name or folder says it tests: "known vehicle, known attack" and so on, from
/// "…known_vehicle…unknown_attack…" in any case, with '-' or ' ' for '_'. "" unless it says both.
[[nodiscard]] std::string test_kind(std::string_view file_name);

struct ScoreReport {
  BinaryScores all{};
  std::vector<NamedScores> kinds{};  ///< Of those there are, from known/known to unknown/unknown.
  std::vector<NamedScores> files{};  ///< In the order of `names`, those with graphs.

  /// {"all": {…}, "kinds": {"known vehicle, known attack": {…}, …}, "files": {NAME: {…}, …}}.
  [[nodiscard]] nlohmann::ordered_json to_json() const;
  /// score_table() of all, then kinds, then files.
  [[nodiscard]] std::string to_text() const;
  /// "all", then kinds, then files: the rows of that table.
  [[nodiscard]] std::vector<NamedScores> rows() const;
};

struct NamedReport {
  std::string name{};
  ScoreReport report{};
};

/// Most that a fusion's AUC may be below that of the better of its parts.
inline constexpr double kFusionLossMost = 0.02;

/// Where a fusion is worth less than one of its parts by more than kFusionLossMost: a line for all
/// graphs, each kind of file and each file. `parts` are of the same graphs, by name.
[[nodiscard]] std::vector<std::string> fusion_warnings(const ScoreReport& fusion,
                                                       std::span<const NamedReport> parts);

/// Scores everything, each kind of file and each file at one threshold.
/// Files of one name, as from two folders, are "NAME", "NAME (2)", …
/// Requires: files[i] (of scores[i]) is an index into `names`, the files' names.
[[nodiscard]] ScoreReport score_by_file(std::span<const float> scores,
                                        std::span<const std::uint8_t> labels,
                                        std::span<const std::int32_t> files,
                                        std::span<const std::string> names, double threshold);

}  // namespace plimsoll::can_kd
