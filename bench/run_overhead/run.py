#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""A loop inside plimsoll.Run, beside the same loop bare: pairs of fresh processes that take turns (loop.py)."""
import argparse
import json
import math
import pathlib
import shutil
import statistics
import sys
import tempfile

import numpy as np

import plimsoll

HERE = pathlib.Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parents[1]))
from bench.loop_turns import T95, Loop, ratio_and_bound
from loop import SAMPLES, SEED, TURN

BAR, STEP_MS_LEAST, WARM = 1.01, 50.0, 2  # Turns.


def measured(folder: pathlib.Path, steps: int, workers: int) -> tuple[float, float, set[str]]:
    """Of two fresh processes that take turns: mean of the logarithms of the turns' ratios after the warm-up, median
    seconds of the bare loop's steps, the models' digests."""
    shutil.rmtree(folder / "run", ignore_errors=True)
    bare, run = (Loop(HERE / "loop.py", how, folder, steps, workers) for how in ("bare", "run"))
    logs, bares = [], []
    for turn in range(steps // TURN):
        if turn % 2:
            after, before = run.turn(), bare.turn()
        else:
            before, after = bare.turn(), run.turn()
        if turn >= WARM:
            logs.append(math.log(statistics.median(after) / statistics.median(before)))
            bares.append(statistics.median(before))
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
    ratio, bound = ratio_and_bound(logs)
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
