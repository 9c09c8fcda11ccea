#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""A loop inside plimsoll.Run, beside the same loop bare, in pairs of fresh processes (loop.py)."""
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
from loop import SAMPLES, SEED

HERE = pathlib.Path(__file__).resolve().parent
BAR, STEP_MS_LEAST, WARM = 1.01, 50.0, 5
# One-sided 95 % quantiles of Student's t, by degrees of freedom.
T95 = {1: 6.314, 2: 2.920, 3: 2.353, 4: 2.132, 5: 2.015, 7: 1.895, 9: 1.833, 11: 1.796, 15: 1.753, 19: 1.729,
       29: 1.699}


def measured(how: str, folder: pathlib.Path, steps: int, workers: int) -> tuple[float, str]:
    """Median milliseconds of a step after the warm-up, and the digest of the model at the end."""
    shutil.rmtree(folder / "run", ignore_errors=True)
    done = subprocess.run([sys.executable, HERE / "loop.py", how, folder, str(steps), str(workers)], text=True,
                          capture_output=True, check=False)
    if done.returncode:
        sys.exit(f"run_overhead: loop.py {how}: status {done.returncode}\n{done.stderr[-2000:]}")
    told = json.loads(done.stdout.splitlines()[-1])
    if len(told["seconds"]) != steps:
        sys.exit(f"run_overhead: loop.py {how} made {len(told['seconds'])} steps of {steps}")
    return 1e3 * statistics.median(told["seconds"][WARM:]), told["digest"]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--smoke", action="store_true", help="two pairs of few steps; only the answer counts")
    parser.add_argument("--pairs", type=int, default=16, choices=[one + 1 for one in T95])
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--workers", type=int, default=0, help="processes that make the items")
    parser.add_argument("--directory", type=pathlib.Path, help="where to put the runs; default: build")
    options = parser.parse_args()
    pairs, steps = (2, WARM + 3) if options.smoke else (options.pairs, options.steps)
    build = HERE.parents[1] / "build"
    folder = pathlib.Path(tempfile.mkdtemp(prefix="run_overhead-", dir=options.directory
                                           or (build if build.exists() else None)))
    np.save(folder / "order.npy", plimsoll.SampleOrder(SAMPLES, SEED, 0).at(np.arange(SAMPLES)))
    times: dict[str, list[float]] = {"bare": [], "run": []}
    digests = set()
    for pair in range(pairs):
        for how in ("bare", "run") if pair % 2 == 0 else ("run", "bare"):
            time, digest = measured(how, folder, steps, options.workers)
            times[how].append(time)
            digests.add(digest)
    shutil.rmtree(folder)
    if len(digests) != 1:
        sys.exit("run_overhead: the two loops end with different models")
    logs = [math.log(run / bare) for run, bare in zip(times["run"], times["bare"], strict=True)]
    error = statistics.stdev(logs) / math.sqrt(pairs)
    ratio, bound = (math.exp(statistics.mean(logs) + k * error) for k in (0.0, T95[pairs - 1]))
    step_ms = statistics.median(times["bare"])
    result = {
        "name": "run_overhead", "value": round(bound, 4), "unit": "x", "bar": BAR,
        "pass": options.smoke or (bound <= BAR and step_ms >= STEP_MS_LEAST),
        "peers": {"ratio": round(ratio, 4), "bare_ms": round(step_ms, 2),
                  "run_ms": round(statistics.median(times["run"]), 2), "pairs": pairs, "steps": steps,
                  "workers": options.workers, "digest": digests.pop()[:12]}}
    print(json.dumps(result))
    return 0 if result["pass"] else 1


if __name__ == "__main__":
    sys.exit(main())
