#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""w4_over_limit: `plimsoll train cosir` inside a limit that an eighth of its data would fill,
against the same run without a limit.

Condition vectors of 128 floats with both moments. The limited run is alone in a memory cgroup of
its limit: no kill, and the highest resident size within the limit. Limited and unlimited runs take
turns; each must end with the same state_sha256. The value is the median over the pairs of limited ÷
unlimited rows per second, after the first epoch: by then the unlimited run has everything in RAM.
--disk-bound: little arithmetic for each page read; the value is limited ÷ what the slower of the
unlimited run and the bare disk allows.

    run.py [--smoke] [--disk-bound] [--pairs N] [--rows N] [--epochs N] [--limit MIB] [--keep]

The program is taken from PLIMSOLL_PROGRAM, else build/release/bin/plimsoll.
"""
import argparse
import json
import os
import pathlib
import shutil
import statistics
import sys

ROOT = pathlib.Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))
from bench import raw_disk, recipe_bench
from tests.support.cgroup import MemoryCgroup

BAR = 0.9
SEED = 0
MIB = 1 << 20
TIMES_THE_LIMIT = 8
PAGE = 4096
WRITE_BYTES = 256 << 10


class Sizes:
    """Of a pair: width of image and text as synth makes them, of the shared space, of the row; in bytes."""

    def __init__(self, width: int, dim: int, label_dim: int):
        self.width, self.dim, self.label_dim = width, dim, label_dim
        self.features = 2 * width * 4
        self.row = 16 + 3 * label_dim * 4  # Header, weights, both moments.


COMPUTE_BOUND, DISK_BOUND = Sizes(512, 512, 128), Sizes(256, 16, 16)


def fail(text: str) -> None:
    sys.exit(f"w4_over_limit: {text}")


def json_at_end(text: str, what: str) -> dict:
    try:
        return json.loads(text.strip().splitlines()[-1])
    except (IndexError, ValueError):
        fail(f"{what} printed no JSON: {text[-500:]}")


def make_data(options) -> pathlib.Path:
    """Makes the pairs; checks that what is trained on has the size this benchmark speaks of."""
    data = options.work / "data"
    needed = options.rows * (options.sizes.features + 4 * options.sizes.row)
    if shutil.disk_usage(options.work).free < needed:
        fail(f"needs {needed / 2**30:.1f} GiB of disk in {options.work}: --work names another "
             "folder, --rows fewer pairs")
    width = options.sizes.width
    made = json_at_end(recipe_bench.call(
        [options.program, "synth", "cosir", "--rows", options.rows, "--image-dim", width, "--text-dim", width, "--out",
         data, "--seed", SEED, "--json", "--quiet"]), "synth")
    if made["rows"] != options.rows or made["record_bytes"] != options.sizes.features:
        fail(f"synth wrote {made['rows']} records of {made['record_bytes']} bytes")
    return data


def seconds_after_first_epoch(run: pathlib.Path, epochs: int) -> float:
    """From the end of the first epoch to the end of the last, commits included."""
    events = [json.loads(line) for line in (run / "events.jsonl").read_text().splitlines()]
    ends = [event["time"] for event in events if event["event"] == "epoch"]
    if len(ends) != epochs:
        fail(f"{run} tells of {len(ends)} epochs, not {epochs}")
    return ends[-1] - ends[0]


def train(options, data: pathlib.Path, limited: bool) -> dict:
    """One run; returns its summary with `steady_rows_per_second`. Fails when it was not held."""
    out = options.work / "run"
    shutil.rmtree(out, ignore_errors=True)
    settings = {"dim": options.sizes.dim, "label_dim": options.sizes.label_dim, "holdout": 0, "eval_every_n_epochs": 0,
                "compute_threads": options.threads}
    command = [options.program, "train", "cosir", "--data", data, "--out", out, "--seed", SEED,
               "--epochs", options.epochs, "--batch-size", options.batch_size, "--json", "--quiet"]
    for key, value in settings.items():
        command += ["--set", f"{key}={value}"]
    if limited:
        command += ["--memory-limit", f"{options.limit}MiB"]
    if limited and not options.no_cgroup:
        with MemoryCgroup(options.limit * MIB) as group:
            run = group.run(command)
        if run.returncode or run.oom_kills:
            fail(f"the limited run ended with {run.returncode}, {run.oom_kills} kills for memory\n"
                 f"{run.stderr[-2000:]}")
        summary = json_at_end(run.stdout, "the limited run")
        summary["peak_resident_bytes"] = run.peak_resident_bytes  # The kernel's word.
    else:
        summary = json_at_end(recipe_bench.call(command), "the run")
    if summary["status"] != "finished" or summary["rows_skipped"]:
        fail(f"a run ended {summary['status']}, {summary['rows_skipped']} rows skipped")
    if limited and summary["peak_resident_bytes"] > options.limit * MIB:
        fail(f"resident up to {summary['peak_resident_bytes']} bytes, over {options.limit} MiB")
    if not limited and summary["limit_bytes"] < options.rows * (options.sizes.features + options.sizes.row):
        fail(f"this machine lets the unlimited run hold {summary['limit_bytes']} bytes only, less "
             "than its data; fewer --rows and a smaller --limit")
    if options.epochs > 1:
        summary["steady_rows_per_second"] = (
            options.rows * (options.epochs - 1) / seconds_after_first_epoch(out, options.epochs))
    else:
        summary["steady_rows_per_second"] = summary["rows_per_second"]
    return summary


def measure(options, data: pathlib.Path) -> list[dict]:
    """Pairs of a limited and an unlimited run, each first in turn; all must end in one state."""
    pairs = []
    for number in range(options.pairs):
        order = [True, False] if number % 2 == 0 else [False, True]
        done = {limited: train(options, data, limited) for limited in order}
        pair = {"limited": done[True], "unlimited": done[False]}
        pairs.append(pair)
        states = {run["state_sha256"] for each in pairs for run in each.values()}
        if len(states) != 1:
            fail(f"the runs ended in different states: {sorted(states)}")
        print(f"pair {number + 1}: " + ", ".join(
            f"{name} {run['steady_rows_per_second']:,.0f} rows/s (whole run "
            f"{run['rows_per_second']:,.0f}), resident up to "
            f"{run['peak_resident_bytes'] / MIB:,.0f} MiB, rows in memory {run['hit_rate']:.1%}"
            for name, run in pair.items()), flush=True)
    return pairs


def roofline(options, pairs: list[dict]) -> dict:
    """What the disk and the processor each allow, in rows a second; the disk is asked in the mix of an epoch.

    After the first epoch the pages of a pair's features are read, and its row is read and written.
    """
    sizes = options.sizes
    pages = -(-sizes.features // PAGE) * PAGE
    moved, read = pages + 2 * sizes.row, pages + sizes.row
    disk = raw_disk.speed(options.work / "raw", file_bytes=min(options.rows * sizes.features, 4 << 30),
                          total_bytes=min(options.rows * moved, 1 << 30), read_bytes=pages,
                          write_bytes=WRITE_BYTES, read_percent=round(100 * read / moved), at_random=True)
    processor = statistics.median(pair["unlimited"]["steady_rows_per_second"] for pair in pairs)
    bound = min(disk["bytes_per_second"] / moved, processor)
    line = {"bytes_a_row": moved, "disk_bytes_per_second": round(disk["bytes_per_second"]), "disk_depth": disk["depth"],
            "disk_rows_per_second": round(disk["bytes_per_second"] / moved, 1),
            "unlimited_rows_per_second": round(processor, 1), "bound_by": "disk" if bound < processor else "processor"}
    print(f"roofline: {moved:,} bytes a row at {disk['bytes_per_second'] / 1e6:,.0f} MB/s (depth {disk['depth']}) are "
          f"{line['disk_rows_per_second']:,.0f} rows/s; everything in RAM {processor:,.0f}: bound by the "
          f"{line['bound_by']}")
    return line


def report(options, pairs: list[dict]) -> dict:
    def ratios(key):
        return [pair["limited"][key] / pair["unlimited"][key] for pair in pairs]

    def median(name, key):
        return statistics.median(pair[name][key] for pair in pairs)

    line = roofline(options, pairs)
    value = statistics.median(ratios("steady_rows_per_second"))
    if options.disk_bound:
        bound = min(line["disk_rows_per_second"], line["unlimited_rows_per_second"])
        value = median("limited", "steady_rows_per_second") / bound
    over = options.rows * (options.sizes.features + options.sizes.row) / (options.limit * MIB)
    print(f"limited ÷ unlimited: {', '.join(f'{ratio:.3f}' for ratio in ratios('steady_rows_per_second'))}; value "
          f"{value:.3f}, bar {BAR}; "
          f"data and rows are {over:.1f} × the limit; one state: "
          f"{pairs[0]['limited']['state_sha256'][:16]}…")
    figures = ("rows_per_second", "steady_rows_per_second", "peak_resident_bytes", "hit_rate",
               "feature_hit_rate", "stall_seconds")
    return {"name": "w4_over_limit", "value": round(value, 4), "unit": "x the lower of disk and unlimited" if options.disk_bound else "x unlimited", "bar": BAR,
            "pass": options.smoke or (value >= BAR and over >= TIMES_THE_LIMIT
                                      and options.pairs >= 3 and options.epochs > 1),
            "peers": {**{name: {key: round(median(name, key), 3) for key in figures}
                         for name in ("limited", "unlimited")}, "roofline": line},
            "whole_run_ratio": round(statistics.median(ratios("rows_per_second")), 4),
            "times_the_limit": round(over, 2), "limit_mib": options.limit, "rows": options.rows,
            "epochs": options.epochs, "batch_size": options.batch_size, "pairs": options.pairs,
            "threads": options.threads, "cgroup": not options.no_cgroup, "seed": SEED,
            "state_sha256": pairs[0]["limited"]["state_sha256"]}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    recipe_bench.add_options(parser, "bench-w4")
    parser.add_argument("--disk-bound", action="store_true",
                        help=f"features of 2 x {DISK_BOUND.width} floats, rows of {DISK_BOUND.label_dim}, a shared space "
                             f"of {DISK_BOUND.dim}; batches of 512")
    parser.add_argument("--pairs", type=int, help="default 3, --smoke 1")
    parser.add_argument("--rows", type=int, help="default: 8 times the limit; --smoke 6,000")
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--limit", type=int, default=768, help="MiB of the limited run")
    parser.add_argument("--batch-size", type=int,
                        help="default 2048, the recipe's own; --smoke 256")
    parser.add_argument("--threads", type=int, default=min(2, os.cpu_count() or 1),
                        help="compute threads of both")
    parser.add_argument("--no-cgroup", action="store_true",
                        help="only --memory-limit; chosen by itself where no cgroup can be made")
    options = parser.parse_args()
    options.sizes = DISK_BOUND if options.disk_bound else COMPUTE_BOUND
    full = -(-TIMES_THE_LIMIT * options.limit * MIB // (options.sizes.features + options.sizes.row))
    options.rows = options.rows or (6_000 if options.smoke else full)
    options.pairs = options.pairs or (1 if options.smoke else 3)
    options.batch_size = options.batch_size or (256 if options.smoke else 512 if options.disk_bound else 2_048)
    reason = None if options.no_cgroup else MemoryCgroup.why_not()
    if reason:
        print(f"no cgroup around the limited run, only --memory-limit: {reason}")
        options.no_cgroup = True
    return recipe_bench.run(
        options, lambda: report(options, measure(options, make_data(options))))


if __name__ == "__main__":
    sys.exit(main())
