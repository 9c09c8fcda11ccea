#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""w9_plain_pytorch: one epoch of `cosir` inside a limit, against plain PyTorch with all in RAM.

Both start from the same weights, rows and sample order. The losses of every step are compared
first; then rows per second of whole epochs, ours and the peer's in turn, are. The peer is judged at
its best: the faster of a DataLoader with 0 and with 2 workers, in each round anew.

    run.py [--smoke] [--rows N] [--rounds N] [--limit SIZE] [--keep]

The program is taken from PLIMSOLL_PROGRAM, else build/release/bin/plimsoll.
"""
import argparse
import json
import os
import pathlib
import shutil
import statistics
import sys

import numpy as np

FOLDER = pathlib.Path(__file__).resolve().parent
ROOT = FOLDER.parent.parent
sys.path[:0] = [str(FOLDER), str(ROOT)]
from bench import recipe_bench
from same_start import write_start

BAR = 1.2
SEED = 0
FIRST_STEPS = 10
FIRST_TOLERANCE = 1e-5  # Relative, of each of the first steps' losses, neighbours rounded alike.
FAST_TOLERANCE = 1e-3   # The same, with the peer's neighbours found by its fastest operators.
MEAN_TOLERANCE = 1e-4   # Relative, of the mean over the epoch.
PEERS = {"dataloader_0": ["--workers", "0"], "dataloader_2": ["--workers", "2"],
         "direct": ["--loader", "direct"]}
JUDGED = ("dataloader_0", "dataloader_2")


def fail(text: str) -> None:
    sys.exit(f"w9_plain_pytorch: {text}")


def make_data(options, work: pathlib.Path) -> pathlib.Path:
    data = work / "data"
    recipe_bench.call([options.program, "synth", "cosir", "--rows", options.rows, "--out", data])
    header = json.loads((data / "features.json").read_text())
    columns = [(column["name"], column["dtype"], column["shape"]) for column in header["columns"]]
    if columns != [("image", "float32", [512]), ("text", "float32", [512])]:
        fail(f"the peer reads image and text as float32 [512], but synth wrote {columns}")
    ids = (np.arange(options.rows) if header["ids"]["dense"]
           else np.fromfile(data / "ids.dat", np.int64)[: options.rows])
    write_start(work / "start.npz", SEED, ids, np.arange(options.rows), 512)
    return data


def run_ours(options, work: pathlib.Path, data: pathlib.Path) -> dict:
    out = work / "run"
    shutil.rmtree(out, ignore_errors=True)
    settings = {"holdout": 0, "eval_every_n_epochs": 0, "metrics_every_n_steps": 1,
                "compute_threads": options.threads}
    command = [options.program, "train", "cosir", "--data", data, "--out", out, "--epochs", 1,
               "--batch-size", options.batch_size, "--seed", SEED, "--memory-limit", options.limit,
               "--json"]
    for key, value in settings.items():
        command += ["--set", f"{key}={value}"]
    summary = json.loads(recipe_bench.call(command).strip().splitlines()[-1])
    events = [json.loads(line) for line in (out / "events.jsonl").read_text().splitlines()]
    summary["losses"] = [event["loss"] for event in events if event["event"] == "step"]
    return summary


def run_peer(options, work: pathlib.Path, data: pathlib.Path, how: list[str]) -> dict:
    # A plain program knows nothing of MKL_CBWR, and is not made to pay for it.
    environment = {key: value for key, value in os.environ.items() if key != "MKL_CBWR"}
    command = [sys.executable, FOLDER / "plain_pytorch.py", data, "--start", work / "start.npz",
               "--threads", options.threads, "--batch-size", options.batch_size, *how]
    return json.loads(recipe_bench.call(command, environment).strip().splitlines()[-1])


def compare_losses(name: str, ours: list[float], peer: list[float], allowed: float) -> dict:
    """Prints how closely the losses agree and ends the benchmark when they do not."""
    if len(ours) != len(peer):
        fail(f"ours has {len(ours)} steps, the peer {len(peer)}")
    a, b = np.array(ours), np.array(peer)
    apart = np.abs(a - b) / np.abs(b)
    first = float(apart[:FIRST_STEPS].max())
    mean = float(abs(a.mean() - b.mean()) / abs(b.mean()))
    print(f"losses of {name}, {len(a)} steps, relative difference: first {FIRST_STEPS} steps "
          f"≤ {first:.1e} (allowed {allowed:.0e}), any step ≤ {apart.max():.1e}, "
          f"mean over the epoch {mean:.1e} (allowed {MEAN_TOLERANCE:.0e})", flush=True)
    if not (first <= allowed and mean <= MEAN_TOLERANCE):
        fail("the two programs do not train the same model; nothing was compared")
    return {"first_steps": first, "any_step": float(apart.max()), "mean": mean}


def measure(options, work: pathlib.Path, data: pathlib.Path) -> tuple[list[dict], dict]:
    """Rounds of (ours, each peer) in turn, after one that compares the losses alone."""
    losses = run_ours(options, work, data)["losses"]
    exact = run_peer(options, work, data, ["--loader", "direct", "--exact-neighbours"])
    agreement = compare_losses("a peer that rounds neighbours as ours does", losses,
                               exact["losses"], FIRST_TOLERANCE)
    rounds = []
    for number in range(options.rounds):
        results = {"ours": run_ours(options, work, data)}
        for name, how in PEERS.items():
            results[name] = run_peer(options, work, data, how)
            if number == 0:
                compare_losses(name, losses, results[name]["losses"], FAST_TOLERANCE)
        rounds.append(results)
        print(f"round {number + 1}: " + ", ".join(
            f"{name} {result['rows_per_second']:,.0f} rows/s" for name, result in results.items()),
            flush=True)
    return rounds, agreement


def report(options, rounds: list[dict], agreement: dict) -> dict:
    ratios = [each["ours"]["rows_per_second"] / max(each[name]["rows_per_second"]
                                                    for name in JUDGED) for each in rounds]
    value = statistics.median(ratios)

    def median(name, key="rows_per_second"):
        return statistics.median(each[name][key] for each in rounds)

    print(f"ours ÷ the faster DataLoader: {value:.2f} (rounds: "
          f"{', '.join(f'{ratio:.2f}' for ratio in ratios)}), bar {BAR}; ÷ direct indexing: "
          f"{median('ours') / median('direct'):.2f}")
    print(f"peak resident: ours {median('ours', 'peak_resident_bytes') / 2**20:,.0f} MiB of "
          f"{options.limit}, the peer {median('dataloader_0', 'peak_resident_bytes') / 2**20:,.0f} "
          f"MiB; data {options.rows * 4096 / 2**20:,.0f} MiB")
    return {"name": "w9_plain_pytorch", "value": round(value, 3), "unit": "x", "bar": BAR,
            "pass": options.smoke or value >= BAR,
            "peers": {name: {"rows_per_second": round(median(name)),
                             "peak_resident_bytes": round(median(name, "peak_resident_bytes"))}
                      for name in ("ours", *PEERS)},
            "rows": options.rows, "batch_size": options.batch_size, "limit": options.limit,
            "threads": options.threads, "seed": SEED, "loss_difference": agreement,
            "command": " ".join(["bench/w9_plain_pytorch/run.py", *sys.argv[1:]]),
            "commit": os.environ.get("PLIMSOLL_COMMIT", "unknown")}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    recipe_bench.add_options(parser, "bench-w9")
    parser.add_argument("--rows", type=int, help="default 300,000 (1.1 GiB), --smoke 6,000")
    parser.add_argument("--rounds", type=int, help="default 3, --smoke 1")
    parser.add_argument("--batch-size", type=int, help="default 2048, --smoke 256")
    parser.add_argument("--limit", default="768MiB", help="our memory limit")
    parser.add_argument("--threads", type=int, default=min(2, os.cpu_count() or 1),
                        help="compute threads of both")
    options = parser.parse_args()
    options.rows = options.rows or (6_000 if options.smoke else 300_000)
    options.rounds = options.rounds or (1 if options.smoke else 3)
    options.batch_size = options.batch_size or (256 if options.smoke else 2048)
    return recipe_bench.run(options, lambda: report(
        options, *measure(options, options.work, make_data(options, options.work))))


if __name__ == "__main__":
    sys.exit(main())
