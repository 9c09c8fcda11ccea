# SPDX-License-Identifier: Apache-2.0
"""Figures of the recipe can-kd: cases worked out by hand, a quadratic oracle (every pair, every threshold) on seeded random
scores with many ties, and the figures that `plimsoll train can-kd` wrote, of the same scores."""
import json
import math

import numpy as np
import pytest

from tests.support.forked import first, forked  # noqa: F401  Fixtures.

from test_can_kd import train, traffic  # noqa: F401  Fixtures.
from test_cli import call, trains  # noqa: F401  Fixtures.

pytest.importorskip("torch")
from plimsoll.recipes.can_kd import _scores as s

NAN, INF = math.nan, math.inf
ALL_POINTS = 1_000_000


def random_case(seed):
    numbers = np.random.default_rng(seed)
    graphs = int(numbers.integers(60))
    scores = (numbers.integers(0, numbers.integers(1, 13), graphs) * 0.25 - 1).astype(np.float32)
    return scores, (numbers.integers(0, numbers.integers(1, 7), graphs) == 0).astype(np.int64), 0.25 * numbers.integers(14) - 1.1


def alarms(scores, labels, threshold, label):
    return sum(1 for one, of in zip(scores.tolist(), labels.tolist()) if of == label and one >= threshold)


def share(part, whole):
    return part / whole if whole else NAN


def by_definition(scores, labels):
    """AUC, average precision, detection at 5, 1 and 0.1 %, and Youden's threshold: every pair, every threshold."""
    attacks, normals = int(labels.sum()), int((1 - labels).sum())
    levels = sorted(set(scores.tolist()), reverse=True)
    wins = [float(a > b) + 0.5 * (a == b) for a in scores[labels == 1].tolist() for b in scores[labels == 0].tolist()]
    average, before, best, threshold = 0.0, 0, 0.0, INF
    detected = dict.fromkeys((50, 10, 1), 0.0 if attacks and normals else NAN)
    for level in levels:
        tp, fp = alarms(scores, labels, level, 1), alarms(scores, labels, level, 0)
        average += share(tp - before, attacks) * share(tp, tp + fp)
        before = tp
        for most in detected:
            if attacks and normals and 1000 * fp <= most * normals:
                detected[most] = max(detected[most], tp / attacks)
        j = (tp / attacks if attacks else 0.0) - (fp / normals if normals else 0.0)
        if j > best + 1e-12:
            best, threshold = j, level
    return {"auc": share(sum(wins), len(wins)), "pr_auc": average if attacks else NAN, "detection_at_fpr_5": detected[50],
            "detection_at_fpr_1": detected[10], "detection_at_fpr_01": detected[1]}, threshold


def test_a_case_worked_out_by_hand_has_its_figures():
    scores, labels = [0.9, 0.8, 0.7, 0.6, 0.5, 0.4, 0.3, 0.2, 0.1, 0.0], [1, 1, 0, 1, 0, 0, 1, 0, 0, 0]
    found = s.score(scores, labels, 0.5)
    assert found == pytest.approx({
        "graphs": 10, "tp": 3, "fp": 2, "tn": 4, "fn": 1, "not_numbers": 0, "threshold": 0.5, "accuracy": 0.7, "precision": 0.6,
        "recall": 0.75, "f1": 2 * 0.6 * 0.75 / (0.6 + 0.75), "specificity": 4 / 6, "balanced_accuracy": (0.75 + 4 / 6) / 2,
        "mcc": (3 * 4 - 2 * 1) / math.sqrt(5 * 4 * 6 * 5), "fpr": 2 / 6, "fnr": 0.25,
        "auc": 20 / 24,  # Pairs won by the attacks 0.9, 0.8, 0.6, 0.3: 6 + 6 + 5 + 3.
        "pr_auc": (1 + 1 + 3 / 4 + 4 / 7) / 4, "kappa": (0.7 - 0.5) / (1 - 0.5),  # Chance (5·4 + 5·6)/100.
        "detection_at_fpr_5": 0.5, "detection_at_fpr_1": 0.5, "detection_at_fpr_01": 0.5}, rel=1e-12)
    assert s.youden_threshold(scores, labels) == float(np.float32(0.6))  # J 0.5 at 0.8, 0.75 − 1/6 at 0.6, 0.5 at 0.3.


def test_all_tied_scores_are_worth_a_coin():
    scores, labels = np.full(8, 0.25, np.float32), [1, 0, 0, 0, 1, 0, 0, 0]
    found = s.score(scores, labels, 0.25)
    assert (found["tp"], found["fp"], found["auc"], found["pr_auc"], found["detection_at_fpr_5"]) == (2, 6, 0.5, 0.25, 0)
    assert s.youden_threshold(scores, labels) == INF
    assert len(s.roc_curve(scores, labels, ALL_POINTS)["fpr"]) == 2


def test_five_of_a_hundred_normal_graphs_are_five_per_cent():
    scores = [value for i in range(100) for value in (i, i - 0.5)]  # One attack above each normal graph but the highest.
    found = s.score(scores, [0, 1] * 100, 0)
    assert [found[f"detection_at_fpr_{at}"] for at in ("5", "1", "01")] == [0.05, 0.01, 0]


