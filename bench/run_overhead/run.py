#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""A loop inside plimsoll.Run, beside the same loop bare: pairs of fresh processes that take turns (loop.py)."""
import argparse
import json
import math
import pathlib
import shutil
import statistics
import subprocess
import sys
import tempfile

import numpy as np

import plimsoll
from loop import SAMPLES, SEED, TURN

HERE = pathlib.Path(__file__).resolve().parent
BAR, STEP_MS_LEAST, WARM = 1.01, 50.0, 2  # Turns.
# One-sided 95 % quantiles of Student's t, by degrees of freedom.
T95 = {1: 6.314, 2: 2.920, 3: 2.353, 4: 2.132, 5: 2.015, 7: 1.895, 9: 1.833, 11: 1.796, 15: 1.753, 19: 1.729,
       29: 1.699}


class Loop:
    """A process of loop.py, which makes steps when it is its turn."""

    def __init__(self, how: str, folder: pathlib.Path, steps: int, workers: int) -> None:
        self._process = subprocess.Popen([sys.executable, HERE / "loop.py", how, folder, str(steps), str(workers)],
                                         text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        self._how = how

    def told(self):
        line = self._process.stdout.readline()
        if not line:
            sys.exit(f"run_overhead: loop.py {self._how}: status {self._process.wait()}")
        return json.loads(line)

    def turn(self) -> float:
        """Median seconds of a step."""
        print(file=self._process.stdin, flush=True)
        return statistics.median(self.told())

    def end(self) -> str:
        """The digest of the model."""
        print(file=self._process.stdin, flush=True)
        digest = self.told()
        if self._process.wait():
            sys.exit(f"run_overhead: loop.py {self._how}: status {self._process.returncode}")
        return digest


def measured(folder: pathlib.Path, steps: int, workers: int) -> tuple[float, float, set[str]]:
    """Of two fresh processes that take turns: mean of the logarithms of the turns' ratios after the warm-up, median
    seconds of the bare loop's steps, the models' digests."""
    shutil.rmtree(folder / "run", ignore_errors=True)
    bare, run = (Loop(how, folder, steps, workers) for how in ("bare", "run"))
    bare.told(), run.told()
    logs, bares = [], []
    for turn in range(steps // TURN):
        if turn % 2:
            after, before = run.turn(), bare.turn()
        else:
            before, after = bare.turn(), run.turn()
        if turn >= WARM:
            logs.append(math.log(after / before))
            bares.append(before)
    return statistics.mean(logs), statistics.median(bares), {bare.end(), run.end()}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--smoke", action="store_true", help="two pairs of few steps; only the answer counts")
    parser.add_argument("--pairs", type=int, default=30, choices=[one + 1 for one in T95])
    parser.add_argument("--steps", type=int, default=80)
    parser.add_argument("--workers", type=int, default=0, help="processes that make the items")
    parser.add_argument("--directory", type=pathlib.Path, help="where to put the runs; default: build")
    options = parser.parse_args()
    pairs, steps = (2, TURN * (WARM + 1)) if options.smoke else (options.pairs, options.steps)
    build = HERE.parents[1] / "build"
    folder = pathlib.Path(tempfile.mkdtemp(prefix="run_overhead-", dir=options.directory
                                           or (build if build.exists() else None)))
    np.save(folder / "order.npy", plimsoll.SampleOrder(SAMPLES, SEED, 0).at(np.arange(SAMPLES)))
    logs, bares, digests = [], [], set()
    for _ in range(pairs):
        log, bare, seen = measured(folder, steps, options.workers)
        logs.append(log)
        bares.append(bare)
        digests |= seen
    shutil.rmtree(folder)
    if len(digests) != 1:
        sys.exit("run_overhead: the two loops end with different models")
    error = statistics.stdev(logs) / math.sqrt(pairs)
    ratio, bound = (math.exp(statistics.mean(logs) + k * error) for k in (0.0, T95[pairs - 1]))
    step_ms = 1e3 * statistics.median(bares)
    result = {
        "name": "run_overhead", "value": round(bound, 4), "unit": "x", "bar": BAR,
        "pass": options.smoke or (bound <= BAR and step_ms >= STEP_MS_LEAST),
        "peers": {"ratio": round(ratio, 4), "bare_ms": round(step_ms, 2), "pairs": pairs, "steps": steps,
                  "workers": options.workers, "digest": digests.pop()[:12]}}
    print(json.dumps(result))
    return 0 if result["pass"] else 1


if __name__ == "__main__":
    sys.exit(main())
