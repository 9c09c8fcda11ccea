#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""distill_offload: what it costs to keep a teacher out of memory, and what its answers on disk save.

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
from bench import recipe_bench
from tests.support.can_traffic import write_traffic

MODES = {"resident": ("false", "false"), "offloaded": ("false", "true"), "cached": ("true", "false")}
ROUNDS = 3
SEED = 42
WINDOW = 100


def train(options, data: pathlib.Path, run: pathlib.Path, *more) -> dict:
    out = recipe_bench.call([options.program, "train", "can-kd", "--data", data, "--out", run, "--memory-limit",
                "3GiB", "--seed", SEED, "--tensorboard", "false", "--quiet", "--json", *more])
    return json.loads(out.strip().splitlines()[-1])


def benchmark(options) -> dict:
    bus = options.work / "bus"
    windows, epochs, sizes = (60, 3, ["--config", "small"]) if options.smoke else (2000, 4, [])
    for name, seed, block in (("train_01_attack_free__a.csv", 1, 0),
                              ("train_02_with_attacks__flood.csv", 2, 5 * WINDOW)):
        write_traffic(bus / name, seed, windows * WINDOW + 1, block)
    data = options.work / "set"
    recipe_bench.call([options.program, "import", "can", bus, "--out", data])
    shared = ["--stage", options.stage, *sizes, "--max-epochs", epochs, "--patience",
              epochs, "--student-gat-patience", epochs, "--batch-size", 256]
    taught = options.work / "teacher"
    train(options, data, taught, *shared, "--max-epochs", 1, "--model-size", "teacher")
    runs: dict[str, list[dict]] = {mode: [] for mode in MODES}
    for _ in range(1 if options.smoke else ROUNDS):
        for mode, (cached, released) in MODES.items():
            run = options.work / "run"
            shutil.rmtree(run, ignore_errors=True)
            summary = train(options, data, run, *shared, "--model-size", "student",
                            "--teacher-path", taught, "--use-teacher-cache", cached,
                            "--offload-teacher-to-cpu", released)
            seen = recipe_bench.events(run)
            summary["losses"] = [e["loss"] for e in seen if e["event"] == "step"]
            [summary["teacher"]] = [e for e in seen if e["event"] == "teacher"]
            runs[mode].append(summary)
    answers = {(one["state_sha256"], tuple(one["losses"])) for some in runs.values() for one in some}
    if len(answers) != 1:
        sys.exit(f"distill_offload: {len(answers)} different results")
    if runs["offloaded"][0]["teacher"]["weight_bytes"] != 0:
        sys.exit("distill_offload: an offloaded teacher holds memory between steps")
    print(f"{'teacher':>10}{'graphs/s':>12}{'÷ resident':>12}{'bytes between steps':>22}")
    table = {}
    for mode, some in runs.items():
        speed = statistics.median(one["graphs_per_second"] for one in some)
        ratio = statistics.median(one["graphs_per_second"] / base["graphs_per_second"]
                                  for one, base in zip(some, runs["resident"]))
        table[mode] = {"graphs_per_s": round(speed), "ratio": round(ratio, 4),
                       "weight_bytes": some[0]["teacher"]["weight_bytes"],
                       "peak_mib": max(one["peak_resident_bytes"] for one in some) >> 20}
        print(f"{mode:>10}{speed:>12,.0f}{ratio:>12.3f}{table[mode]['weight_bytes']:>22,}")
    value = table["cached"]["ratio"]
    faster = value > max(1.0, table["offloaded"]["ratio"])
    return {"name": "distill_offload", "value": value, "unit": "speed with cached answers ÷ resident",
            "bar": 1.0, "pass": options.smoke or faster, "peers": table, "stage": options.stage,
            "epochs": epochs, "graphs": 2 * windows, "seed": SEED}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    recipe_bench.add_options(parser, "bench_distill_offload")
    parser.add_argument("--stage", choices=("autoencoder", "normal"), default="normal")
    options = parser.parse_args()
    return recipe_bench.run(options, lambda: benchmark(options))


if __name__ == "__main__":
    sys.exit(main())
