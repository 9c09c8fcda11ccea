# SPDX-License-Identifier: Apache-2.0
"""Evaluation: every finished model of a run on the graphs held out and on the test files.

A classifier and the fusion say attack above one half. An autoencoder does at the threshold that separates the graphs held out
best (Youden's J), never at one chosen on test files.

Reading order: _scores.py, _fusion.py, this file.
Threads: the thread that trains.   Memory: one role's models; 24 bytes per graph scored; the points of two curves a model.
"""
from __future__ import annotations

import dataclasses
import functools
import json
import pathlib
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from ...core._folders import replaced
from ._fusion import fusion_states, load_fusion
from ._losses import graph_errors
from ._models import graphs_of
from ._original_student import OriginalStudent, load_original, original_features
from ._scores import (
    Report,
    fusion_warnings,
    plain,
    precision_recall_curve,
    roc_curve,
    score,
    score_by_file,
    score_table,
    youden_threshold,
)
from ._tasks import ROLES, Data, Task, load_model, model_path

if TYPE_CHECKING:
    from . import Options

_CLASSIFIERS = {"curriculum": "gat_curriculum", "normal": "gat_normal"}
_ADVICE = "  A fusion has learnt whom to believe on the vehicles that it was trained on. Elsewhere use a part alone.\n\n"


@dataclasses.dataclass
class _Detector:
    """A finished model, ready to be asked."""

    role: str
    name: str
    parameters: int
    ask: Callable[[np.ndarray], np.ndarray]
    """Scores graphs of the set, by their numbers."""
    probability: bool = True
    """Above one half means attack; else a threshold is to be found."""
    is_part: bool = False
    """Whether the role's fusion asks it."""


def evaluate(options: Options, data: Data, folder: str | pathlib.Path, write: bool) -> tuple[dict[str, Any], str]:
    """Evaluates the models in RUN/models, and the published students that the options name. Returns the figures and their tables.

    write:  leaves evaluation.json and evaluation.txt in `folder`; the first also has the curves of the test files.
    Errors: of the models' files; Stopped.
    """
    folder = pathlib.Path(folder)
    told: dict[str, dict[str, Any]] = {}
    curves: dict[str, dict[str, Any]] = {}
    held_out, text = {}, ""
    for detectors in (*(_detectors_of(options, data, role, folder) for role in ROLES), _originals(options, data)):
        parts: dict[str, Report] = {}  # Of the fusion, which comes after them.
        for one in detectors:
            kept = data.score(data.held_out, options.scoring_chunk, one.ask)
            threshold = 0.5 if one.probability else youden_threshold(kept, data.labels[data.held_out])
            at_home = held_out[f"{one.role} {one.name}"] = score(kept, data.labels[data.held_out], threshold)
            entry = told.setdefault(one.role, {})[one.name] = {
                "parameters": one.parameters, **plain({"threshold": threshold}), "held_out": plain(at_home)}
            if not len(data.test):
                continue
            away, labels = data.score(data.test, options.scoring_chunk, one.ask), data.labels[data.test]
            names = [file["name"] for file in data.set.info["files"]]
            report = score_by_file(away, labels, data.file[data.test], names, threshold)
            entry["test"] = report.to_json()
            text += (f"{one.role} {one.name} ({one.parameters:,} parameters, threshold {threshold:.4g}), test files\n"
                     f"{score_table(report.rows())}\n")
            if one.is_part:
                parts[one.name] = report
            if one.name == "fusion":
                entry["warnings"] = fusion_warnings(report, parts)
                text += "".join(f"warning: {one.role} fusion is worse than one of its parts. {line}\n" for line in entry["warnings"])
                text += _ADVICE if entry["warnings"] else ""
            curves.setdefault(one.role, {})[one.name] = {
                "roc": plain(roc_curve(away, labels)), "precision_recall": plain(precision_recall_curve(away, labels))}
    text += "graphs held out\n" + score_table(held_out)
    if write:
        for name, content in (("json", json.dumps({**told, "curves": curves}, indent=1, ensure_ascii=False) + "\n"), ("txt", text)):
            with replaced(folder / f"evaluation.{name}") as partial:
                partial.write_text(content, "utf-8")
    return told, text


def _detectors_of(options: Options, data: Data, role: str, folder: pathlib.Path) -> Iterator[_Detector]:
    """Yields the detectors of a role that are there, in the order of the stages."""
    autoencoder: Any = None
    believed: Any = None
    if model_path(folder, Task(role, "autoencoder")).exists():
        autoencoder = load_model(options, data, Task(role, "autoencoder"), folder)
        yield _Detector(role, "vgae", _count(autoencoder), functools.partial(_errors, autoencoder, data), False, True)
    for stage, name in _CLASSIFIERS.items():
        if model_path(folder, Task(role, stage)).exists():
            classifier = load_model(options, data, Task(role, stage), folder)
            believed = classifier if stage == options.fusion_gat else believed
            yield _Detector(role, name, _count(classifier), functools.partial(_chances, classifier, data),
                            is_part=classifier is believed)
    if model_path(folder, Task(role, "fusion")).exists() and autoencoder is not None and believed is not None:
        network = load_fusion(options, data, role, folder)
        yield _Detector(role, "fusion", _count(network), lambda graphs: network.scores(fusion_states(autoencoder, believed, data.read(graphs))))


def _errors(autoencoder: Any, data: Data, graphs: np.ndarray) -> np.ndarray:
    batch = data.read(graphs)
    return graph_errors(autoencoder(batch), batch).cpu().numpy()


def _chances(classifier: Any, data: Data, graphs: np.ndarray) -> np.ndarray:
    return torch.softmax(classifier(data.read(graphs)), 1)[:, 1].cpu().numpy()


def _originals(options: Options, data: Data) -> Iterator[_Detector]:
    for name, student in originals_of(options).items():
        def ask(graphs: np.ndarray, student: OriginalStudent = student) -> np.ndarray:
            batch = data.set.read(graphs)
            return torch.sigmoid(student(original_features(batch, data.set.vocabulary), graphs_of(batch))).numpy()

        yield _Detector("original", name, _count(student), ask)


def originals_of(options: Options) -> dict[str, OriginalStudent]:
    """Reads the published students that the options name, by their files' names. Errors: of load_original(); ValueError."""
    if not options.original_students:
        return {}
    named = pathlib.Path(options.original_students)
    found = {}
    for path in sorted(named.glob("*.safetensors")) if named.is_dir() else [named]:
        try:
            path.name.encode()
        except UnicodeEncodeError:  # Its name is part of evaluation.json.
            raise ValueError(f"original_students: the name of a file in {path.parent} is not UTF-8; rename it") from None
        found[path.stem] = load_original(path)
    return found


def _count(model: torch.nn.Module) -> int:
    return sum(one.numel() for one in model.parameters())
