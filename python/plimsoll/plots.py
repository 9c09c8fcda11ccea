# SPDX-License-Identifier: Apache-2.0
"""Plots of a run from the files in its folder, by matplotlib.

    python -m plimsoll.plots RUN            # RUN/plots/roc.svg, …

Requires matplotlib: `pip install matplotlib`.
Threads: one call at a time for one run.
Memory:  evaluation.json, at most 64 MiB, and 500 points a line.
"""
from __future__ import annotations

import argparse
import json
import os
import pathlib
import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from .core._folders import replaced
from .errors import CorruptError, NotFoundError

if TYPE_CHECKING:
    from matplotlib.axes import Axes

__all__ = ["can_kd"]

_EVALUATION_BYTES = 64 << 20
_LINE_BYTES = 64 << 10  # No event is longer than 4 KiB.
_POINTS = 500
_NAME_CHARACTERS = 64  # Most characters of a name in a legend.
# Okabe and Ito's palette, told apart by colour-blind readers too; then again with dashes.
_COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
_DASHES = ("-", "--", ":")
_QUANTILES = {95: ":", 75: "--", 50: "-", 25: "--", 5: ":"}  # Line styles of difficulty's quantiles, in per cent, largest first.
# Words stay words, names are no formulas, and the same run gives the same bytes.
_SETTINGS = {"svg.fonttype": "none", "svg.hashsalt": "plimsoll", "text.parse_math": False}


def can_kd(run: str | os.PathLike[str]) -> list[pathlib.Path]:
    """Draws a run of can-kd into RUN/plots as SVG. Returns the files.

        roc.svg, precision_recall.svg   all models, on the test files
        confusion_ROLE_MODEL.svg        the test graphs, at the model's threshold
        difficulty_TASK.svg             normal graphs by epoch, with the curriculum's threshold

    May be called at any time: a plot is replaced once the new one is whole. Evaluations are read from
    RUN/evaluation.json, epochs from RUN/events.jsonl.

    Requires: matplotlib.
    Errors:   ImportError without it; NotFoundError (no run of can-kd there, nothing to draw yet);
              CorruptError; OSError.
    """
    figure_class, settings = _matplotlib()
    folder = pathlib.Path(run)
    if not _is_can_kd(folder / "run.toml"):
        raise NotFoundError(f"{folder}: no run of can-kd there")
    evaluation = _evaluation(folder / "evaluation.json")
    drawn: list[pathlib.Path] = []
    with settings(_SETTINGS):
        def plot(name: str, title: str, draw: Any, *given: Any) -> None:
            figure = figure_class(figsize=(6, 5), layout="constrained")
            axes = figure.subplots()
            axes.set_title(_printable(title), loc="left")
            draw(axes, *given)
            drawn.append(_save(figure, folder / "plots" / f"{name}.svg"))

        curves = evaluation.pop("curves", {})
        if curves:
            plot("roc", "ROC, test files", _draw_curves, evaluation, curves, "roc", "fpr", "recall", "auc")
            plot("precision_recall", "Precision, test files", _draw_curves, evaluation, curves,
                 "precision_recall", "recall", "precision", "pr_auc")
        for role, model in _models(evaluation):
            scores = evaluation[role][model].get("test", {}).get("all")
            if scores:
                plot(f"confusion_{role}_{model}", f"{role} {model}, test files", _draw_confusion, scores)
        for task, epochs in _difficulties(folder / "events.jsonl").items():
            plot(f"difficulty_{task}", f"Difficulty of normal graphs, {task}", _draw_difficulty, epochs)
    if not drawn:
        raise NotFoundError(f"{folder}: nothing to draw yet; `plimsoll resume {folder} --stage evaluation` "
                            "evaluates what is trained")
    return drawn


def _matplotlib() -> tuple[Any, Any]:
    """Returns the class Figure, which needs no display, and rc_context()."""
    try:
        from matplotlib import rc_context
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError("plimsoll.plots needs matplotlib: pip install matplotlib") from error
    return Figure, rc_context


def _is_can_kd(path: pathlib.Path) -> bool:
    try:
        with path.open("rb") as file:
            return b'\nrecipe = "can-kd"\n' in file.read(4096)
    except FileNotFoundError:
        return False


def _evaluation(path: pathlib.Path) -> dict[str, Any]:
    """Returns the content of RUN/evaluation.json; {} before the first evaluation."""
    try:
        with path.open("rb") as file:
            raw = file.read(_EVALUATION_BYTES + 1)
    except FileNotFoundError:
        return {}
    try:
        found = json.loads(raw) if len(raw) <= _EVALUATION_BYTES else None
    except ValueError:
        found = None
    if not isinstance(found, dict):
        raise CorruptError(f"{path}: not what an evaluation writes")
    return found


def _models(evaluation: dict[str, Any]) -> Iterator[tuple[str, str]]:
    for role, models in evaluation.items():
        for model in models:
            yield role, model


