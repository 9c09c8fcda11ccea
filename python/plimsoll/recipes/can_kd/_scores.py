# SPDX-License-Identifier: Apache-2.0
"""Figures of a detector: counts and rates at a threshold, areas under curves, by file and kind of file.

A graph is called an attack when its score is at or above the threshold. Equal scores are one step, whatever their order. A
figure that is 0/0 is NaN: `-` in tables, null in JSON. docs/recipes/can-kd-scores.md defines each figure.

Threads: pure functions.   Memory: about 40 bytes a graph.
"""
from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

Figures = dict[str, float]

CURVE_POINTS = 500
"""The most points of a curve in evaluation.json."""
FUSION_LOSS_MOST = 0.02
"""How far a fusion's AUC may be below that of the better of its parts without a warning."""
_KINDS = ("known vehicle, known attack", "unknown vehicle, known attack", "known vehicle, unknown attack", "unknown vehicle, unknown attack")
_COLUMNS = {"F1": "f1", "prec": "precision", "recall": "recall", "FPR": "fpr", "AUC": "auc", "PR-AUC": "pr_auc", "MCC": "mcc",
            "det@1%": "detection_at_fpr_1", "det@.1%": "detection_at_fpr_01"}


class Ranking:
    """Distinct scores from the highest, with how many graphs have that score or a higher one.

    Shape: scores float32 [steps], NaN last; tp (attacks) and fp (normal graphs) int64 [steps].
    """

    def __init__(self, scores: Any, labels: Any) -> None:
        scores, labels = np.asarray(scores, np.float32) + np.float32(0), np.asarray(labels, np.int64)  # −0 is 0.
        if scores.shape != labels.shape or scores.ndim != 1:
            raise ValueError(f"labels: {labels.shape} for scores of {scores.shape}; every score has one")
        order = np.argsort(-scores, kind="stable")  # NaN last.
        falling = scores[order]
        last = np.ones(len(falling), bool)  # Of its score.
        last[:-1] = (falling[1:] != falling[:-1]) & ~np.isnan(falling[:-1])
        ends = np.flatnonzero(last)
        self.scores = falling[ends]
        self.tp = np.cumsum(labels[order])[ends]
        self.fp = ends + 1 - self.tp
        self.attacks = int(labels.sum())
        self.normals = len(labels) - self.attacks


def score(scores: Any, labels: Any, threshold: float) -> Figures:
    """Returns every figure of these scores (float32) and labels (1: an attack) at a threshold, by the names in evaluation.json."""
    scores, labels = np.asarray(scores, np.float32), np.asarray(labels, np.int64)
    alarms, attacks = scores.astype(np.float64) >= threshold, labels != 0
    counts = [int(np.count_nonzero(one)) for one in (alarms & attacks, alarms & ~attacks, ~alarms & ~attacks, ~alarms & attacks)]
    figures: Figures = {"graphs": len(scores), **dict(zip(("tp", "fp", "tn", "fn"), counts)),
                        "not_numbers": int(np.count_nonzero(np.isnan(scores))), "threshold": threshold}
    return figures | _rates(*map(float, counts)) | _areas(Ranking(scores, labels))


def _rates(tp: float, fp: float, tn: float, fn: float) -> Figures:
    every = tp + fp + tn + fn
    recall, specificity = _ratio(tp, tp + fn), _ratio(tn, tn + fp)
    chance = (tp + fp) * (tp + fn) + (tn + fn) * (tn + fp)  # Agreement of two independent callers with these marginals.
    return {"accuracy": _ratio(tp + tn, every), "precision": _ratio(tp, tp + fp), "recall": recall,
            "f1": _ratio(2 * tp, 2 * tp + fp + fn), "specificity": specificity, "balanced_accuracy": (recall + specificity) / 2,
            "mcc": _ratio(tp * tn - fp * fn, math.sqrt((tp + fp) * (tp + fn)) * math.sqrt((tn + fp) * (tn + fn))),
            "fpr": _ratio(fp, tn + fp), "fnr": _ratio(fn, tp + fn), "kappa": _ratio((tp + tn) * every - chance, every * every - chance)}


