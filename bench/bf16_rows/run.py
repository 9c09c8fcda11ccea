#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""bf16_rows: what `label_dtype = "bfloat16"` costs `plimsoll train cosir` in accuracy.

The same training with rows of float32 and of bfloat16, by pairs of equal seeds, on data/coco-mini and
on synthetic pairs. Compared are the loss of the last epoch, the rank of each training pair's own image
under its own condition, and the held-out ranks. The value is the geometric mean over the pairs of
bfloat16 ÷ float32 of the held-out mean rank, text to image, under the best condition.

    run.py [--smoke] [--seeds N] [--rows N] [--epochs N] [--label-lr RATE] [--keep]

The program is taken from PLIMSOLL_PROGRAM, else build/release/bin/plimsoll.
"""
import argparse
import json
import math
import pathlib
import shutil
import statistics
import subprocess
import sys

ROOT = pathlib.Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))
from bench import recipe_bench

COCO = ROOT / "data" / "coco-mini"
BAR = 1.02
LABEL_DIM = {"coco-mini": 2, "synth": 16}
WEIGHT_BYTES = {"float32": 4, "bfloat16": 2}
# What is compared, and where the run's summary has it. Less is better, but for r10.
FIGURES = {"loss": ("loss",), "train_mean_rank": ("recall", "train_mean_rank"),
           "t2i_mean_rank": ("recall", "oracle", "t2i", "mean_rank"),
           "i2t_mean_rank": ("recall", "oracle", "i2t", "mean_rank"),
           "t2i_r10": ("recall", "oracle", "t2i", "r10"),
           "i2t_r10": ("recall", "oracle", "i2t", "r10")}


def fail(text: str) -> None:
    sys.exit(f"bf16_rows: {text}")


def call(options, *command) -> dict:
    """Runs the program; returns the JSON of its last line."""
    line = [str(part) for part in (options.program, *command)]
    done = subprocess.run(line, text=True, capture_output=True, check=False)
    try:
        if done.returncode == 0:
            return json.loads(done.stdout.strip().splitlines()[-1])
    except (IndexError, ValueError):
        pass
    fail(f"{' '.join(line)}: status {done.returncode}\n{(done.stderr or done.stdout)[-2000:]}")


def make_data(options) -> dict[str, pathlib.Path]:
    """Both sets, by name."""
    sets = {name: options.work / name for name in LABEL_DIM}
    call(options, "import", "cosir", "--image-features", COCO / "image", "--text-features",
         COCO / "text", "--ids", COCO / "ids.npy", "--groups", COCO / "groups.npy", "--out",
         sets["coco-mini"], "--json", "--quiet")
    call(options, "synth", "cosir", "--rows", options.rows, "--out", sets["synth"], "--seed", 0,
         "--json", "--quiet")
    return sets


def train(options, name: str, data: pathlib.Path, seed: int, dtype: str) -> dict:
    """One run's figures. Fails when its rows are not what was asked for."""
    out = options.work / "run"
    shutil.rmtree(out, ignore_errors=True)
    settings = {"label_dim": LABEL_DIM[name], "label_dtype": dtype, "compute_threads": 1,
                "eval_every_n_epochs": 0}
    if options.label_lr is not None:
        settings["label_lr"] = options.label_lr
    command = ["train", "cosir", "--data", data, "--out", out, "--seed", seed, "--json", "--quiet"]
    if name == "coco-mini":
        command += ["--config", COCO / "cosir.toml"]
    else:
        command += ["--batch-size", 256]
    epochs = options.epochs or (None if name == "coco-mini" else 8)
    command += ["--epochs", epochs] if epochs else []
    for key, value in settings.items():
        command += ["--set", f"{key}={value}"]
    summary = call(options, *command)
    if summary["status"] != "finished":
        fail(f"{name}, seed {seed}, {dtype}: {summary['status']}")
    table = call(options, "store", "info", f"{out}/embeddings/conditions", "--json")
    wanted = 16 + -(-LABEL_DIM[name] * WEIGHT_BYTES[dtype] // 4) * 4 + 8 * LABEL_DIM[name]
    if table["dtype"] != dtype or table["record_bytes"] != -(-wanted // 8) * 8:
        fail(f"{name}: {dtype} was asked for, the table has records of {table['record_bytes']} "
             f"bytes of {table['dtype']}")
    figures = {"state_sha256": summary["state_sha256"], "record_bytes": table["record_bytes"]}
    for figure, path in FIGURES.items():
        value = summary
        for key in path:
            value = value[key]
        if value is None or not math.isfinite(value):
            fail(f"{name}, seed {seed}, {dtype}: {figure} is {value}")
        figures[figure] = value
    return figures


def measure(options, sets: dict[str, pathlib.Path]) -> list[dict]:
    """One pair for each set and seed. A run of bfloat16 rows must end in the same bits twice."""
    pairs = []
    for name, data in sets.items():
        for seed in range(options.seeds):
            pair = {dtype: train(options, name, data, seed, dtype) for dtype in WEIGHT_BYTES}
            if seed == 0:
                again = train(options, name, data, seed, "bfloat16")
                if again["state_sha256"] != pair["bfloat16"]["state_sha256"]:
                    fail(f"{name}: two runs of one seed ended in different states")
            if pair["float32"]["state_sha256"] == pair["bfloat16"]["state_sha256"]:
                fail(f"{name}: bfloat16 rows changed nothing")
            pairs.append({"set": name, "seed": seed, **pair})
            print(f"{name}, seed {seed}: " + ", ".join(
                f"{figure} {pair['float32'][figure]:.4g} / {pair['bfloat16'][figure]:.4g}"
                for figure in FIGURES), flush=True)
    return pairs


def compare(pairs: list[dict], figure: str) -> dict:
    """Means of both, and of bfloat16 − float32 with its 95 % bound (normal, paired)."""
    left = [pair["float32"][figure] for pair in pairs]
    right = [pair["bfloat16"][figure] for pair in pairs]
    apart = [b - a for a, b in zip(left, right)]
    spread = statistics.stdev(apart) if len(apart) > 1 else 0.0
    return {"float32": round(statistics.fmean(left), 5), "bfloat16": round(statistics.fmean(right), 5),
            "difference": round(statistics.fmean(apart), 5),
            "bound_95": round(1.96 * spread / math.sqrt(len(apart)), 5),
            "seeds_apart": round(statistics.stdev(left), 5) if len(left) > 1 else 0.0}


def report(options, pairs: list[dict]) -> dict:
    peers = {}
    for name in LABEL_DIM:
        some = [pair for pair in pairs if pair["set"] == name]
        peers[name] = {figure: compare(some, figure) for figure in FIGURES}
        peers[name]["record_bytes"] = {dtype: some[0][dtype]["record_bytes"]
                                       for dtype in WEIGHT_BYTES}
        for figure in FIGURES:
            at = peers[name][figure]
            print(f"{name}, {figure}: {at['float32']} in float32, {at['bfloat16']} in bfloat16; "
                  f"{at['difference']:+} ± {at['bound_95']} (seeds differ by {at['seeds_apart']})")
    logs = [math.log(pair["bfloat16"]["t2i_mean_rank"] / pair["float32"]["t2i_mean_rank"])
            for pair in pairs]
    value = math.exp(statistics.fmean(logs))
    return {"name": "bf16_rows", "value": round(value, 5), "unit": "x float32's mean rank",
            "bar": BAR, "pass": options.smoke or (value <= BAR and options.seeds >= 3),
            "peers": peers, "seeds": options.seeds, "rows": options.rows,
            "epochs": options.epochs, "label_lr": options.label_lr}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    recipe_bench.add_options(parser, "bench-bf16")
    parser.add_argument("--seeds", type=int, help="of each set, 0 and on; default 5, --smoke 1")
    parser.add_argument("--rows", type=int, help="synthetic pairs; default 8,000, --smoke 1,000")
    parser.add_argument("--epochs", type=int,
                        help="of both sets; default coco-mini's own, 8 of synth, --smoke 2")
    parser.add_argument("--label-lr", type=float,
                        help="rate of the rows; smaller steps are rounded more")
    options = parser.parse_args()
    options.seeds = options.seeds or (1 if options.smoke else 5)
    options.rows = options.rows or (1_000 if options.smoke else 8_000)
    options.epochs = options.epochs or (2 if options.smoke else None)
    return recipe_bench.run(
        options, lambda: report(options, measure(options, make_data(options))))


if __name__ == "__main__":
    sys.exit(main())