def _difficulties(path: pathlib.Path) -> dict[str, dict[int, dict[str, Any]]]:
    """Returns difficulties by task and epoch. An epoch that a resumed run repeats has the same numbers."""
    found: dict[str, dict[int, dict[str, Any]]] = {}
    with path.open("rb") as events:
        while line := events.readline(_LINE_BYTES):
            if b'"curriculum/difficulty_' not in line:
                continue
            try:
                event = json.loads(line)
            except ValueError:  # Cut short by a kill.
                continue
            found.setdefault(event["task"], {})[event["epoch"]] = {
                name: value for name, value in event.items() if name.startswith("curriculum/")}
    return found


def _draw_curves(axes: Axes, evaluation: dict[str, Any], curves: dict[str, Any], kind: str, x: str, y: str,
                 area: str) -> None:
    if kind == "roc":
        axes.plot([0, 1], [0, 1], color="#999999", linestyle=(0, (4, 4)), linewidth=1)
    for at, (role, model) in enumerate(_models(curves)):
        points = curves[role][model][kind]
        beneath = evaluation[role][model]["test"]["all"][area]
        name = _short(f"{role} {model}") + ("" if beneath is None else f" ({beneath:.4f})")
        axes.plot(_numbers(points[x]), _numbers(points[y]), color=_COLOURS[at % len(_COLOURS)],
                  linestyle=_DASHES[at // len(_COLOURS) % len(_DASHES)], label=name)
    axes.set(xlim=(-0.01, 1.01), ylim=(-0.01, 1.01), aspect="equal",
             xlabel="false positive rate" if x == "fpr" else x, ylabel=y)
    _legend(axes)


def _draw_confusion(axes: Axes, scores: dict[str, Any]) -> None:
    counts = [[scores["tn"], scores["fp"]], [scores["fn"], scores["tp"]]]
    shares = [[count / max(1, sum(row)) for count in row] for row in counts]
    axes.imshow(shares, cmap="Blues", vmin=0, vmax=1)
    for row in (0, 1):
        for column in (0, 1):
            share = f"{100 * shares[row][column]:.2f} %" if sum(counts[row]) else "-"
            axes.text(column, row, f"{counts[row][column]}\n{share}", ha="center", va="center",
                      color="white" if shares[row][column] > 0.5 else "black")
    threshold = "infinite" if scores["threshold"] is None else f"{scores['threshold']:.6g}"
    axes.set_xticks([0, 1], ["normal", "attack"])
    axes.set_yticks([0, 1], ["normal", "attack"])
    axes.set(xlabel=f"called\n{scores['graphs']} graphs, threshold {threshold}", ylabel="is")


def _draw_difficulty(axes: Axes, epochs: dict[int, dict[str, Any]]) -> None:
    every = -(-len(epochs) // _POINTS)
    xs = sorted(epochs)[::every]
    lines = [(f"{percent} %" if percent != 50 else "median", f"difficulty_{percent}", _COLOURS[0], dashes)
             for percent, dashes in _QUANTILES.items()]
    for name, key, colour, dashes in [*lines, ("threshold", "threshold", _COLOURS[1], "-")]:
        axes.plot(xs, _numbers([epochs[x].get(f"curriculum/{key}") for x in xs]), color=colour,
                  linestyle=dashes, label=name, marker="." if len(xs) == 1 else "")
    axes.set(xlabel="epoch", ylabel="difficulty")
    locator: Any = axes.xaxis.get_major_locator()
    locator.set_params(integer=True)
    _legend(axes)


def _legend(axes: Axes) -> None:
    """Draws the legend beside the axes, and makes the figure large enough for it."""
    names = axes.get_legend_handles_labels()[1]
    figure: Any = axes.figure
    figure.set_size_inches(5.5 + 0.09 * max(map(len, names)), max(5.0, 0.6 + 0.22 * len(names)))
    figure.legend(loc="outside right upper", frameon=False)


def _numbers(values: list[Any]) -> list[float]:
    """Returns the values as floats; null, JSON's form of NaN, interrupts a line."""
    return [float("nan") if value is None else float(value) for value in values]


def _printable(name: str) -> str:
    return "".join(letter if letter.isprintable() else "?" for letter in name)


def _short(name: str) -> str:
    name = _printable(name)
    return name if len(name) <= _NAME_CHARACTERS else "…" + name[-_NAME_CHARACTERS:]


def _save(figure: Any, path: pathlib.Path) -> pathlib.Path:
    path.parent.mkdir(exist_ok=True)
    with replaced(path, durable=False) as partial:
        figure.savefig(partial, format="svg", metadata={"Date": None})
    return path


def main(arguments: list[str] | None = None) -> int:
    """Runs the command line. Returns the exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m plimsoll.plots", description="Draw a run of can-kd into RUN/plots, as SVG.",
        epilog="Example: python -m plimsoll.plots run/")
    parser.add_argument("run", metavar="RUN", help="Folder of the run")
    try:
        for path in can_kd(parser.parse_args(arguments).run):
            print(path)
    except (ImportError, OSError, LookupError, CorruptError) as error:
        print(f"plimsoll.plots: error: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
