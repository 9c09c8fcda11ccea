// SPDX-License-Identifier: Apache-2.0
//
// Threads: see scores.h.   Memory: see scores.h.
#include "recipes/can_kd/scores.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <cctype>
#include <cmath>
#include <limits>
#include <map>
#include <nlohmann/json.hpp>

#include "base/check.h"
#include "recipes/can_kd/curves.h"
#include "run/json_values.h"

namespace plimsoll::can_kd {
namespace {

/// NaN where it is 0/0.
double ratio(double part, double whole) {
  return part / whole;
}

// In the order of the data set's test_01 … test_04.
constexpr std::array<std::string_view, 4> kKinds{
    "known vehicle, known attack", "unknown vehicle, known attack", "known vehicle, unknown attack",
    "unknown vehicle, unknown attack"};

void count(std::span<const float> scores, std::span<const std::uint8_t> labels, BinaryScores& out) {
  for (std::size_t i = 0; i < scores.size(); ++i) {
    const bool alarm = static_cast<double>(scores[i]) >= out.threshold;
    const bool attack = labels[i] != 0;
    ++(attack ? (alarm ? out.tp : out.fn) : (alarm ? out.fp : out.tn));
    out.not_numbers += std::isnan(scores[i]) ? 1 : 0;
  }
  out.graphs = static_cast<std::int64_t>(scores.size());
}

void rates(BinaryScores& out) {
  const auto tp = static_cast<double>(out.tp);
  const auto fp = static_cast<double>(out.fp);
  const auto tn = static_cast<double>(out.tn);
  const auto fn = static_cast<double>(out.fn);
  const double all = tp + fp + tn + fn;
  out.accuracy = ratio(tp + tn, all);
  out.precision = ratio(tp, tp + fp);
  out.recall = ratio(tp, tp + fn);
  out.f1 = ratio(2 * tp, 2 * tp + fp + fn);
  out.specificity = ratio(tn, tn + fp);
  out.balanced_accuracy = (out.recall + out.specificity) / 2;
  out.fpr = ratio(fp, tn + fp);
  out.fnr = ratio(fn, tp + fn);
  out.mcc =
      ratio(tp * tn - fp * fn, std::sqrt((tp + fp) * (tp + fn)) * std::sqrt((tn + fp) * (tn + fn)));
  // Agreement beyond that of two independent callers with these marginals.
  const double chance = (tp + fp) * (tp + fn) + (tn + fn) * (tn + fp);
  out.kappa = ratio((tp + tn) * all - chance, all * all - chance);
}

void areas(const Ranking& ranking, BinaryScores& out) {
  const auto attacks = static_cast<double>(ranking.attacks());
  const auto normals = static_cast<double>(ranking.normals());
  std::uint64_t twice_area = 0;  // At most 2 · 2^30 · 2^30.
  double precisions = 0.0;
  double within5 = 0.0;
  double within1 = 0.0;
  double within01 = 0.0;
  RankStep before;
  for (RankStep step; ranking.advance(step); before = step) {
    twice_area += static_cast<std::uint64_t>(step.fp - before.fp) *
                  static_cast<std::uint64_t>(step.tp + before.tp);
    const auto tp = static_cast<double>(step.tp);
    const auto fp = static_cast<double>(step.fp);
    precisions += static_cast<double>(step.tp - before.tp) * (tp / (tp + fp));
    if (std::isnan(step.score)) {
      continue;  // No threshold reaches it.
    }
    // In products of integers: 5 of 100 normal graphs are 5 %, whatever 0.05 is in binary.
    within5 = 100 * fp <= 5 * normals ? tp : within5;
    within1 = 100 * fp <= normals ? tp : within1;
    within01 = 1000 * fp <= normals ? tp : within01;
  }
  const double undefined = std::numeric_limits<double>::quiet_NaN();
  out.auc = ratio(static_cast<double>(twice_area), 2 * attacks * normals);
  out.pr_auc = ratio(precisions, attacks);
  const bool both = ranking.attacks() > 0 && ranking.normals() > 0;
  out.detection_at_fpr_5 = both ? within5 / attacks : undefined;
  out.detection_at_fpr_1 = both ? within1 / attacks : undefined;
  out.detection_at_fpr_01 = both ? within01 / attacks : undefined;
}

std::string cell(double value) {
  return std::isnan(value) ? std::string{"-"} : fmt::format("{:.4f}", value);
}

/// The scores of a few of the graphs, once more together.
class Subset {
 public:
  explicit Subset(std::size_t most) {
    scores_.reserve(most);
    labels_.reserve(most);
  }
  void clear() {
    scores_.clear();
    labels_.clear();
  }
  void add(float score, std::uint8_t label) {
    scores_.push_back(score);
    labels_.push_back(label);
  }
  [[nodiscard]] bool empty() const { return scores_.empty(); }
  [[nodiscard]] BinaryScores at(double threshold) const {
    return score(scores_, labels_, threshold);
  }