@pytest.mark.parametrize("scores, labels, threshold, missing", [
    ([0.1, 0.9], [0, 0], 2.0, {"precision", "recall", "f1", "balanced_accuracy", "mcc", "fnr", "auc", "pr_auc", "kappa",
                               "detection_at_fpr_5", "detection_at_fpr_1", "detection_at_fpr_01"}),
    ([0.1, 0.9], [1, 1], 0.5, {"auc", "specificity", "fpr", "balanced_accuracy", "mcc", "detection_at_fpr_5", "detection_at_fpr_1",
                               "detection_at_fpr_01"}),
    ([0.1, 0.9], [0, 1], INF, {"threshold", "precision", "mcc"})])
def test_what_is_zero_by_zero_is_null(scores, labels, threshold, missing):
    told = s.plain(s.score(scores, labels, threshold))
    assert {key for key, value in told.items() if value is None} == missing
    assert {key for key, value in s.plain(s.score([], [], 0.5)).items() if value is not None} == {
        "graphs", "tp", "fp", "tn", "fn", "not_numbers", "threshold"}


def test_scores_that_are_no_numbers_rank_lowest_and_are_counted():
    scores, labels = np.array([NAN, -INF, 1, NAN, INF, -0.0, 0.0], np.float32), [1, 0, 1, 0, 1, 0, 1]
    found = s.score(scores, labels, -INF)
    assert [found[key] for key in ("not_numbers", "tp", "fn", "fp", "tn")] == [2, 3, 1, 2, 1]
    assert found["auc"] == 9 / 12  # Attacks inf and 1 win 3 each, 0 ties with −0 and wins 2, NaN ties with NaN.
    none = np.full(4, NAN, np.float32)
    assert s.youden_threshold(none, [1, 1, 1, 0]) == INF and s.score(none, [1, 1, 1, 0], -INF)["tp"] == 0


@pytest.mark.parametrize("scores, labels, wanted", [([4, 3, 2, 1], [1, 0, 1, 0], 4), ([1, 2, 3], [1, 0, 0], INF),
                                                    ([1, 2], [0, 0], INF), ([3, 2], [1, 1], 2), ([], [], INF)])
def test_youden_takes_the_highest_of_ties_and_no_alarms_before_harm(scores, labels, wanted):
    assert s.youden_threshold(scores, labels) == wanted


def test_random_scores_agree_with_the_definitions():
    for seed in range(300):
        scores, labels, threshold = random_case(seed)
        found = s.score(scores, labels, threshold)
        assert (found["tp"], found["fp"]) == tuple(alarms(scores, labels, threshold, label) for label in (1, 0)), seed
        assert found["tp"] + found["fn"] == labels.sum() and found["fp"] + found["tn"] == len(labels) - labels.sum(), seed
        figures, best = by_definition(scores, labels)
        assert {key: found[key] for key in figures} == pytest.approx(figures, abs=1e-12, nan_ok=True), seed
        assert s.youden_threshold(scores, labels) == best, seed


def test_whole_curves_hold_every_threshold_and_their_areas():
    for seed in range(150):
        scores, labels, _ = random_case(seed)
        attacks, normals = int(labels.sum()), int((1 - labels).sum())
        roc, pr = s.roc_curve(scores, labels, ALL_POINTS), s.precision_recall_curve(scores, labels, ALL_POINTS)
        found, levels = s.score(scores, labels, 0), sorted(set(scores.tolist()), reverse=True)
        assert roc["threshold"] == ([INF, *levels] if attacks and normals else []), seed
        assert pr["threshold"] == (levels if attacks else []), seed
        for x, y, level in zip(*roc.values()):
            assert (x, y) == (alarms(scores, labels, level, 0) / normals, alarms(scores, labels, level, 1) / attacks), seed
        if roc["fpr"]:
            heights = np.add(roc["recall"][1:], roc["recall"][:-1]) / 2
            assert found["auc"] == pytest.approx((np.diff(roc["fpr"]) * heights).sum(), abs=1e-12), seed
        if attacks:
            assert found["pr_auc"] == pytest.approx((np.diff(pr["recall"], prepend=0) * pr["precision"]).sum(), abs=1e-12), seed