def _areas(ranking: Ranking) -> Figures:
    tp, fp, attacks, normals = ranking.tp, ranking.fp, ranking.attacks, ranking.normals
    gained = np.diff(tp, prepend=0)
    twice_area = int((np.diff(fp, prepend=0) * (2 * tp - gained)).sum())
    precisions = np.cumsum(gained * (tp / np.maximum(tp + fp, 1)))  # In order: the last is their sum.
    reached = ~np.isnan(ranking.scores)  # No threshold reaches NaN.

    def detected(per_mille: int) -> float:
        within = tp[reached & (1000 * fp <= per_mille * normals)]  # Whole numbers: 5 of 100 are 5 %, whatever 0.05 is in binary.
        return float(within.max(initial=0)) / attacks if attacks and normals else math.nan

    return {"auc": _ratio(twice_area, 2.0 * attacks * normals), "pr_auc": _ratio(float(precisions[-1]) if len(tp) else 0.0, attacks),
            "detection_at_fpr_5": detected(50), "detection_at_fpr_1": detected(10), "detection_at_fpr_01": detected(1)}


def _ratio(part: float, whole: float) -> float:
    return part / whole if whole else math.nan


def youden_threshold(scores: Any, labels: Any) -> float:
    """Returns the score at which recall − false positive rate is greatest; of several, the highest, with the fewest alarms.

    Infinity, which is no alarms at all, when no score is better than that. A class that is absent has rate 0.
    """
    ranking = Ranking(scores, labels)
    gains = ranking.tp * max(ranking.normals, 1) - ranking.fp * max(ranking.attacks, 1)  # Whole numbers, so that ties are ties.
    gains = gains[~np.isnan(ranking.scores)]
    best = int(np.argmax(gains)) if len(gains) else 0
    return float(ranking.scores[best]) if len(gains) and gains[best] > 0 else math.inf


def roc_curve(scores: Any, labels: Any, points_max: int = CURVE_POINTS) -> dict[str, list[float]]:
    """Returns false positive rates, recalls and thresholds, from no alarms to all. Empty with one class alone.

    points_max: the most points, 2 or more. A longer curve is thinned to points spread evenly along it, the ends among them.
    """
    ranking = Ranking(scores, labels)
    if not ranking.attacks or not ranking.normals:
        return {"fpr": [], "recall": [], "threshold": []}
    fpr, recall, threshold = (np.concatenate([[first], values]) for first, values in (
        (0.0, ranking.fp / ranking.normals), (0.0, ranking.tp / ranking.attacks), (math.inf, ranking.scores.astype(np.float64))))
    kept = _spread(fpr, recall, points_max)
    return {"fpr": fpr[kept].tolist(), "recall": recall[kept].tolist(), "threshold": threshold[kept].tolist()}


def precision_recall_curve(scores: Any, labels: Any, points_max: int = CURVE_POINTS) -> dict[str, list[float]]:
    """Returns recalls, precisions and thresholds, from the highest score to the lowest. Empty without attacks.

    points_max: as of roc_curve().
    """
    ranking = Ranking(scores, labels)
    if not ranking.attacks:
        return {"recall": [], "precision": [], "threshold": []}
    recall, precision = ranking.tp / ranking.attacks, ranking.tp / (ranking.tp + ranking.fp)
    kept = _spread(recall, precision, points_max)
    return {"recall": recall[kept].tolist(), "precision": precision[kept].tolist(),
            "threshold": ranking.scores[kept].astype(np.float64).tolist()}


def _spread(x: np.ndarray, y: np.ndarray, points_max: int) -> list[int]:
    """Returns the indices of at most `points_max` points, evenly along the curve; its first and last are among them."""
    if points_max < 2:
        raise ValueError(f"points_max: {points_max}, where a curve has at least two points")
    last = len(x) - 1
    if last < points_max:
        return list(range(last + 1))
    travelled = np.concatenate([[0.0], np.cumsum(np.abs(np.diff(x)) + np.abs(np.diff(y)))])
    spacing = float(travelled[-1]) / (points_max - 1)
    kept: list[int] = []
    at, mark = 0, 0.0
    while len(kept) < points_max - 1 and at < last:
        kept.append(at)
        mark = (math.floor(travelled[at] / spacing) + 1.0) * spacing if spacing > 0 else 0.0
        at = max(at + 1, int(np.searchsorted(travelled, mark)))
    return [*kept, last]


