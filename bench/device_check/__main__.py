# SPDX-License-Identifier: Apache-2.0
"""Runs the checks of a device one after another, each in a process and a time of its own; tools/device_check.sh calls it.

Records are a line of JSON each, as those of other benchmarks, with the card's name. Exit status: 0 all that ran hold, 1 one missed
its bar, 2 could not run.

Reading order: result.py, device.py, then a check; processes.py, and this file, which calls them all.
Threads: none.   Memory: of the checks, one at a time, and torch's modules.
"""
from __future__ import annotations

import argparse
import dataclasses
import importlib
import importlib.metadata
import json
import os
import pathlib
import sys
import time
from typing import Any

from bench.device_check.device import closed, opened
from bench.device_check.processes import called
from bench.device_check.result import CannotRun
from bench.provenance import ROOT, commit, machine

TOTAL_SECONDS = 560


@dataclasses.dataclass(frozen=True)
class Check:
    """A check: its number in the design, its module, and the seconds that it may take on a card."""

    number: int
    name: str
    title: str
    seconds: int


CHECKS = (Check(1, "limit", "limit by fraction, random requests", 50), Check(2, "context", "context, workspaces, pinned memory", 30),
          Check(3, "copies", "copies of 405 MB", 40), Check(4, "streamed", "streamed weights, order of streams", 40),
          Check(5, "refusals", "refused steps", 50), Check(5, "kills", "a run killed and resumed", 75), Check(6, "admission", "admission of three sizes", 40),
          Check(9, "cross_entropy", "linear_cross_entropy", 30), Check(7, "tuned", "7B LoRA, weights streamed", 200),
          Check(8, "tokens", "the same at fewer tokens", 100))
NAMES = tuple(one.name for one in CHECKS)
SIMULATED_SECONDS = 300  # No card is held: only a check that hangs is ended.
START_SECONDS = 120  # Of a device's first use.
WITHOUT_PLIMSOLL = ("copies",)  # Run where the package could not be built.
FORKS = ("kills",)  # Their processes use the device, and they do not.


@dataclasses.dataclass
class Outcome:
    """How a check went: holds, missed, broke, cannot run or skipped; what it told; why where it told nothing."""

    check: Check
    state: str
    told: dict[str, Any] = dataclasses.field(default_factory=dict)
    why: str = ""
    seconds: float = 0.0


def checked(name: str, device: str) -> dict[str, Any]:
    """Runs a check in this process; returns its result, or why it cannot run here."""
    try:
        module = importlib.import_module(f"bench.device_check.{name}")
        made = closed(device) if name in FORKS else opened(device, name not in WITHOUT_PLIMSOLL)
        return dict(module.check(made).as_json())
    except CannotRun as reason:
        return {"cannot": str(reason)}


def run_one(check: Check, device: str, left: float) -> Outcome:
    """Runs a check in a process of its own, unless its time is more than what is left."""
    most = check.seconds if device == "cuda" else SIMULATED_SECONDS
    if device == "cuda" and most > left:
        return Outcome(check, "skipped", why=f"it may take {most} s, and {max(0, left):.0f} are left")
    one = called(lambda: checked(check.name, device), most)
    if one.told is None:
        return Outcome(check, "broke", why=one.why, seconds=one.seconds)
    if "cannot" in one.told:
        return Outcome(check, "cannot run", why=one.told["cannot"], seconds=one.seconds)
    return Outcome(check, "holds" if one.told["holds"] else "missed", one.told, seconds=one.seconds)


def card_of(device: str) -> tuple[str, str]:
    """Returns the card's name, and "" or why there is none."""
    def named() -> dict[str, Any]:
        try:
            return {"card": opened(device, needs_plimsoll=False).card}
        except CannotRun as reason:
            return {"cannot": str(reason)}

    one = called(named, START_SECONDS)
    told = one.told or {"cannot": one.why}
    return told.get("card", ""), told.get("cannot", "")


def preload() -> str:
    """Imports what every check needs, and uses nothing of it; returns "" or why torch is not there."""
    try:
        import torch._dynamo  # noqa: F401  The first optimizer imports it.
    except ImportError as error:
        return f"no torch: {error}"
    try:
        import plimsoll  # noqa: F401
    except ImportError:
        pass  # Each check that needs it says so.
    return ""


