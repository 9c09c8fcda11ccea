# SPDX-License-Identifier: Apache-2.0
"""plimsoll.plots: well-formed pictures whose marks are where the numbers are, for any name and any number."""
import json
import re
import subprocess
import sys
import xml.etree.ElementTree as ElementTree

import pytest

from plimsoll import plots
from plimsoll.errors import CorruptError, NotFoundError

SVG = "{http://www.w3.org/2000/svg}"
SCORES = {"graphs": 1000, "tn": 880, "fp": 20, "fn": 25, "tp": 75, "threshold": 0.5, "auc": 0.75, "pr_auc": 0.5}
CURVE = {"roc": {"fpr": [0, 0.25, 1], "recall": [0, 0.75, 1], "threshold": [None, 1, 0]},
         "precision_recall": {"recall": [0.5, 1], "precision": [1, 0.1], "threshold": [1, 0]}}


@pytest.fixture
def run(tmp_path):
    """A folder with what a run of can-kd leaves; made anew with other contents at each call."""
    pytest.importorskip("matplotlib")
    def make(models, epochs=()):
        (tmp_path / "run.toml").write_text('# Every option.\nrecipe = "can-kd"\n[can-kd]\n')
        document = {"curves": {}}
        for (role, model), (scores, curves) in models.items():
            document.setdefault(role, {})[model] = {"test": {"all": scores}}
            document["curves"].setdefault(role, {})[model] = curves
        (tmp_path / "evaluation.json").write_text(json.dumps(document))
        lines = [json.dumps({"event": "epoch", "task": "teacher_gat_curriculum", "epoch": epoch, **{
            f"curriculum/{name}": value for name, value in zip(
                ("difficulty_5", "difficulty_25", "difficulty_50", "difficulty_75", "difficulty_95", "threshold"),
                values)}}) for epoch, values in epochs]
        (tmp_path / "events.jsonl").write_text("".join(line + "\n" for line in lines) + '{"event":"epoch","curri')
        return tmp_path
    return make


def drawn(folder, name):
    """The words of a plot, and its lines as points with style; ParseError when it is not well-formed."""
    root = ElementTree.parse(folder / "plots" / f"{name}.svg").getroot()
    words = ["".join(one.itertext()).strip() for one in root.iter(f"{SVG}text")]
    lines = []
    for path in root.iter(f"{SVG}path"):
        # Matplotlib's own width: of curves; those of the legend are not cut off at a frame.
        if "stroke-width: 1.5" in path.get("style", "") and path.get("clip-path") and path.get("d"):
            points = [(float(x), float(y)) for x, y in re.findall(r"[ML] ([-\d.]+) ([-\d.]+)", path.get("d"))]
            lines.append((points, path.get("style")))
    return words, lines


def test_curves_are_drawn_where_their_points_are(run):
    nothing = {kind: {name: [] for name in CURVE[kind]} for kind in CURVE}
    folder = run({("teacher", "vgae"): (SCORES, CURVE),
                  ("student", "gat_normal"): ({**SCORES, "auc": None, "pr_auc": None}, nothing),
                  ("original", "$A&B_<é>$"): ({**SCORES, "auc": 0.125}, CURVE)})
    files = plots.can_kd(folder)
    assert [file.name for file in files] == [
        "roc.svg", "precision_recall.svg", "confusion_teacher_vgae.svg", "confusion_student_gat_normal.svg",
        "confusion_original_$A&B_<é>$.svg"]
    words, lines = drawn(folder, "roc")
    for word in ("ROC, test files", "teacher vgae (0.7500)", "student gat_normal", "original $A&B_<é>$ (0.1250)",
                 "false positive rate", "recall"):
        assert word in words, (word, words)
    curves = [points for points, _ in lines if len(points) == 3]
    assert len(curves) == 2 and curves[0] == curves[1]
    (left, bottom), (x, y), (right, top) = curves[0]
    assert (x - left) / (right - left) == pytest.approx(0.25, abs=1e-3)
    assert (bottom - y) / (bottom - top) == pytest.approx(0.75, abs=1e-3)
    assert len({style for _, style in lines}) >= 2
    assert "precision" in drawn(folder, "precision_recall")[0]


def test_a_confusion_matrix_shows_counts_and_shares_of_its_rows(run):
    folder = run({("student", "fusion"): (SCORES, CURVE), ("student", "vgae"): (
        {**SCORES, "graphs": 0, "tn": 0, "fp": 0, "fn": 0, "tp": 0, "threshold": None}, CURVE)})
    plots.can_kd(folder)
    words = " ".join(drawn(folder, "confusion_student_fusion")[0])
    for word in ("student fusion, test files", "880", "97.78 %", "20", "2.22 %", "25", "25.00 %", "75", "75.00 %",
                 "1000 graphs, threshold 0.5", "normal", "attack"):
        assert word in words, word
    assert "0 graphs, threshold infinite" in " ".join(drawn(folder, "confusion_student_vgae")[0])


