# SPDX-License-Identifier: Apache-2.0
"""Writes the figures of READMEs from bench/*/results.jsonl, between two comments each.

A folder's README gets a line for each way in which it was run: how many records there are, the median of
their values and the worst, the bar, and of the newest record commit, date and machine; below, what the
newest says beside its value, and between what that was in the others. bench/README.md gets a line for each folder. Everything outside the
comments is left alone.

Threads: none.   Memory: the records.
"""
from __future__ import annotations

import json
import pathlib
import statistics
from typing import Any
from collections.abc import Iterator, Sequence

BEGIN = "<!-- figures: written by `bench/run --readme` from the records -->"
END = "<!-- end of figures -->"
FIGURES_MOST = 70  # Beside the value; those of more are in results.jsonl alone.


def records_of(folder: pathlib.Path) -> list[dict[str, Any]]:
    """The recorded runs, oldest first; none where there is no file."""
    path = folder / "results.jsonl"
    if not path.exists():
        return []
    return [json.loads(line) for line in path.read_text("utf-8").splitlines() if line.strip()]


def way_of(record: dict[str, Any]) -> str:
    """Its options, but for those that change nothing: `by default` where there are none."""
    words = record["command"].split()
    options = [word for word in words[2:] if word not in ("--no-build", "--no-record")]
    return " ".join(options) or "by default"


def more_is_better(records: list[dict[str, Any]]) -> bool:
    """Which side of the bar passes, from records of one unit and bar; equal to it: less is better."""
    for record in sorted(records, key=lambda one: not one["pass"]):
        if record["value"] != record["bar"]:
            return (record["value"] > record["bar"]) == record["pass"]
    return False


def number(value: float) -> str:
    """Three digits or four, as people write them."""
    size = abs(value)
    if value == int(value) and size < 1e15:
        return f"{int(value):,}"
    return f"{value:,.0f}" if size >= 100 else f"{value:.1f}" if size >= 10 else f"{value:.4g}"


def figures_in(value: Any, name: str = "") -> Iterator[tuple[str, float]]:
    """Every number of nested objects and lists, with the names that lead to it."""
    if isinstance(value, dict):
        for key, inner in value.items():
            yield from figures_in(inner, f"{name} {key}".strip())
    elif isinstance(value, list):
        for at, inner in enumerate(value):
            yield from figures_in(inner, f"{name} {at + 1}")
    elif isinstance(value, (int, float)) and not isinstance(value, bool):
        yield name, value


def ways(records: list[dict[str, Any]]) -> dict[tuple[str, str], list[dict[str, Any]]]:
    """Records by what was run and in which unit it answers, in order of first appearance."""
    by_way: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for record in records:
        by_way.setdefault((way_of(record), record["unit"]), []).append(record)
    return by_way


def median_and_worst(group: list[dict[str, Any]], records: list[dict[str, Any]]) -> tuple[float, float]:
    """Of a way's values; which end is the worst, all records of its unit and bar say."""
    values = [record["value"] for record in group]
    like = [one for one in records if (one["unit"], one["bar"]) == (group[-1]["unit"], group[-1]["bar"])]
    return statistics.median(values), (min if more_is_better(like) else max)(values)


def beside_it(name: str, value: float, group: list[dict[str, Any]]) -> str:
    """A figure of the newest record, and what it was in all records that have it."""
    all_of_them = [inner for record in group for at, inner in figures_in(record["peers"]) if at == name]
    least, most = number(min(all_of_them)), number(max(all_of_them))
    return f"{name} {number(value)}" + (f" ({least} … {most})" if least != most else "")


