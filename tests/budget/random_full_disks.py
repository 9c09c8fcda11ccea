# SPDX-License-Identifier: Apache-2.0
"""Runs on a small disk that another program fills to the last byte at random moments, and frees after a while.

A run goes on by itself, each time, and ends in the bits of one that nobody disturbed; every step's event is in its
place. What runs, when the disk is filled and for how long are drawn from (seed, run); each outcome is one line of JSON.
Root makes the disks (tests/support/full_disk.py).

    PYTHONPATH=build/dev/python python -m tests.budget.random_full_disks --runs 50 --seed 1 --out disks.jsonl
"""
import argparse
import contextlib
import functools
import json
import pathlib
import random
import tempfile
import time

import plimsoll
from tests.support import full_disk

SIZE_MIB = 40


def drawn(seed: int, index: int) -> dict:
    dice = random.Random(f"{seed}/{index}")
    fills = [(round(dice.uniform(0.0, 0.8), 3), dice.choice([0.05, 0.5, 1.5, "paused", "paused"])) for _ in range(dice.choice([1, 1, 2, 3]))]
    return {"kind": dice.choice(["dense", "rows", "rows", "own"]), "every": dice.choice([1, 2, 5, 24]), "workers": dice.choice([0, 0, 1]),
            "seconds": dice.choice([0.0, 0.02, 0.05]), "fills": fills}


@functools.cache
def undisturbed(kind: str) -> str:
    """Of any interval of commits and number of workers: they decide no bits."""
    with tempfile.TemporaryDirectory() as folder:
        out, err = full_disk.start(pathlib.Path(folder), kind).communicate(timeout=600)
    assert out, err
    return out


def outcome_of(options: dict, disk: pathlib.Path) -> dict:
    run, began = disk / "run", time.monotonic()
    process = full_disk.start(disk, options["kind"], every=options["every"], workers=options["workers"], seconds=options["seconds"])
    paused = filled = 0
    with contextlib.suppress(AssertionError):  # It has ended.
        full_disk.wait_until(run, process, "running")
        for after, lasts in options["fills"]:
            time.sleep(after)
            filled += process.poll() is None
            full_disk.fill(disk)
            try:
                if lasts == "paused":
                    full_disk.wait_until(run, process, "paused: disk full")
                else:
                    time.sleep(lasts)
                paused += plimsoll.status(run)["status"] == "paused: disk full"
            finally:
                (disk / "filler").unlink()
            full_disk.wait_until(run, process, "running")
    out, err = process.communicate(timeout=600)
    steps = [event["step"] for event in map(json.loads, (run / "events.jsonl").read_text().splitlines()) if event["event"] == "step"]
    right = {"ended": process.returncode == 0, "bits": out == undisturbed(options["kind"]), "events": steps == [*range(1, 1 + full_disk.STEPS)],
             "status": plimsoll.status(run)["status"] == "finished"}
    return {**options, "filled": filled, "paused": paused, "right": all(right.values()), "wrong": [name for name, yes in right.items() if not yes],
            "seconds_in_all": round(time.monotonic() - began, 1), **({} if all(right.values()) else {"stderr": err[-2000:]})}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=50)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--out", type=pathlib.Path, required=True)
    told = parser.parse_args()
    wrong = filled = paused = 0
    with open(told.out, "w", encoding="utf-8") as out:
        for index in range(told.first, told.first + told.runs):
            with tempfile.TemporaryDirectory() as folder, full_disk.small_disk(pathlib.Path(folder) / "disk", SIZE_MIB) as disk:
                line = {"run": index, **outcome_of(drawn(told.seed, index), disk)}
            out.write(json.dumps(line) + "\n")
            out.flush()
            wrong, filled, paused = wrong + (not line["right"]), filled + line["filled"], paused + line["paused"]
    print(f"{told.runs} runs, {filled} full disks, {paused} pauses: {wrong} wrong")
    return int(wrong > 0)


if __name__ == "__main__":
    raise SystemExit(main())