def record(outcome: Outcome, device: str, card: str) -> dict[str, Any]:
    """Returns the line of results.jsonl."""
    told = outcome.told
    return {"name": "device_check", "check": outcome.check.name, "value": told["value"], "unit": told["unit"], "bar": told["bar"],
            "pass": told["holds"], "peers": told["peers"], "lines": told["lines"], "card": card, "device": device,
            "torch": torch_version(), "command": f"tools/device_check.sh --only {outcome.check.name}", "commit": commit(),
            "machine": f"{card}; {machine()}", "seconds": round(outcome.seconds, 1), "date": time.strftime("%Y-%m-%d")}


def torch_version() -> str:
    """Returns torch's version."""
    try:
        return importlib.metadata.version("torch")
    except importlib.metadata.PackageNotFoundError:
        return "none"


def rows_of(outcome: Outcome) -> list[tuple[str, str, str, str, str]]:
    """Returns a check's rows of the table: check, what, expected, measured, verdict."""
    head = f"{outcome.check.number} {outcome.check.name}"
    verdicts = {True: "holds", False: "MISSED", None: "-"}
    rows = [(head, one["what"], one["expected"], one["measured"], verdicts[one["holds"]]) for one in outcome.told.get("lines", ())]
    return rows or [(head, outcome.check.title, "", outcome.why.splitlines()[-1] if outcome.why else "", outcome.state)]


def table(outcomes: list[Outcome]) -> str:
    """Draws what was expected beside what was measured."""
    rows = [("check", "what", "expected", "measured", "")]
    for outcome in outcomes:
        own = rows_of(outcome)
        rows += [own[0], *(("", *one[1:]) for one in own[1:])]
    widths = [max(len(row[column]) for row in rows) for column in range(5)]
    lines = ["  ".join(text.ljust(width) for text, width in zip(row, widths)).rstrip() for row in rows]
    return "\n".join([lines[0], "-" * sum(widths, 8), *lines[1:]])


def status_of(outcomes: list[Outcome]) -> int:
    """Returns the exit status."""
    states = {one.state for one in outcomes}
    if states & {"missed", "broke"}:
        return 1
    return 2 if "cannot run" in states or "holds" not in states else 0


def main() -> int:
    """Runs, records and prints."""
    parser = argparse.ArgumentParser(prog="tools/device_check.sh", description=__doc__.split("\n\n")[0])
    parser.add_argument("--device", choices=("cuda", "sim"), required=True)
    parser.add_argument("--only", action="append", choices=NAMES, help="this check; may be given again")
    parser.add_argument("--out", type=pathlib.Path, help="folder of results.jsonl and table.txt; without it only a card is recorded, in bench/device_check")
    parser.add_argument("--seconds", type=float, default=TOTAL_SECONDS, help="time for all checks, on a card")
    options = parser.parse_args()
    out = options.out or (ROOT / "bench" / "device_check" if options.device == "cuda" else None)
    os.environ.setdefault("MKL_CBWR", "AVX2,STRICT")
    os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")  # Else a process that asks for a card can fork none that uses it.
    if out is not None:
        out.mkdir(parents=True, exist_ok=True)
    end, outcomes = time.monotonic() + options.seconds, []
    card, why = "", preload()
    if not why:
        card, why = card_of(options.device)
    if why:
        print(f"device_check: no check can run: {why}")
        return 2
    for check in CHECKS:
        if options.only and check.name not in options.only:
            continue
        outcome = run_one(check, options.device, end - time.monotonic())
        outcomes.append(outcome)
        print(f"device_check: {check.name}: {outcome.state} ({outcome.seconds:.0f} s){': ' + outcome.why if outcome.why else ''}", flush=True)
        if outcome.told and out is not None:
            with open(out / "results.jsonl", "a", encoding="utf-8") as file:
                file.write(json.dumps(record(outcome, options.device, card)) + "\n")
    drawn = f"{card}, torch {torch_version()}, {commit()}\n\n{table(outcomes)}"
    print(f"\n{drawn}")
    if options.out is not None:
        (options.out / "table.txt").write_text(drawn + "\n", encoding="utf-8")
    return status_of(outcomes)


if __name__ == "__main__":
    sys.exit(main())