 private:
  std::vector<float> scores_;
  std::vector<std::uint8_t> labels_;
};

}  // namespace

BinaryScores score(std::span<const float> scores, std::span<const std::uint8_t> labels,
                   double threshold) {
  const Ranking ranking{scores, labels};
  BinaryScores out;
  out.threshold = threshold;
  count(scores, labels, out);
  rates(out);
  areas(ranking, out);
  return out;
}

double youden_threshold(std::span<const float> scores, std::span<const std::uint8_t> labels) {
  const Ranking ranking{scores, labels};
  // J × attacks × normals, in integers so that ties are ties; a class that is absent counts as 1.
  const std::int64_t attacks = std::max<std::int64_t>(ranking.attacks(), 1);
  const std::int64_t normals = std::max<std::int64_t>(ranking.normals(), 1);
  std::int64_t best = 0;
  double threshold = std::numeric_limits<double>::infinity();
  for (RankStep step; ranking.advance(step);) {
    const std::int64_t gain = step.tp * normals - step.fp * attacks;
    if (gain > best && !std::isnan(step.score)) {
      best = gain;
      threshold = static_cast<double>(step.score);
    }
  }
  return threshold;
}

nlohmann::ordered_json to_json(const BinaryScores& s) {
  nlohmann::ordered_json json{{"graphs", s.graphs}, {"tp", s.tp}, {"fp", s.fp},
                              {"tn", s.tn},         {"fn", s.fn}, {"not_numbers", s.not_numbers}};
  json["threshold"] = json_number(s.threshold);
  json["accuracy"] = json_number(s.accuracy);
  json["precision"] = json_number(s.precision);
  json["recall"] = json_number(s.recall);
  json["f1"] = json_number(s.f1);
  json["specificity"] = json_number(s.specificity);
  json["balanced_accuracy"] = json_number(s.balanced_accuracy);
  json["mcc"] = json_number(s.mcc);
  json["fpr"] = json_number(s.fpr);
  json["fnr"] = json_number(s.fnr);
  json["auc"] = json_number(s.auc);
  json["pr_auc"] = json_number(s.pr_auc);
  json["kappa"] = json_number(s.kappa);
  json["detection_at_fpr_5"] = json_number(s.detection_at_fpr_5);
  json["detection_at_fpr_1"] = json_number(s.detection_at_fpr_1);
  json["detection_at_fpr_01"] = json_number(s.detection_at_fpr_01);
  return json;
}

std::string score_table(std::span<const NamedScores> rows) {
  std::size_t width = 4;
  for (const NamedScores& row : rows) {
    width = std::max(width, row.name.size());
  }
  std::string text =
      fmt::format("{:<{}}  {:>9} {:>9} {:>7} {:>7} {:>7} {:>7} {:>7} {:>7} {:>7} {:>7} {:>7}\n", "",
                  width, "graphs", "attacks", "F1", "prec", "recall", "FPR", "AUC", "PR-AUC", "MCC",
                  "det@1%", "det@.1%");
  for (const auto& [name, s] : rows) {
    text +=
        fmt::format("{:<{}}  {:>9} {:>9} {:>7} {:>7} {:>7} {:>7} {:>7} {:>7} {:>7} {:>7} {:>7}\n",
                    name, width, s.graphs, s.tp + s.fn, cell(s.f1), cell(s.precision),
                    cell(s.recall), cell(s.fpr), cell(s.auc), cell(s.pr_auc), cell(s.mcc),
                    cell(s.detection_at_fpr_1), cell(s.detection_at_fpr_01));
  }
  return text;
}

std::string test_kind(std::string_view file_name) {
  std::string name;
  for (const char c : file_name) {
    const bool gap = c == '-' || c == ' ';
    name += gap ? '_' : static_cast<char>(std::tolower(static_cast<unsigned char>(c)));
  }
  const auto says = [&name](const char* what) { return name.find(what) != std::string::npos; };
  if (!says("known_vehicle") || !says("known_attack")) {
    return {};
  }
  return fmt::format("{} vehicle, {} attack", says("unknown_vehicle") ? "unknown" : "known",
                     says("unknown_attack") ? "unknown" : "known");
}

nlohmann::ordered_json ScoreReport::to_json() const {
  nlohmann::ordered_json json;
  json["all"] = can_kd::to_json(all);
  json["kinds"] = nlohmann::ordered_json::object();
  for (const auto& [name, scores] : kinds) {
    json["kinds"][name] = can_kd::to_json(scores);
  }
  json["files"] = nlohmann::ordered_json::object();
  for (const auto& [name, scores] : files) {
    json["files"][name] = can_kd::to_json(scores);
  }
  return json;
}

std::string ScoreReport::to_text() const {
  return score_table(rows());
}

std::vector<NamedScores> ScoreReport::rows() const {
  std::vector<NamedScores> rows{{"all", all}};
  rows.insert(rows.end(), kinds.begin(), kinds.end());
  rows.insert(rows.end(), files.begin(), files.end());
  return rows;
}

std::vector<std::string> fusion_warnings(const ScoreReport& fusion,
                                         std::span<const NamedReport> parts) {
  std::vector<std::string> warnings;
  const std::vector<NamedScores> fused = fusion.rows();
  for (std::size_t row = 0; row < fused.size(); ++row) {
    const NamedReport* better = nullptr;
    double most = fused[row].scores.auc + kFusionLossMost;
    for (const NamedReport& part : parts) {
      const double auc = part.report.rows().at(row).scores.auc;
      if (auc > most) {  // Never of a row with one class, which has no AUC.
        most = auc;
        better = &part;
      }
    }
    if (better != nullptr) {
      warnings.push_back(fmt::format("{}: AUC {:.4f}, and {:.4f} of {} alone", fused[row].name,
                                     fused[row].scores.auc, most, better->name));
    }
  }
  return warnings;
}

ScoreReport score_by_file(std::span<const float> scores, std::span<const std::uint8_t> labels,
                          std::span<const std::int32_t> files, std::span<const std::string> names,
                          double threshold) {
  PLIMSOLL_CHECK(files.size() == scores.size() && labels.size() == scores.size(),
                 "every score has a label and a file");
  std::vector<std::string> kind_of;  // By file.
  for (const std::string& name : names) {
    kind_of.push_back(test_kind(name));
  }
  for (const std::int32_t file : files) {
    PLIMSOLL_CHECK(file >= 0 && static_cast<std::size_t>(file) < names.size(), "no such file");
  }
  ScoreReport report;
  report.all = score(scores, labels, threshold);
  Subset subset{scores.size()};
  const auto add = [&](std::string_view name, const auto& wanted, std::vector<NamedScores>& to) {
    subset.clear();
    for (std::size_t i = 0; i < scores.size(); ++i) {
      if (wanted(static_cast<std::size_t>(files[i]))) {
        subset.add(scores[i], labels[i]);
      }
    }
    if (!subset.empty()) {
      to.push_back({std::string{name}, subset.at(threshold)});
    }
  };
  for (const std::string_view kind : kKinds) {
    add(
        kind, [&](std::size_t file) { return kind_of[file] == kind; }, report.kinds);
  }
  std::map<std::string_view, int> seen;  // Of each name, how many files have it so far.
  for (std::size_t f = 0; f < names.size(); ++f) {
    const int number = ++seen[names[f]];
    add(
        number == 1 ? names[f] : fmt::format("{} ({})", names[f], number),
        [f](std::size_t file) { return file == f; }, report.files);
  }
  return report;
}

}  // namespace plimsoll::can_kd
