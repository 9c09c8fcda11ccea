# SPDX-License-Identifier: Apache-2.0
"""Figures in READMEs are those of the records: what `bench/run --readme` would write is what is there (R29)."""
import json
import pathlib
import sys

import pytest

ROOT = pathlib.Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))
from bench import readme


def test_r29_the_readmes_are_what_the_command_would_write():
    for path, text in readme.written(ROOT).items():
        assert path.read_text("utf-8") == text, f"{path.relative_to(ROOT)}: run bench/run --readme"


def test_r29_the_worst_record_stands_beside_the_median(tmp_path):
    record = {"command": "bench/run w_x --no-build --rows 5", "unit": "ms", "bar": 50.0, "pass": True, "machine": "m",
              "date": "2026-01-01"}
    values = [(12.0, "aaa", True), (13.5, "bbb", True), (60.0, "ccc", False)]

    def records(bar, better):
        return [dict(record, value=value, commit=commit, bar=bar, peers={"max": {"commit": 10 * value}},
                     **{"pass": passed != better})
                for value, commit, passed in values]
    less = readme.folder_figures(records(50.0, False))
    assert "| `--rows 5` | 3 (2) | 13.5 ms | 60 | 50 | `ccc`, 2026-01-01 | m |" in less
    assert "max commit 600 (120 … 600)" in less
    more = readme.folder_figures(records(50.0, True))  # The same values where more is better.
    assert "| 3 (1) | 13.5 ms | 12 | 50 |" in more
    assert "No run is recorded" in readme.folder_figures([])
    bench = tmp_path / "bench"
    (bench / "w_x").mkdir(parents=True)
    (bench / "w_x" / "results.jsonl").write_text("".join(json.dumps(one) + "\n" for one in records(50.0, False)))
    assert "| `w_x` | `--rows 5` | 3 (2) | 13.5 ms | 60 |" in readme.figures_of(bench, ["w_x"])


def test_curves_are_a_table_of_steps_and_no_figures():
    record = {"command": "bench/run w_x --curves", "unit": "x", "bar": 1, "value": 1, "pass": True, "machine": "m", "commit": "a",
              "date": "2026-01-01", "peers": {"rows": 7, "curves": {
                  "ours": {"6": [3.0, 1.0, 2.0], "12": [1.5]}, "other": {"12": [2.5, 2.5]}}}}
    text = readme.folder_figures([record])
    assert "- `--curves`: rows 7\n" in text and text.endswith(
        "| step | ours | other |\n|---|---|---|\n| 6 | 2.000 (1.000 … 3.000) |  |\n"
        "| 12 | 1.500 (1.500 … 1.500) | 2.500 (2.500 … 2.500) |\n")


def test_tables_are_drawn_from_the_newest_record_and_are_no_figures():
    record = {"command": "bench/run w_x", "unit": "x", "bar": 1, "value": 1, "pass": True, "machine": "m", "commit": "a", "date": "2026-01-01",
              "peers": {"rows": 7, "tables": {"nodes": {"1": {"MB": 0}, "1,024": {"MB": 80.0, "ms": 1234.5}}}}}
    text = readme.folder_figures([record])
    assert "- `by default`: rows 7\n" in text and text.endswith(
        "| nodes | MB | ms |\n|---|---|---|\n| 1 | 0 |  |\n| 1,024 | 80 | 1,234 |\n")


def test_r29_text_outside_the_comments_is_left_alone_and_missing_comments_are_named():
    path = pathlib.Path("bench/w_x/README.md")
    text = f"# w_x\n\n{readme.BEGIN}\nold\n{readme.END}\n\nbehind\n"
    new = readme.with_figures(text, "| new |\n", path)
    assert new == f"# w_x\n\n{readme.BEGIN}\n\n| new |\n\n{readme.END}\n\nbehind\n"
    assert readme.with_figures(new, "| new |\n", path) == new
    with pytest.raises(ValueError, match="bench/w_x/README.md: expected one line"):
        readme.with_figures("# w_x\n", "", path)