@pytest.mark.parametrize("curve", [s.roc_curve, s.precision_recall_curve], ids=lambda one: one.__name__)
def test_thinned_curves_keep_their_ends_and_stay_close_to_the_whole(curve):
    numbers = np.random.default_rng(7)
    labels = (numbers.integers(0, 5, 20_000) == 0).astype(np.int64)
    scores = (numbers.integers(0, 100_000, 20_000) + 30_000 * labels).astype(np.float32)
    whole = list(zip(*curve(scores, labels, ALL_POINTS).values()))
    for most in (2, 3, 50, 500):
        thin = list(zip(*curve(scores, labels, most).values()))
        assert max(2, most // 2) <= len(thin) <= most and (thin[0], thin[-1]) == (whole[0], whole[-1])
        left = iter(whole)
        assert all(point in left for point in thin)  # Each is a point of the whole curve, in its order.
    if curve is s.roc_curve:
        apart = [abs(b[0] - a[0]) + abs(b[1] - a[1]) for a, b in zip(thin, thin[1:])]
        assert max(apart) <= 2 * 2 / 499 + 1e-9
    with pytest.raises(ValueError, match="points_max: 1"):
        curve(scores, labels, 1)


@pytest.mark.parametrize("name, kind", [
    ("set_01/test_01_known_vehicle_known_attack__DoS-3.csv.gz", "known vehicle, known attack"),
    ("test_02_unknown_vehicle_known_attack/DoS-1.csv", "unknown vehicle, known attack"),
    ("Test-03-Known-Vehicle-Unknown-Attack.csv", "known vehicle, unknown attack"),
    ("unknown vehicle unknown attack", "unknown vehicle, unknown attack"), ("test_known_vehicle.csv", ""), ("train_01.csv", "")])
def test_files_are_told_apart_by_what_their_names_say(name, kind):
    assert s.test_kind(name) == kind


def test_a_report_scores_each_file_and_each_kind():
    names = ["test_01_known_vehicle_known_attack__a.csv", "other.csv", "test_04_unknown_vehicle_unknown_attack__b.csv", "empty.csv",
             "test_01_known_vehicle_known_attack__c.csv", "other.csv"]
    report = s.score_by_file(np.array([0.9, 0.1, 0.8, 0.3, 0.2, 0.7, 0.6], np.float32), np.array([1, 0, 1, 1, 0, 0, 0]),
                             np.array([0, 0, 1, 2, 4, 4, 5]), names, 0.5)
    known, unknown = "known vehicle, known attack", "unknown vehicle, unknown attack"
    assert list(report.kinds) == [known, unknown] and list(report.files) == [names[0], names[1], names[2], names[4], "other.csv (2)"]
    assert (report.kinds[known]["graphs"], report.kinds[known]["fp"], report.kinds[known]["auc"], report.kinds[unknown]["fn"]) == (4, 1, 1, 1)
    assert report.to_json()["files"]["other.csv"]["auc"] is None and report.to_json()["all"]["graphs"] == 7
    lines = s.score_table(report.rows()).splitlines()
    assert len(lines) == 1 + 1 + 2 + 5 and len({len(line) for line in lines}) == 1
    assert "PR-AUC" in lines[0] and lines[1].startswith("all ") and lines[5].startswith("other.csv") and " - " in lines[5]


def test_s49_a_fusion_worse_than_a_part_is_told_by_file_and_kind():
    names = ["test_01_known_vehicle_known_attack__a.csv", "test_02_unknown_vehicle_known_attack__b.csv", "one_class.csv"]

    def report(*unknown):
        scores = np.array([0.9, 0.1, 0.8, 0.2, *unknown, 0.5], np.float32)
        return s.score_by_file(scores, np.array([1, 0] * 4 + [1]), np.array([0] * 4 + [1] * 4 + [2]), names, 0.5)

    right, upside_down = report(0.9, 0.1, 0.8, 0.2), report(0.1, 0.9, 0.2, 0.8)
    parts = {"vgae": report(0.5, 0.5, 0.5, 0.5), "gat_normal": right}
    assert s.fusion_warnings(right, parts) == s.fusion_warnings(upside_down, {}) == []
    first, second, third = s.fusion_warnings(upside_down, parts)  # All, its kind, its file; not the known vehicle.
    assert first.startswith("all: AUC 0.") and third.startswith(names[1])
    assert second == "unknown vehicle, known attack: AUC 0.0000, and 1.0000 of gat_normal alone"


def test_figures_and_curves_are_those_that_a_run_wrote_of_the_same_scores(train, tmp_path):
    """The points of a run's ROC curve, where there are fewer graphs than points, say each score and its label."""
    train("run", "--max-epochs", "1")
    told = json.loads((tmp_path / "run/evaluation.json").read_text())
    for role, models in told.pop("curves").items():
        for name, curves in models.items():
            wanted = told[role][name]["test"]["all"]
            steps = [np.rint(np.diff(curves["roc"][of]) * wanted_of).astype(int) for of, wanted_of in (
                ("recall", wanted["tp"] + wanted["fn"]), ("fpr", wanted["fp"] + wanted["tn"]))]
            level = np.array(curves["roc"]["threshold"][1:], np.float32)
            scores = np.concatenate([np.repeat(level, count) for count in steps])
            labels = np.repeat([1, 0], [count.sum() for count in steps])
            assert len(scores) == wanted["graphs"] <= s.CURVE_POINTS
            threshold = INF if wanted["threshold"] is None else wanted["threshold"]
            assert s.plain(s.score(scores, labels, threshold)) == wanted, (role, name)
            assert s.plain(s.roc_curve(scores, labels)) == curves["roc"], (role, name)
            assert s.plain(s.precision_recall_curve(scores, labels)) == curves["precision_recall"], (role, name)
