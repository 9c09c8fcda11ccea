# SPDX-License-Identifier: Apache-2.0
"""Random loops of users' own (loop.py), each in a cgroup of its limit: drawn here, run and judged.

A loop ends with the parameters and rows that it has without a limit, bit for bit, or with Plimsoll's
own exception, which names a larger limit. Nothing is ever killed, and parent, workers and shared
memory together stay inside the limit. Pages of code that the loop runs for the first time after its
Governor was made are not held to it: the kernel drops them as it needs (docs/decisions/0020).

What a named limit must do: one of TrainingStep is for the whole loop, and where so little was left that
it could only name one to try, the next one is. Of the others, that of a Governor or a store made before
the first step ("at least") and that of a stop for want of memory, nobody knows what the loop takes
afterwards: with it the loop must come further. The refusal of one operator in a
loop without TrainingStep names none; larger ones are then tried.
"""
import json
import os
import pathlib
import random
import re
import shutil
import subprocess
import sys

from tests.support.cgroup import MemoryCgroup, Run

MIB = 1 << 20
ROOT = pathlib.Path(__file__).resolve().parents[2]
# One thread, so that a loop's heap is the same on every machine; the package comes from PYTHONPATH.
ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1"}

TRIES = 8
LOOP = [sys.executable, "-m", "tests.budget.loop"]

WIDTHS = {"mlp": (64, 256, 1024), "cnn": (4, 16), "transformer": (32, 96)}
# Floats kept for backward, of a position of a sequence and a unit of width, about.
KEPT = {"mlp": 6, "cnn": 160, "transformer": 40}


class Wrong(AssertionError):
    """A run that was killed, passed its limit, or was promised a limit that did not do."""


def drawn_loop(dice: random.Random) -> dict:
    model = dice.choice(list(WIDTHS))
    start = dice.choice(["fork", "fork", "spawn"])
    workers = dice.choice([0, 1, 2, 4] if start == "fork" else [1, 2])
    options = {
        "kind": "loop",
        "model": model,
        "width": dice.choice(WIDTHS[model]),
        "data": dice.choice(["tensors", "numpy", "dict", "ragged"]),
        "length": dice.choice([8, 24]),
        "samples": dice.choice([200, 400, 800]),
        "batch": dice.choice([32, 64, 200]),
        "epochs": dice.choice([1, 2]),
        "workers": workers,
        "start": start,
        "persistent": dice.random() < 0.5,
        "prefetch": dice.choice([1, 2, 4]),
        "worker_mib": dice.choice([0, 0, 20, 80]) if workers else 0,
        "cache_mib": dice.choice([0, 0, 40, 160]),
        "shared_mib": dice.choice([0, 0, 20, 80]),
        "pin": dice.random() < 0.3,
        "table": dice.choice(["", "any_order", "sample_order"]),
        "store_mib": dice.choice([8, 32]),
        "step": dice.choice(["plain", "boundary", "transaction", "admitted"]),
        "torch_seed": dice.randrange(1 << 20),
    }
    beside = _beside(options)
    # What the loop's own memory is declared as: most users look, some do not.
    options["foreign_mib"] = 128 + (0 if dice.random() < 0.3 else beside)
    kept = KEPT[model] * options["batch"] * options["length"] * options["width"] * 4 // MIB
    about = 330 + beside + kept + (options["store_mib"] if options["table"] else 0)
    options["limit_mib"] = int(about * dice.triangular(0.75, 1.5, 1.1))
    options["reads"] = dice.random() < 0.25  # Rows of a second table, in the workers.
    return options


def _beside(options: dict) -> int:
    """MiB that workers, arrays and shared memory take, about."""
    worker = min(options["worker_mib"], options["samples"] // max(options["workers"], 1))
    worker += 30 if options["start"] == "fork" else 180
    return options["workers"] * worker + options["cache_mib"] + options["shared_mib"]


def _emptied(folder: pathlib.Path) -> pathlib.Path:
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    return folder


class References:
    """The same loops without limit or workers, one after the other in one process beside."""

    def __enter__(self) -> "References":
        self.child = subprocess.Popen(LOOP, cwd=ROOT, env=ENVIRONMENT, text=True,
                                      stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        return self

    def __exit__(self, *unused) -> None:
        self.child.stdin.close()
        self.child.wait()

    def digest(self, options: dict, folder: pathlib.Path) -> str:
        print(json.dumps({**options, "limit_mib": 0, "folder": str(_emptied(folder))}),
              file=self.child.stdin, flush=True)
        return json.loads(self.child.stdout.readline())["digest"]


def _inside(options: dict, folder: pathlib.Path, limit_mib: int) -> tuple[Run, dict]:
    what = f"{options} at {limit_mib} MiB"
    given = {**options, "limit_mib": limit_mib, "folder": str(_emptied(folder))}
    with MemoryCgroup(limit_mib * MIB) as group:
        run = group.run([*LOOP, json.dumps(given)], timeout=600, cwd=ROOT, env=ENVIRONMENT)
    if run.oom_kills:
        raise Wrong(f"{what}: {run.oom_kills} kills, status {run.returncode}: {run.stderr[-600:]}")
    if run.returncode != 0:
        raise Wrong(f"{what}: status {run.returncode}: {run.stderr[-1500:]}")
    result = run.last_json
    held = min(run.tree_peak_bytes, run.unmapped_peak_bytes + result.get("code_bytes", limit_mib * MIB))
    if held > limit_mib * MIB:
        raise Wrong(f"{what}: {held >> 10} KiB held by all processes")
    return run, result


def run_loop(options: dict, folder: pathlib.Path, references: References) -> dict:
    """Runs it; returns its line of the record. Raises Wrong."""
    limit, refusals = options["limit_mib"], []
    while True:
        run, result = _inside(options, folder, limit)
        if result["outcome"] == "finished":
            break
        refusals.append({"limit_mib": limit, **result})
        limit = _next_limit(options, refusals)
    if result["digest"] != references.digest(options, folder):
        raise Wrong(f"{options} at {limit} MiB: other bits than without a limit")
    return {**options, "outcome": "refused" if refusals else "finished", "refusals": refusals,
            "limit_at_last_mib": limit, "peak_mib": run.tree_peak_bytes >> 20,
            "seconds": round(run.seconds, 2)}


def _next_limit(options: dict, refusals: list[dict]) -> int:
    """What the last refusal named, in MiB, if it kept what the one before promised."""
    last, before = refusals[-1], refusals[-2] if len(refusals) > 1 else None
    what = f"{options}: refused {refusals}"
    further = before and (last["reached"] > before["reached"] or last["whole"])
    if before and before["named_mib"] and (before["whole"] or not further):
        raise Wrong(f"{what}: the limit that was named before the last did not do")
    if len(refusals) == TRIES:
        raise Wrong(f"{what}: no limit did in {TRIES} tries")
    named = {int(mib) for mib in re.findall(r"limit of (?:at least )?(\d+) ?MiB", last["text"])}
    if not named and last["error"] == "OutOfMemoryError":
        last["named_mib"] = 0
        return last["limit_mib"] * 5 // 4
    if len(named) != 1 or min(named) <= last["limit_mib"]:
        raise Wrong(f"{what}: not one larger limit is named")
    last["named_mib"] = named.pop()
    return last["named_mib"]