def test_difficulty_is_drawn_over_epochs_once_each_and_with_gaps(run):
    epochs = [(e, [1, 2, 3, 4, 5, 4.5]) for e in (0, 1, 2, 1)]  # Epoch 1 was done again by a resumed run.
    folder = run({}, [*epochs, (3, [None] * 6), (4, [1, 2, 3, 4, 5, 4.5])])
    assert [file.name for file in plots.can_kd(folder)] == ["difficulty_teacher_gat_curriculum.svg"]
    words, lines = drawn(folder, "difficulty_teacher_gat_curriculum")
    assert {"5 %", "25 %", "median", "75 %", "95 %", "threshold", "epoch", "difficulty"} <= set(words)
    six = [points for points, _ in lines if len({x for x, _ in points}) > 2]
    assert len(six) == 6
    for points in six:
        assert len({y for _, y in points}) == 1  # Flat, and nothing is drawn at the gap.
        assert len(points) <= 4


@pytest.mark.parametrize("epochs", [
    [(5, [1, 1, 1, 1, 1, 1])], [(0, [0] * 6), (1, [None] * 6)], [(0, [-3.4e38, 0, 0, 0, 3.4e38, 0])],
    [(0, [1e-30, 2e-30, 3e-30, 4e-30, 5e-30, 3e-30])], [(e, [e] * 6) for e in range(1501)]])
def test_any_difficulties_are_drawn(run, epochs):
    folder = run({}, epochs)
    plots.can_kd(folder)
    for points, _ in drawn(folder, "difficulty_teacher_gat_curriculum")[1]:
        assert len(points) <= 502


def test_many_models_and_any_names_are_told_apart(run):
    names = [f"{'x' * 100}{k}" for k in range(22)] + ["\x01\n\t]]>"]
    folder = run({("original", name): (SCORES, CURVE) for name in names})
    plots.can_kd(folder)
    words, lines = drawn(folder, "roc")
    assert len(lines) == 23
    assert len({style for points, style in lines if len(points) == 3}) == 21
    assert sum(word.startswith("…xxx") for word in words) == 22
    assert any("???]]>" in word for word in words)


def test_the_same_run_is_drawn_in_the_same_bytes(run):
    folder = run({("teacher", "vgae"): (SCORES, CURVE)})
    texts = [[file.read_bytes() for file in plots.can_kd(folder)] for _ in range(2)]
    assert texts[0] == texts[1]
    assert not list(folder.glob("plots/*.partial"))


def test_what_cannot_be_drawn_is_named(run, tmp_path):
    with pytest.raises(NotFoundError, match="no run of can-kd"):
        plots.can_kd(tmp_path)
    folder = run({})
    with pytest.raises(NotFoundError, match="plimsoll resume .* --stage evaluation"):
        plots.can_kd(folder)
    (folder / "evaluation.json").write_text('{"curves": ')
    with pytest.raises(CorruptError, match="evaluation.json"):
        plots.can_kd(folder)
    (folder / "run.toml").write_text("[cosir]\n")
    with pytest.raises(NotFoundError, match="no run of can-kd"):
        plots.can_kd(folder)


def command(*words, code="import runpy; runpy.run_module('plimsoll.plots', run_name='__main__')"):
    return subprocess.run([sys.executable, "-c", code, *map(str, words)], text=True, capture_output=True, timeout=120,
                          check=False)


def test_the_command_prints_what_it_drew(run, tmp_path):
    folder = run({("teacher", "vgae"): (SCORES, CURVE)})
    done = subprocess.run([sys.executable, "-m", "plimsoll.plots", str(folder)], text=True, capture_output=True,
                          timeout=120, check=False)
    assert done.returncode == 0 and done.stderr == "", done.stderr
    assert done.stdout.splitlines() == [str(folder / "plots" / f"{name}.svg") for name in (
        "roc", "precision_recall", "confusion_teacher_vgae")]
    done = command(tmp_path / "nowhere")
    assert done.returncode == 1 and done.stderr == f"plimsoll.plots: error: {tmp_path}/nowhere: no run of can-kd there\n"
    assert "Example" in command("--help").stdout


def test_without_matplotlib_the_extra_is_named(tmp_path):
    done = command(tmp_path, code="import sys; sys.modules['matplotlib'] = None; import runpy; "
                                  "runpy.run_module('plimsoll.plots', run_name='__main__')")
    assert done.returncode == 1 and done.stdout == ""
    assert done.stderr == "plimsoll.plots: error: plimsoll.plots needs matplotlib: pip install matplotlib\n"
