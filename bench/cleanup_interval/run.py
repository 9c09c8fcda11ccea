#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""cleanup_interval: what giving unused memory back every n steps costs and frees; it changes no bit.

The program is taken from PLIMSOLL_PROGRAM, else build/release/bin/plimsoll.
"""
import argparse
import json
import pathlib
import shutil
import statistics
import sys

ROOT = pathlib.Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))
from bench import recipe_bench  # noqa: E402

INTERVALS = (0, 1, 5, 10, 20)
BAR = 0.95
ROUNDS = 3
SEED = 0


def train(options, data: pathlib.Path, every: int) -> dict:
    """One run: its summary, and what its clean-ups between steps freed and took."""
    run = options.work / "run"
    shutil.rmtree(run, ignore_errors=True)
    out = recipe_bench.call([options.program, "train", "cosir", "--data", data, "--out", run, "--epochs", 1,
                "--batch-size", 512, "--memory-limit", "1GiB", "--seed", SEED, "--eval-pairs", 500,
                "--cleanup-every-n-steps", every, "--tensorboard", "false", "--quiet", "--json"])
    summary = json.loads(out.strip().splitlines()[-1])
    between = [e for e in recipe_bench.events(run) if e["event"] == "cleanup" and e["when"] == "step"]
    wanted = summary["step"] // every if every else 0
    if len(between) != wanted:
        sys.exit(f"cleanup_interval: {len(between)} clean-ups every {every} steps, not {wanted}")
    summary["freed"] = statistics.median(e["freed_bytes"] for e in between) if between else 0
    summary["took"] = statistics.median(e["seconds"] for e in between) if between else 0.0
    return summary


def benchmark(options) -> dict:
    data = options.work / "data"
    rows = 20_000 if options.smoke else 200_000
    recipe_bench.call([options.program, "synth", "cosir", "--rows", rows, "--out", data, "--seed", SEED])
    runs: dict[int, list[dict]] = {every: [] for every in INTERVALS}
    for _ in range(1 if options.smoke else ROUNDS):
        for every in INTERVALS:
            runs[every].append(train(options, data, every))
    states = {one["state_sha256"] for some in runs.values() for one in some}
    if len(states) != 1:
        sys.exit(f"cleanup_interval: {len(states)} different results")
    print(f"{'every n':>8}{'speed':>8}{'peak resident':>16}{'freed each':>14}{'took':>10}")
    table = {}
    for every, some in runs.items():
        speed = statistics.median(one["rows_per_second"] / base["rows_per_second"]
                                  for one, base in zip(some, runs[0]))
        row = {"speed": round(speed, 4),
               "peak_mib": max(one["peak_resident_bytes"] for one in some) >> 20,
               "freed_mib": round(statistics.median(one["freed"] for one in some) / 2**20, 1),
               "took_ms": round(1e3 * statistics.median(one["took"] for one in some), 2)}
        table[str(every)] = row
        print(f"{every:>8}{row['speed']:>8.3f}{row['peak_mib']:>12} MiB{row['freed_mib']:>10} MiB"
              f"{row['took_ms']:>7} ms")
    value = table["10"]["speed"]
    return {"name": "cleanup_interval", "value": value, "unit": "speed at n = 10 over n = 0",
            "bar": BAR, "pass": options.smoke or value >= BAR, "peers": table, "rows": rows,
            "seed": SEED, "state_sha256": states.pop()}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    recipe_bench.add_options(parser, "bench_cleanup_interval")
    options = parser.parse_args()
    return recipe_bench.run(options, lambda: benchmark(options))


if __name__ == "__main__":
    sys.exit(main())
