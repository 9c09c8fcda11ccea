#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""What cleaning up every 1, 5, 10 and 20 steps costs and spares: fresh processes of loop.py, round about."""
import argparse
import json
import math
import pathlib
import shutil
import statistics
import subprocess
import sys
import tempfile

HERE = pathlib.Path(__file__).resolve().parent
INTERVALS = (0, 1, 5, 10, 20)
BAR = 1.01  # Of every ten steps, against never.


def lived(folder: pathlib.Path, interval: int, workers: int, set_to_none: bool, steps: int) -> dict:
    shutil.rmtree(folder / "run", ignore_errors=True)
    done = subprocess.run([sys.executable, HERE / "loop.py", folder / "run", str(interval), str(workers),
                           str(int(set_to_none)), str(steps)], text=True, capture_output=True, check=False)
    if done.returncode:
        sys.exit(f"cleanup_interval: loop.py: {done.stderr}")
    told = json.loads(done.stdout.splitlines()[-1])
    if told["cleanups"] == 0 and interval or told["cleanups"] and not interval:
        sys.exit(f"cleanup_interval: {told['cleanups']} clean-ups, every {interval} steps")
    return told


def line(of: list[dict], never: list[dict]) -> dict:
    """Of one interval's processes, beside those that never clean up, in the same order."""
    logs = [math.log(one["step_ms"] / other["step_ms"]) for one, other in zip(of, never)]
    middle = {name: statistics.median(one[name] for one in of) for name in ("most_mib", "cleanup_ms", "freed_mib")}
    return {"x": round(math.exp(statistics.median(logs)), 3), **{name: round(value, 1) for name, value in middle.items()}}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--smoke", action="store_true", help="one round of few steps; only the answer counts")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--directory", type=pathlib.Path, help="where to put the runs; default: build")
    options = parser.parse_args()
    rounds, steps = (1, 20) if options.smoke else (options.rounds, options.steps)
    ways = [(0, True)] if options.smoke else [(0, True), (0, False), (2, True)]
    intervals = (0, 10) if options.smoke else INTERVALS
    build = HERE.parents[1] / "build"
    folder = pathlib.Path(tempfile.mkdtemp(prefix="cleanup_interval-", dir=options.directory
                                           or (build if build.exists() else None)))
    table, digests, step_ms = {}, set(), 0.0
    try:
        for workers, set_to_none in ways:
            seen = {interval: [] for interval in intervals}
            for _ in range(rounds):
                for interval in intervals:
                    seen[interval].append(lived(folder, interval, workers, set_to_none, steps))
            digests |= {one["digest"] for all_of in seen.values() for one in all_of}
            name = f"workers {workers}, set_to_none {set_to_none}"
            table[name] = {interval: line(all_of, seen[0]) for interval, all_of in seen.items()}
            step_ms = step_ms or statistics.median(one["step_ms"] for one in seen[0])
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    if len(digests) != 1:
        sys.exit("cleanup_interval: the loops end with different models")
    value = table["workers 0, set_to_none True"][10]["x"]
    result = {"name": "cleanup_interval", "value": value, "unit": "x", "bar": BAR,
              "pass": options.smoke or value <= BAR,
              "peers": {"step_ms": round(step_ms, 1), "rounds": rounds, "steps": steps, "table": table}}
    print(json.dumps(result))
    return 0 if result["pass"] else 1


if __name__ == "__main__":
    sys.exit(main())
