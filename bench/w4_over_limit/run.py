#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""w4_over_limit: `plimsoll train cosir` inside a limit that an eighth of its data would fill,
against the same run without a limit.

Condition vectors of 128 floats with both moments. The limited run is alone in a memory cgroup of
its limit: no kill, and the highest resident size within the limit. Limited and unlimited runs take
turns; each must end with the same state_sha256. The value is the median over the pairs of limited ÷
unlimited rows per second, after the first epoch: by then the unlimited run has everything in RAM.

    run.py [--smoke] [--pairs N] [--rows N] [--epochs N] [--limit MIB] [--keep]

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
from bench import recipe_bench  # noqa: E402
from tests.support.cgroup import MemoryCgroup  # noqa: E402

BAR = 0.9
SEED = 0
MIB = 1 << 20
TIMES_THE_LIMIT = 8
LABEL_DIM = 128
FEATURE_BYTES = 2 * 512 * 4            # Image and text of a pair, as synth makes them.
ROW_BYTES = 16 + 3 * LABEL_DIM * 4     # Header, weights, both moments.


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
    needed = options.rows * (FEATURE_BYTES + 4 * ROW_BYTES)
    if shutil.disk_usage(options.work).free < needed:
        fail(f"needs {needed / 2**30:.1f} GiB of disk in {options.work}: --work names another "
             "folder, --rows fewer pairs")
    made = json_at_end(recipe_bench.call([options.program, "synth", "cosir", "--rows", options.rows, "--out",
                             data, "--seed", SEED, "--json", "--quiet"]), "synth")
    if made["rows"] != options.rows or made["record_bytes"] != FEATURE_BYTES:
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
    settings = {"label_dim": LABEL_DIM, "holdout": 0, "eval_every_n_epochs": 0,
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
    if not limited and summary["limit_bytes"] < options.rows * (FEATURE_BYTES + ROW_BYTES):
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


def report(options, pairs: list[dict]) -> dict:
    def ratios(key):
        return [pair["limited"][key] / pair["unlimited"][key] for pair in pairs]

    def median(name, key):
        return statistics.median(pair[name][key] for pair in pairs)

    value = statistics.median(ratios("steady_rows_per_second"))
    over = options.rows * (FEATURE_BYTES + ROW_BYTES) / (options.limit * MIB)
    print(f"limited ÷ unlimited: {value:.3f} (pairs: "
          f"{', '.join(f'{ratio:.3f}' for ratio in ratios('steady_rows_per_second'))}), bar {BAR}; "
          f"data and rows are {over:.1f} × the limit; one state: "
          f"{pairs[0]['limited']['state_sha256'][:16]}…")
    figures = ("rows_per_second", "steady_rows_per_second", "peak_resident_bytes", "hit_rate",
               "feature_hit_rate", "stall_seconds")
    return {"name": "w4_over_limit", "value": round(value, 4), "unit": "x unlimited", "bar": BAR,
            "pass": options.smoke or (value >= BAR and over >= TIMES_THE_LIMIT
                                      and options.pairs >= 3 and options.epochs > 1),
            "peers": {name: {key: round(median(name, key), 3) for key in figures}
                      for name in ("limited", "unlimited")},
            "whole_run_ratio": round(statistics.median(ratios("rows_per_second")), 4),
            "times_the_limit": round(over, 2), "limit_mib": options.limit, "rows": options.rows,
            "epochs": options.epochs, "batch_size": options.batch_size, "pairs": options.pairs,
            "threads": options.threads, "cgroup": not options.no_cgroup, "seed": SEED,
            "state_sha256": pairs[0]["limited"]["state_sha256"]}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    recipe_bench.add_options(parser, "bench-w4")
    parser.add_argument("--pairs", type=int, help="default 3, --smoke 1")
    parser.add_argument("--rows", type=int, help="default: 8 times the limit; --smoke 6,000")
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--limit", type=int, default=384, help="MiB of the limited run")
    parser.add_argument("--batch-size", type=int,
                        help="default 2048, the recipe's own; --smoke 256")
    parser.add_argument("--threads", type=int, default=min(2, os.cpu_count() or 1),
                        help="compute threads of both")
    parser.add_argument("--no-cgroup", action="store_true",
                        help="only --memory-limit; chosen by itself where no cgroup can be made")
    options = parser.parse_args()
    full = -(-TIMES_THE_LIMIT * options.limit * MIB // (FEATURE_BYTES + ROW_BYTES))
    options.rows = options.rows or (6_000 if options.smoke else full)
    options.pairs = options.pairs or (1 if options.smoke else 3)
    options.batch_size = options.batch_size or (256 if options.smoke else 2_048)
    reason = None if options.no_cgroup else MemoryCgroup.why_not()
    if reason:
        print(f"no cgroup around the limited run, only --memory-limit: {reason}")
        options.no_cgroup = True
    return recipe_bench.run(
        options, lambda: report(options, measure(options, make_data(options))))


if __name__ == "__main__":
    sys.exit(main())
