// SPDX-License-Identifier: Apache-2.0
//
// Goal: every figure is the one its definition gives, with ties, one class, NaN and infinities.
// Method: cases worked out by hand; a quadratic oracle (every pair, every threshold) on seeded
// random scores with many ties.
#include "recipes/can_kd/scores.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <nlohmann/json.hpp>
#include <random>
#include <set>
#include <sstream>

#include "recipes/can_kd/curves.h"

namespace plimsoll::can_kd {
namespace {

using Labels = std::vector<std::uint8_t>;
constexpr float kInf = std::numeric_limits<float>::infinity();
constexpr float kNan = std::numeric_limits<float>::quiet_NaN();
constexpr std::int64_t kAllPoints = 1'000'000;

struct Case {
  std::vector<float> scores{};
  Labels labels{};
};

Case random_case(std::mt19937_64& random) {
  Case made;
  const auto graphs = static_cast<std::size_t>(random() % 60);
  const auto levels = 1 + random() % 12;
  const auto attack_of = 1 + random() % 6;
  for (std::size_t i = 0; i < graphs; ++i) {
    made.scores.push_back(static_cast<float>(random() % levels) * 0.25F - 1.0F);
    made.labels.push_back(random() % attack_of == 0 ? 1 : 0);
  }
  return made;
}

std::int64_t alarms(const Case& c, double threshold, std::uint8_t label) {
  std::int64_t count = 0;
  for (std::size_t i = 0; i < c.scores.size(); ++i) {
    count += c.labels[i] == label && static_cast<double>(c.scores[i]) >= threshold ? 1 : 0;
  }
  return count;
}

double share(std::int64_t part, std::int64_t whole) {
  return static_cast<double>(part) / static_cast<double>(whole);
}

/// Every threshold there is, from the highest.
std::set<double, std::greater<>> thresholds(const Case& c) {
  return {c.scores.begin(), c.scores.end()};
}

double oracle_auc(const Case& c) {
  double wins = 0;
  double pairs = 0;
  for (std::size_t i = 0; i < c.scores.size(); ++i) {
    for (std::size_t j = 0; j < c.scores.size(); ++j) {
      if (c.labels[i] == 1 && c.labels[j] == 0) {
        wins += c.scores[i] > c.scores[j] ? 1.0 : c.scores[i] == c.scores[j] ? 0.5 : 0.0;
        pairs += 1;
      }
    }
  }
  return wins / pairs;
}

double oracle_average_precision(const Case& c, std::int64_t attacks) {
  double sum = 0;
  std::int64_t before = 0;
  for (const double t : thresholds(c)) {
    const std::int64_t tp = alarms(c, t, 1);
    sum += share(tp - before, attacks) * share(tp, tp + alarms(c, t, 0));
    before = tp;
  }
  return attacks == 0 ? kNan : sum;
}

double oracle_detection(const Case& c, std::int64_t attacks, std::int64_t normals,
                        std::int64_t per_mille) {
  double best = 0;
  for (const double t : thresholds(c)) {
    if (1000 * alarms(c, t, 0) <= per_mille * normals) {
      best = std::max(best, share(alarms(c, t, 1), attacks));
    }
  }
  return attacks == 0 || normals == 0 ? kNan : best;
}

void expect_same(double ours, double theirs, const char* what) {
  if (std::isnan(theirs)) {
    EXPECT_TRUE(std::isnan(ours)) << what << ": " << ours;
  } else {
    EXPECT_NEAR(ours, theirs, 1e-12) << what;
  }
}

TEST(CanKdScoresTest, ACaseWorkedOutByHandHasItsFigures) {
  // At 0.5: tp 3, fn 1, fp 2, tn 4.
  const std::vector<float> scores{0.9F, 0.8F, 0.7F, 0.6F, 0.5F, 0.4F, 0.3F, 0.2F, 0.1F, 0.0F};
  const Labels labels{1, 1, 0, 1, 0, 0, 1, 0, 0, 0};
  const BinaryScores s = score(scores, labels, 0.5);
  EXPECT_EQ(s.graphs, 10);
  EXPECT_EQ(s.tp, 3);
  EXPECT_EQ(s.fp, 2);
  EXPECT_EQ(s.tn, 4);
  EXPECT_EQ(s.fn, 1);
  EXPECT_DOUBLE_EQ(s.accuracy, 0.7);
  EXPECT_DOUBLE_EQ(s.precision, 0.6);
  EXPECT_DOUBLE_EQ(s.recall, 0.75);
  EXPECT_DOUBLE_EQ(s.f1, 2 * 0.6 * 0.75 / (0.6 + 0.75));
  EXPECT_DOUBLE_EQ(s.specificity, 4.0 / 6);
  EXPECT_DOUBLE_EQ(s.balanced_accuracy, (0.75 + 4.0 / 6) / 2);
  EXPECT_DOUBLE_EQ(s.fpr, 2.0 / 6);
  EXPECT_DOUBLE_EQ(s.fnr, 0.25);
  EXPECT_DOUBLE_EQ(s.mcc, (3.0 * 4 - 2 * 1) / std::sqrt(5.0 * 4 * 6 * 5));
  // Chance agreement (5·4 + 5·6)/100 = 0.5.
  EXPECT_DOUBLE_EQ(s.kappa, (0.7 - 0.5) / (1 - 0.5));
  // Pairs won by the attacks 0.9, 0.8, 0.6, 0.3: 6 + 6 + 5 + 3 of 24.
  EXPECT_DOUBLE_EQ(s.auc, 20.0 / 24);
  EXPECT_DOUBLE_EQ(s.pr_auc, (1.0 + 1.0 + 3.0 / 4 + 4.0 / 7) / 4);
  EXPECT_DOUBLE_EQ(s.detection_at_fpr_5, 0.5);  // None of six normal graphs may be called.
  EXPECT_DOUBLE_EQ(s.detection_at_fpr_01, 0.5);
  // 0.8 → J 0.5; 0.6 → J 0.75 − 1/6; 0.3 → J 1 − 3/6.
  EXPECT_EQ(youden_threshold(scores, labels), static_cast<double>(0.6F));
}

TEST(CanKdScoresTest, AllTiedScoresAreWorthACoin) {
  const std::vector<float> scores(8, 0.25F);
  const Labels labels{1, 0, 0, 0, 1, 0, 0, 0};
  const BinaryScores s = score(scores, labels, 0.25);
  EXPECT_EQ(s.tp, 2);
  EXPECT_EQ(s.fp, 6);
  EXPECT_DOUBLE_EQ(s.auc, 0.5);
  EXPECT_DOUBLE_EQ(s.pr_auc, 0.25);
  EXPECT_EQ(s.detection_at_fpr_5, 0.0);
  EXPECT_EQ(youden_threshold(scores, labels), static_cast<double>(kInf));
  EXPECT_EQ(roc_curve(scores, labels, kAllPoints).size(), 2U);
}

TEST(CanKdScoresTest, APerfectDetectorHasOnesEverywhere) {
  const std::vector<float> scores{-3, -2, 5, 4, -2.5F};
  const Labels labels{0, 0, 1, 1, 0};
  const BinaryScores s = score(scores, labels, youden_threshold(scores, labels));
  EXPECT_EQ(s.threshold, 4.0);
  for (const double one :
       {s.accuracy, s.precision, s.recall, s.f1, s.specificity, s.balanced_accuracy, s.mcc, s.auc,
        s.pr_auc, s.kappa, s.detection_at_fpr_5, s.detection_at_fpr_1, s.detection_at_fpr_01}) {
    EXPECT_EQ(one, 1.0);
  }
  EXPECT_EQ(s.fpr, 0.0);
  EXPECT_EQ(s.fnr, 0.0);
}

TEST(CanKdScoresTest, FiveOfAHundredNormalGraphsAreFivePerCent) {
  Case c;
  for (int i = 0; i < 100; ++i) {  // Normal graphs 0 … 99; one attack above each but the highest.
    c.scores.push_back(static_cast<float>(i));
    c.labels.push_back(0);
    c.scores.push_back(static_cast<float>(i) - 0.5F);
    c.labels.push_back(1);
  }
  const BinaryScores s = score(c.scores, c.labels, 0);
  EXPECT_DOUBLE_EQ(s.detection_at_fpr_5, 0.05);  // Attacks 98.5, …, 94.5.
  EXPECT_DOUBLE_EQ(s.detection_at_fpr_1, 0.01);
  EXPECT_DOUBLE_EQ(s.detection_at_fpr_01, 0.0);
}

TEST(CanKdScoresTest, WhatIsZeroByZeroIsNanAndNull) {
  const std::vector<float> scores{0.1F, 0.9F};
  const auto normal_only = to_json(score(scores, Labels{0, 0}, 2.0));
  for (const char* key : {"precision", "recall", "f1", "balanced_accuracy", "mcc", "fnr", "auc",
                          "pr_auc", "kappa", "detection_at_fpr_5"}) {
    EXPECT_TRUE(normal_only.at(key).is_null()) << key;
  }
  EXPECT_EQ(normal_only.at("specificity"), 1.0);
  EXPECT_EQ(normal_only.at("fpr"), 0.0);
  EXPECT_EQ(normal_only.at("accuracy"), 1.0);
  const auto attacks_only = to_json(score(scores, Labels{1, 1}, 0.5));
  EXPECT_TRUE(attacks_only.at("auc").is_null());
  EXPECT_TRUE(attacks_only.at("specificity").is_null());
  EXPECT_EQ(attacks_only.at("pr_auc"), 1.0);
  EXPECT_EQ(attacks_only.at("recall"), 0.5);
  const auto none = to_json(score({}, {}, 0.5));
  EXPECT_TRUE(none.at("accuracy").is_null());
  EXPECT_EQ(none.at("graphs"), 0);
  const auto no_alarms = to_json(score(scores, Labels{0, 1}, kInf));
  EXPECT_TRUE(no_alarms.at("threshold").is_null());
  EXPECT_TRUE(no_alarms.at("precision").is_null());
  EXPECT_EQ(no_alarms.at("f1"), 0.0);
}

TEST(CanKdScoresTest, ScoresThatAreNoNumbersRankLowestAndAreCounted) {
  const std::vector<float> scores{kNan, -kInf, 1.0F, kNan, kInf, -0.0F, 0.0F};
  const Labels labels{1, 0, 1, 0, 1, 0, 1};
  const BinaryScores s = score(scores, labels, -kInf);
  EXPECT_EQ(s.not_numbers, 2);
  EXPECT_EQ(s.tp, 3);
  EXPECT_EQ(s.fn, 1);
  EXPECT_EQ(s.fp, 2);
  EXPECT_EQ(s.tn, 1);
  // Attacks inf and 1 win 3 each, 0 ties with −0 and wins 2, NaN ties with NaN: 9 of 12.
  EXPECT_DOUBLE_EQ(s.auc, 9.0 / 12);
  const std::vector<float> all_nan(4, kNan);
  EXPECT_EQ(youden_threshold(all_nan, Labels{1, 1, 1, 0}), static_cast<double>(kInf));
  EXPECT_EQ(score(all_nan, Labels{1, 1, 1, 0}, -kInf).tp, 0);
}

TEST(CanKdScoresTest, YoudenTakesTheHighestOfTiesAndNoAlarmsBeforeHarm) {
  // J is 0.5 at 4 and again at 2.
  EXPECT_EQ(youden_threshold(std::vector<float>{4, 3, 2, 1}, Labels{1, 0, 1, 0}), 4.0);
  EXPECT_EQ(youden_threshold(std::vector<float>{1, 2, 3}, Labels{1, 0, 0}),
            static_cast<double>(kInf));
  EXPECT_EQ(youden_threshold(std::vector<float>{1, 2}, Labels{0, 0}), static_cast<double>(kInf));
  EXPECT_EQ(youden_threshold(std::vector<float>{3, 2}, Labels{1, 1}), 2.0);
  EXPECT_EQ(youden_threshold({}, {}), static_cast<double>(kInf));
}

TEST(CanKdScoresTest, RandomScoresAgreeWithTheQuadraticOracle) {
  for (std::uint64_t seed = 0; seed < 400; ++seed) {
    SCOPED_TRACE(testing::Message() << "seed " << seed);
    std::mt19937_64 random{seed};
    const Case c = random_case(random);
    const double threshold = 0.25 * static_cast<double>(random() % 14) - 1.1;
    const BinaryScores s = score(c.scores, c.labels, threshold);
    const auto attacks = std::count(c.labels.begin(), c.labels.end(), std::uint8_t{1});
    const auto normals = static_cast<std::int64_t>(c.labels.size()) - attacks;
    EXPECT_EQ(s.tp, alarms(c, threshold, 1));
    EXPECT_EQ(s.fp, alarms(c, threshold, 0));
    EXPECT_EQ(s.fn, attacks - s.tp);
    EXPECT_EQ(s.tn, normals - s.fp);
    expect_same(s.auc, oracle_auc(c), "AUC");
    expect_same(s.pr_auc, oracle_average_precision(c, attacks), "PR-AUC");
    expect_same(s.detection_at_fpr_5, oracle_detection(c, attacks, normals, 50), "5 %");
    expect_same(s.detection_at_fpr_1, oracle_detection(c, attacks, normals, 10), "1 %");
    expect_same(s.detection_at_fpr_01, oracle_detection(c, attacks, normals, 1), "0.1 %");
    double best = 0;
    double best_threshold = static_cast<double>(kInf);
    for (const double t : thresholds(c)) {
      const double j = (attacks == 0 ? 0.0 : share(alarms(c, t, 1), attacks)) -
                       (normals == 0 ? 0.0 : share(alarms(c, t, 0), normals));
      if (j > best + 1e-12) {
        best = j;
        best_threshold = t;
      }
    }
    EXPECT_EQ(youden_threshold(c.scores, c.labels), best_threshold);
  }
}

TEST(CanKdCurvesTest, WholeCurvesHoldEveryThresholdAndTheirAreas) {
  for (std::uint64_t seed = 0; seed < 200; ++seed) {
    SCOPED_TRACE(testing::Message() << "seed " << seed);
    std::mt19937_64 random{seed};
    const Case c = random_case(random);
    const auto attacks = std::count(c.labels.begin(), c.labels.end(), std::uint8_t{1});
    const auto normals = static_cast<std::int64_t>(c.labels.size()) - attacks;
    const auto roc = roc_curve(c.scores, c.labels, kAllPoints);
    const auto pr = pr_curve(c.scores, c.labels, kAllPoints);
    const BinaryScores s = score(c.scores, c.labels, 0);
    ASSERT_EQ(roc.empty(), attacks == 0 || normals == 0);
    ASSERT_EQ(pr.size(), attacks == 0 ? 0 : thresholds(c).size());
    double average = 0;
    double before = 0;
    for (const CurvePoint& point : pr) {
      const std::int64_t tp = alarms(c, point.threshold, 1);
      EXPECT_DOUBLE_EQ(point.x, share(tp, attacks));
      EXPECT_DOUBLE_EQ(point.y, share(tp, tp + alarms(c, point.threshold, 0)));
      average += (point.x - before) * point.y;
      before = point.x;
    }
    if (!pr.empty()) {
      EXPECT_NEAR(average, s.pr_auc, 1e-12);
    }
    if (roc.empty()) {
      continue;
    }
    EXPECT_EQ(roc.size(), thresholds(c).size() + 1);
    EXPECT_EQ(roc.front().x + roc.front().y, 0.0);
    EXPECT_EQ(roc.back().x + roc.back().y, 2.0);
    double area = 0;
    for (std::size_t i = 1; i < roc.size(); ++i) {
      EXPECT_DOUBLE_EQ(roc[i].x, share(alarms(c, roc[i].threshold, 0), normals));
      EXPECT_DOUBLE_EQ(roc[i].y, share(alarms(c, roc[i].threshold, 1), attacks));
      area += (roc[i].x - roc[i - 1].x) * (roc[i].y + roc[i - 1].y) / 2;
    }
    EXPECT_NEAR(area, s.auc, 1e-12);
  }
}

TEST(CanKdCurvesTest, ThinnedCurvesKeepTheirEndsAndStayCloseToTheWhole) {
  std::mt19937_64 random{7};
  Case c;
  for (int i = 0; i < 20'000; ++i) {
    const bool attack = random() % 5 == 0;
    c.labels.push_back(attack ? 1 : 0);
    c.scores.push_back(static_cast<float>(random() % 100'000) + (attack ? 30'000.0F : 0.0F));
  }
  for (const bool roc : {true, false}) {
    const auto make = [&](std::int64_t most) {
      return roc ? roc_curve(c.scores, c.labels, most) : pr_curve(c.scores, c.labels, most);
    };
    const auto whole = make(kAllPoints);
    for (const std::int64_t most : {2, 3, 50, 500}) {
      const auto thin = make(most);
      ASSERT_LE(static_cast<std::int64_t>(thin.size()), most);
      ASSERT_GE(static_cast<std::int64_t>(thin.size()), std::max<std::int64_t>(2, most / 2));
      EXPECT_EQ(thin.front().threshold, whole.front().threshold);
      EXPECT_EQ(thin.back().threshold, whole.back().threshold);
      std::size_t at = 0;
      for (const CurvePoint& point : thin) {  // Each is a point of the whole curve, in its order.
        while (at < whole.size() && whole[at].threshold != point.threshold) {
          ++at;
        }
        ASSERT_LT(at, whole.size());
        EXPECT_EQ(whole[at].x, point.x);
        EXPECT_EQ(whole[at].y, point.y);
      }
      if (roc && most == 500) {
        for (std::size_t i = 1; i < thin.size(); ++i) {
          EXPECT_LE(thin[i].x - thin[i - 1].x + thin[i].y - thin[i - 1].y, 2 * 2.0 / 499 + 1e-9);
        }
      }
    }
  }
}

TEST(CanKdScoresTest, FilesAreToldApartByWhatTheirNamesSay) {
  EXPECT_EQ(test_kind("set_01/test_01_known_vehicle_known_attack__DoS-3.csv.gz"),
            "known vehicle, known attack");
  EXPECT_EQ(test_kind("test_02_unknown_vehicle_known_attack/DoS-1.csv"),
            "unknown vehicle, known attack");
  EXPECT_EQ(test_kind("Test-03-Known-Vehicle-Unknown-Attack.csv"), "known vehicle, unknown attack");
  EXPECT_EQ(test_kind("unknown vehicle unknown attack"), "unknown vehicle, unknown attack");
  EXPECT_EQ(test_kind("test_known_vehicle.csv"), "");
  EXPECT_EQ(test_kind("train_01.csv"), "");
}

TEST(CanKdScoresTest, AReportScoresEachFileAndEachKind) {
  const std::vector<std::string> names{"test_01_known_vehicle_known_attack__a.csv", "other.csv",
                                       "test_04_unknown_vehicle_unknown_attack__b.csv", "empty.csv",
                                       "test_01_known_vehicle_known_attack__c.csv"};
  const std::vector<float> scores{0.9F, 0.1F, 0.8F, 0.3F, 0.2F, 0.7F};
  const Labels labels{1, 0, 1, 1, 0, 0};
  const std::vector<std::int32_t> files{0, 0, 1, 2, 4, 4};
  const ScoreReport report = score_by_file(scores, labels, files, names, 0.5);
  EXPECT_EQ(report.all.graphs, 6);
  ASSERT_EQ(report.kinds.size(), 2U);
  EXPECT_EQ(report.kinds[0].name, "known vehicle, known attack");
  EXPECT_EQ(report.kinds[0].scores.graphs, 4);
  EXPECT_EQ(report.kinds[0].scores.fp, 1);
  EXPECT_EQ(report.kinds[0].scores.auc, 1.0);
  EXPECT_EQ(report.kinds[1].scores.fn, 1);
  ASSERT_EQ(report.files.size(), 4U);
  EXPECT_EQ(report.files[1].name, "other.csv");
  EXPECT_EQ(report.files[3].scores.tn, 1);
  const auto json = report.to_json();
  EXPECT_EQ(json["kinds"]["known vehicle, known attack"]["tp"], 1);
  EXPECT_TRUE(json["files"]["other.csv"]["auc"].is_null());
  std::istringstream lines{report.to_text()};
  std::vector<std::string> all;
  for (std::string line; std::getline(lines, line);) {
    all.push_back(line);
  }
  ASSERT_EQ(all.size(), 1U + 1U + 2U + 4U);
  for (const std::string& line : all) {
    EXPECT_EQ(line.size(), all[0].size()) << line;
  }
  EXPECT_NE(all[0].find("PR-AUC"), std::string::npos);
  EXPECT_EQ(all[1].rfind("all ", 0), 0U);
  EXPECT_EQ(all[5].rfind("other.csv", 0), 0U);
  EXPECT_NE(all[5].find(" - "), std::string::npos);
}

TEST(S49Fusion, WhereItIsWorseThanAPartIsToldByFileAndKind) {
  const std::vector<std::string> names{"test_01_known_vehicle_known_attack__a.csv",
                                       "test_02_unknown_vehicle_known_attack__b.csv",
                                       "one_class.csv"};
  const Labels labels{1, 0, 1, 0, 1, 0, 1, 0, 1};
  const std::vector<std::int32_t> files{0, 0, 0, 0, 1, 1, 1, 1, 2};
  const auto report = [&](const std::vector<float>& scores) {
    return score_by_file(scores, labels, files, names, 0.5);
  };
  const std::vector<float> right{0.9F, 0.1F, 0.8F, 0.2F, 0.9F, 0.1F, 0.8F, 0.2F, 0.5F};
  const std::vector<float> tied{0.9F, 0.1F, 0.8F, 0.2F, 0.5F, 0.5F, 0.5F, 0.5F, 0.5F};
  const std::vector<float> upside_down{0.9F, 0.1F, 0.8F, 0.2F, 0.1F, 0.9F, 0.2F, 0.8F, 0.5F};
  const std::vector<NamedReport> parts{{"vgae", report(tied)}, {"gat_normal", report(right)}};
  EXPECT_TRUE(fusion_warnings(report(right), parts).empty());
  const auto warnings = fusion_warnings(report(upside_down), parts);
  ASSERT_EQ(warnings.size(), 3U);  // All, its kind, its file; not the known vehicle.
  EXPECT_TRUE(warnings[0].starts_with("all: AUC 0.")) << warnings[0];
  EXPECT_EQ(warnings[1],
            "unknown vehicle, known attack: AUC 0.0000, and 1.0000 of gat_normal alone");
  EXPECT_TRUE(warnings[2].starts_with(names[1])) << warnings[2];
  EXPECT_TRUE(fusion_warnings(report(upside_down), {}).empty());
}

TEST(CanKdScoresTest, FilesOfOneNameAreEachInTheReport) {
  const std::vector<std::string> names{"set/test_a.csv", "set/test_a.csv", "set/test_b.csv"};
  const std::vector<float> scores{0.9F, 0.8F, 0.7F, 0.1F};
  const ScoreReport report =
      score_by_file(scores, Labels{1, 0, 0, 0}, std::vector<std::int32_t>{0, 1, 1, 2}, names, 0.5);
  const auto json = report.to_json()["files"];
  ASSERT_EQ(json.size(), 3U);
  EXPECT_EQ(json["set/test_a.csv"]["graphs"], 1);
  EXPECT_EQ(json["set/test_a.csv (2)"]["graphs"], 2);
  EXPECT_EQ(json["set/test_b.csv"]["graphs"], 1);
}

}  // namespace
}  // namespace plimsoll::can_kd
