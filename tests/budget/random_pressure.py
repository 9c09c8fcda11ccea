# SPDX-License-Identifier: Apache-2.0
"""Random runs whose memory grows until the limit, each in a cgroup of it: no work is lost at the limit.

Growth of 30 MB to 1 GB a second, in the body of the loop, in the step, in workers, in an evaluation within the body, in a
phase between loops; steps of 5 ms to 5 s; 0 to 4 workers, forked or spawned. Drawn from (seed, index). What must hold:

    no kill          `oom_kill` of the cgroup is 0
    one step         of the batches that the body was given, all but the last one at most are committed
    the same bits    started again, without growth, the run ends as one that nobody disturbed

    PYTHONPATH=build/dev/python python -m tests.budget.random_pressure --count 200 --seed 1 --out pressure.jsonl
"""
import argparse
import collections
import concurrent.futures
import json
import os
import pathlib
import random
import subprocess
import sys
import tempfile
import threading

from tests.support.cgroup import MemoryCgroup

MIB = 1 << 20
ROOT = pathlib.Path(__file__).resolve().parents[2]
LOOP = [sys.executable, "-m", "tests.budget.pressed_loop"]
ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1"}
PLACES = ("body", "step", "worker", "evaluation", "phase")
GROWTH_S = 15.0  # Longest that a run may take to come to its limit.


class Wrong(Exception):
    """A run was killed, or lost more than a step, or ended in other bits."""


def between(dice: random.Random, least: float, most: float) -> float:
    """As many small ones as large ones."""
    return least * (most / least) ** dice.random()


def drawn(seed: int, index: int) -> dict:
    dice = random.Random(f"pressure/{seed}/{index}")
    where = PLACES[index % len(PLACES)]
    workers = dice.randint(1, 4) if where == "worker" else dice.choice([0, 0, 1, 2, 4])
    start = dice.choice(["fork", "fork", "fork", "spawn"]) if workers else "fork"
    rate, seconds = between(dice, 30e6, 1e9), between(dice, 0.005, 5)
    room = dice.randint(150, 300)  # MiB, from what is held at first to the limit.
    first = dice.randint(0, max(0, min(12, int(4 / seconds))))
    one = {"where": where, "workers": workers, "start": start, "rate": rate, "seconds": seconds, "first": first,
           "limit_mib": 330 + room + workers * (40 if start == "fork" else 230), "own": dice.random() < 0.3, "fused": dice.random() < 0.5,
           "width": dice.choice([8, 64, 256]), "evaluates_every": dice.randint(1, 5), "evaluation": between(dice, 0.1, 3),
           "commit_every": dice.choice([0, 0, 7]), "keeps": dice.random() < 0.7, "seed": dice.randrange(1 << 20)}
    if where in ("evaluation", "phase"):
        one["seconds"] = min(one["seconds"], 0.2)
    # As many steps as come to the limit, and some more; the loop of a phase is short, and comes often.
    grown = one["evaluation"] / one["evaluates_every"] if where == "evaluation" else one["seconds"]
    steps = int(min(GROWTH_S, 1.5 * room * MIB / rate) / grown) + one["first"] + 12
    one["batches"] = 6 if where == "phase" else min(steps, 400)
    one["loops"] = min(24, 3 + int(1.5 * room * MIB / rate / one["evaluation"])) if where == "phase" else 1
    return one


class Undisturbed:
    """Loops without growth, one after the other in a process beside."""

    def __init__(self) -> None:
        self._lock = threading.Lock()

    def __enter__(self) -> "Undisturbed":
        self._child = subprocess.Popen(LOOP, cwd=ROOT, env=ENVIRONMENT, text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        return self

    def __exit__(self, *unused) -> None:
        self._child.stdin.close()
        self._child.wait()

    def result(self, options: dict, folder: pathlib.Path) -> dict:
        with self._lock:
            print(json.dumps({**options, "grows": False, "workers": 0, "folder": str(folder)}), file=self._child.stdin, flush=True)
            return json.loads(self._child.stdout.readline())


def run_drawn(one: dict, folder: pathlib.Path, undisturbed: Undisturbed) -> dict:
    """Runs it, and judges. Raises Wrong."""
    with MemoryCgroup(one["limit_mib"] * MIB) as group:
        given = {**one, "grows": True, "folder": str(folder / "run")}
        run = group.run([*LOOP, json.dumps(given)], timeout=240, cwd=ROOT, env=ENVIRONMENT)
    if run.oom_kills:
        raise Wrong(f"{run.oom_kills} kills, status {run.returncode}: {run.stderr[-300:]}")
    if run.returncode:
        raise Wrong(f"status {run.returncode}: {run.stderr[-800:]}")
    told = run.last_json
    lost = told["given"] - max(0, told["committed"])
    line = {"outcome": told["how"], "given": told["given"], "committed": told["committed"], "lost": lost,
            "peak_mib": run.tree_peak_bytes >> 20, "seconds_taken": round(run.seconds, 1)}
    if lost > 1:
        raise Wrong(f"{lost} steps are lost: {told}")
    if told["how"] != "finished" and told["step"] not in (told["made"], told["made"] + 1):
        raise Wrong(f"the end is told of another step: {told}")
    again = undisturbed.result(one, folder / "run")
    whole = undisturbed.result(one, folder / "whole")
    if (again["how"], whole["how"]) != ("finished", "finished") or again["digest"] != whole["digest"]:
        raise Wrong(f"other bits, or another end: {again} and {whole}; it had ended so: {told}")
    return line


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--count", type=int, default=10)
    parser.add_argument("--first", type=int, default=0, help="index of the first run")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--jobs", type=int, default=1, help="how many at once [1]")
    parser.add_argument("--out", type=pathlib.Path, help="a line of JSON a run is appended here")
    parser.add_argument("--work", default="build", help="where the runs are [build]")
    options = parser.parse_args()
    if reason := MemoryCgroup.why_not():
        print(f"random_pressure: skipped: {reason}")
        return 0
    seen: collections.Counter = collections.Counter()
    with tempfile.TemporaryDirectory(dir=options.work) as name, Undisturbed() as undisturbed:

        def line_of(index: int) -> dict:
            one, folder = drawn(options.seed, index), pathlib.Path(name).resolve() / str(index)
            folder.mkdir()
            try:
                return {"index": index, **one, **run_drawn(one, folder, undisturbed)}
            except Wrong as wrong:
                return {"index": index, **one, "outcome": "wrong", "why": str(wrong)[:1500]}

        with concurrent.futures.ThreadPoolExecutor(options.jobs) as pool:
            for line in pool.map(line_of, range(options.first, options.first + options.count)):
                seen[line["outcome"]] += 1
                seen["lost"] += line.get("lost", 0)
                if line["outcome"] == "wrong":
                    print(f"run {line['index']} of seed {options.seed}: {line['why']}", flush=True)
                if options.out:
                    with open(options.out, "a", encoding="utf-8") as file:
                        file.write(json.dumps({"seed": options.seed, **line}) + "\n")
    print(json.dumps({"seed": options.seed, "runs": options.count, **seen}))
    return 1 if seen["wrong"] else 0


if __name__ == "__main__":
    sys.exit(main())