def folder_figures(records: list[dict[str, Any]]) -> str:
    """The block of a folder's README."""
    if not records:
        return "No run is recorded: figures in this file are of runs that `results.jsonl` does not have.\n"
    lines = ["| run | records (bar met) | median | worst | bar | newest: commit, date | machine |",
             "|---|---|---|---|---|---|---|"]
    beside, drawn = [], []
    for (way, unit), group in ways(records).items():
        median, worst = median_and_worst(group, records)
        newest = group[-1]
        met = sum(record["pass"] for record in group)
        lines.append(f"| `{way}` | {len(group)} ({met}) | {number(median)} {unit} | {number(worst)} | "
                     f"{number(newest['bar'])} | `{newest['commit']}`, {newest['date']} | {newest['machine']} |")
        figures = list(figures_in({name: one for name, one in newest["peers"].items() if name not in ("curves", "tables")}))
        if 0 < len(figures) <= FIGURES_MOST:
            beside.append(f"- `{way}`: " + ", ".join(beside_it(name, value, group) for name, value in figures))
        if "curves" in newest["peers"]:
            drawn += ["", f"`{way}`, median (least … most):", "", *table_of(newest["peers"]["curves"])]
        for title, lines_of in newest["peers"].get("tables", {}).items():
            columns = list(dict.fromkeys(name for one in lines_of.values() for name in one))
            drawn += ["", f"| {title} | {' | '.join(columns)} |", "|---" * (1 + len(columns)) + "|",
                      *(f"| {at} | {' | '.join(number(one[name]) if name in one else '' for name in columns)} |" for at, one in lines_of.items())]
    if beside:
        lines += ["", "Beside it, in the newest record of each (least … most of all, where they differ):", "", *beside]
    return "\n".join([*lines, *drawn]) + "\n"


def table_of(curves: dict[str, dict[str, list[float]]]) -> list[str]:
    """Curves as lines of a table: of each name the values at each step, of several seeds."""
    steps = sorted({step for curve in curves.values() for step in curve}, key=int)
    cells = [[f"{statistics.median(one):.3f} ({min(one):.3f} … {max(one):.3f})" if (one := curve.get(step)) else ""
              for curve in curves.values()] for step in steps]
    return [f"| step | {' | '.join(curves)} |", "|---" * (1 + len(curves)) + "|",
            *(f"| {step} | {' | '.join(row)} |" for step, row in zip(steps, cells))]


def figures_of(bench: pathlib.Path, names: Sequence[str]) -> str:
    """A line for each way in which benchmarks of these names were run."""
    lines = ["| name | run | records (bar met) | median | worst | bar | newest: commit, date |",
             "|---|---|---|---|---|---|---|"]
    for name in names:
        records = records_of(bench / name)
        for (way, unit), group in ways(records).items():
            median, worst = median_and_worst(group, records)
            newest = group[-1]
            met = sum(record["pass"] for record in group)
            lines.append(f"| `{name}` | `{way}` | {len(group)} ({met}) | {number(median)} {unit} | "
                         f"{number(worst)} | {number(newest['bar'])} | `{newest['commit']}`, {newest['date']} |")
    return "\n".join(lines) + "\n"


def with_figures(text: str, figures: str, path: pathlib.Path) -> str:
    """`text` with `figures` between its comments. Raises ValueError where it has not exactly one pair."""
    if text.count(BEGIN) != 1 or text.count(END) != 1 or text.index(BEGIN) > text.index(END):
        raise ValueError(f"{path}: expected one line {BEGIN!r} and, below, one {END!r}")
    before, rest = text.split(BEGIN)
    return f"{before}{BEGIN}\n\n{figures}\n{END}{rest.split(END)[1]}"


def written(root: pathlib.Path) -> dict[pathlib.Path, str]:
    """What each README should be."""
    bench = root / "bench"
    recorded = [path.parent.name for path in sorted(bench.glob("*/results.jsonl"))]
    wanted = {bench / "README.md": figures_of(bench, recorded)}
    for path in sorted(bench.glob("*/README.md")):
        wanted[path] = folder_figures(records_of(path.parent))
    return {path: with_figures(path.read_text("utf-8"), figures, path) for path, figures in wanted.items()}