# ---- By file ----

@dataclasses.dataclass
class Report:
    """Figures of all graphs, of each kind of file from known/known to unknown/unknown, and of each file that has graphs."""

    all: Figures
    kinds: dict[str, Figures]
    files: dict[str, Figures]

    def rows(self) -> dict[str, Figures]:
        """Returns the rows of its table: "all", kinds, files."""
        return {"all": self.all, **self.kinds, **self.files}

    def to_json(self) -> dict[str, Any]:
        """Returns its entries in evaluation.json."""
        return {"all": plain(self.all), "kinds": {name: plain(one) for name, one in self.kinds.items()},
                "files": {name: plain(one) for name, one in self.files.items()}}


def score_by_file(scores: Any, labels: Any, files: Any, names: Sequence[str], threshold: float) -> Report:
    """Scores all graphs, each kind of file and each file at one threshold. Files of one name are "NAME", "NAME (2)", …

    files: [graphs], each graph's index in `names`.
    """
    scores, labels, files = np.asarray(scores), np.asarray(labels), np.asarray(files)

    def of(which: Any) -> Figures:
        return score(scores[which], labels[which], threshold)

    kind_of = np.array([test_kind(name) for name in names])[files] if len(files) else np.array([], str)
    report = Report(of(slice(None)), {kind: of(kind_of == kind) for kind in _KINDS if (kind_of == kind).any()}, {})
    for at, name in enumerate(names):
        if (files == at).any():
            number = names[:at + 1].count(name)
            report.files[name if number == 1 else f"{name} ({number})"] = of(files == at)
    return report


def test_kind(file_name: str) -> str:
    """Returns the kind of file that a test file's name or folder says, such as "known vehicle, unknown attack"; else ""."""
    name = file_name.lower().replace("-", "_").replace(" ", "_")
    if "known_vehicle" not in name or "known_attack" not in name:
        return ""
    return ", ".join(f"{'unknown' if f'unknown_{what}' in name else 'known'} {what}" for what in ("vehicle", "attack"))


def fusion_warnings(fusion: Report, parts: Mapping[str, Report]) -> list[str]:
    """Returns a line for each row of the table where the fusion's AUC is more than FUSION_LOSS_MOST below that of a part."""
    warnings = []
    for name, fused in fusion.rows().items():
        aucs = {part: report.rows()[name]["auc"] for part, report in parts.items()}
        better = max(aucs, key=lambda part: -math.inf if math.isnan(aucs[part]) else aucs[part], default="")
        if better and aucs[better] > fused["auc"] + FUSION_LOSS_MOST:  # Never of a row with one class, which has no AUC.
            warnings.append(f"{name}: AUC {fused['auc']:.4f}, and {aucs[better]:.4f} of {better} alone")
    return warnings


def plain(values: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the values with null for numbers that JSON has not, in lists too."""
    def one(value: Any) -> Any:
        if isinstance(value, list):
            return [one(inner) for inner in value]
        return None if isinstance(value, float) and not math.isfinite(value) else value

    return {key: one(value) for key, value in values.items()}


def score_table(rows: Mapping[str, Figures]) -> str:
    """Returns a line of column names, and a line for each row."""
    width = max([4, *map(len, rows)])
    lines = [f"{'':<{width}}  {'graphs':>9} {'attacks':>9} " + " ".join(f"{title:>7}" for title in _COLUMNS)]
    for name, figures in rows.items():
        cells = (figures[key] for key in _COLUMNS.values())
        lines.append(f"{name:<{width}}  {figures['graphs']:>9} {figures['tp'] + figures['fn']:>9} "
                     + " ".join(f"{'-' if math.isnan(cell) else f'{cell:.4f}':>7}" for cell in cells))
    return "\n".join(lines) + "\n"
