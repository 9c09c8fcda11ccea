#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""curriculum_scoring: what finding the difficult graphs costs an epoch of the curriculum.

    run.py [--smoke] [--graphs N] [--sizes small|original] [--keep]

The program is taken from PLIMSOLL_PROGRAM, else build/release/bin/plimsoll.
"""
import argparse
import pathlib
import statistics
import sys

ROOT = pathlib.Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))
from bench import recipe_bench
from tests.support.can_traffic import BLOCK_ROWS, write_repeated_traffic

BAR = 0.05
SEED = 7
WINDOW, STRIDE = 100, 50
FLOODED = 0.12  # Of the windows; as in can-train-and-test's set_01.
EPOCHS = 4      # The schedule runs from its first ratio to its last in them.
REFRESH = 10    # difficulty_cache_update's default: epochs between two scorings.
CHUNKS = (500, 37)


def train(options, data: pathlib.Path, run: pathlib.Path, *more) -> None:
    sizes = ["--config", "small"] if options.sizes == "small" else []
    recipe_bench.call([options.program, "train", "can-kd", "--data", data, "--out", run, "--memory-limit",
                       "3GiB", "--seed", SEED, *sizes, "--model-size", options.role,
                       "--stage", "autoencoder", "--max-epochs", EPOCHS,
                       "--use-kd", "false", "--batch-size", 256, "--tensorboard", "false",
                       "--patience", EPOCHS, "--student-gat-patience", EPOCHS, "--quiet", *more])


def measure(options, data: pathlib.Path, run: pathlib.Path, *more) -> dict:
    """Seconds of the one scoring, and of a mean epoch without it."""
    train(options, data, run, *more)
    before = len(recipe_bench.events(run))
    recipe_bench.call([options.program, "resume", run, "--stage", "curriculum", "--quiet"])
    seen = recipe_bench.events(run)[before:]
    marks = [e["time"] for e in seen if e["event"] in ("task", "epoch")][:EPOCHS + 1]
    epochs = [e for e in seen if e["event"] == "epoch"]
    scored = [e for e in epochs if "scored" in e]
    if len(epochs) != EPOCHS or len(scored) != 1 or scored[0]["epoch"] != 0:
        sys.exit(f"curriculum_scoring: {len(epochs)} epochs, {len(scored)} of them scored")
    return {"graphs": scored[0]["scored"], "seconds": scored[0]["scoring_seconds"],
            "epoch_seconds": statistics.mean(b - a for a, b in zip(marks, marks[1:])) -
            scored[0]["scoring_seconds"] / EPOCHS,
            "epoch_graphs": statistics.mean(e["graphs"] for e in epochs),
            "thresholds": [e["curriculum/threshold"] for e in epochs]}


def benchmark(options) -> dict:
    data = options.work / "set"
    repeats = -(-options.graphs * STRIDE // BLOCK_ROWS)
    write_repeated_traffic(options.work / "bus" / "train_01__flood.csv", SEED, repeats, FLOODED)
    window = max(WINDOW, BLOCK_ROWS // options.graphs)  # Fewer graphs than a block holds are larger.
    recipe_bench.call([options.program, "import", "can", options.work / "bus", "--out", data, "--window", window,
                       "--stride", STRIDE if window == WINDOW else window])
    table = {}
    print(f"{'scored by':>12}{'graphs':>10}{'seconds':>9}{'epoch':>9}{'÷ epoch':>9}{f'÷ {REFRESH} epochs':>13}",
          flush=True)
    for name, mining in (("autoencoder", "true"), ("classifier", "false")):
        by_chunk = []
        for chunk in CHUNKS if options.smoke else CHUNKS[:1]:
            run = options.work / f"{name}_{chunk}"
            by_chunk.append(measure(options, data, run, "--use-vgae-mining", mining, "--scoring-chunk", chunk))
        one = by_chunk[0]
        if any(other["thresholds"] != one["thresholds"] for other in by_chunk):
            sys.exit("curriculum_scoring: another chunk finds other difficulties")
        one["ratio"] = one["seconds"] / one["epoch_seconds"]
        one["share"] = one["ratio"] / REFRESH
        table[name] = one
        print(f"{name:>12}{one['graphs']:>10,}{one['seconds']:>9.2f}{one['epoch_seconds']:>9.2f}"
              f"{one['ratio']:>9.3f}{one['share']:>13.4f}", flush=True)
    value = max(one["share"] for one in table.values())
    return {"name": "curriculum_scoring", "value": round(value, 4),
            "unit": f"of the time of {REFRESH} epochs, after which scores are found again", "bar": BAR,
            "pass": options.smoke or value <= BAR,
            "peers": {name: {key: round(one[key], 4) for key in one if key != "thresholds"}
                      for name, one in table.items()},
            "sizes": options.sizes, "role": options.role, "graphs": options.graphs, "seed": SEED}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    recipe_bench.add_options(parser, "bench_curriculum_scoring")
    parser.add_argument("--graphs", type=int, help="windows of traffic; default 100,000, --smoke 400")
    parser.add_argument("--sizes", choices=("small", "original"), default="small")
    parser.add_argument("--role", choices=("teacher", "student"), default="teacher")
    options = parser.parse_args()
    options.graphs = options.graphs or (400 if options.smoke else 100_000)
    return recipe_bench.run(options, lambda: benchmark(options))


if __name__ == "__main__":
    sys.exit(main())
