#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""can_over_limit: `plimsoll train can-kd` on ten times more graphs than its memory limit holds,
against the same run without a limit; and the original's way of loading them, in the same cgroup.

    run.py [--smoke] [--limit MIB] [--times N] [--pairs N] [--keep]

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
HERE = pathlib.Path(__file__).resolve().parent
sys.path.insert(0, str(ROOT))
from bench import recipe_bench
from tests.support.can_traffic import write_repeated_traffic
from tests.support.cgroup import MemoryCgroup

BAR = 0.8
SEED = 7
MIB = 1 << 20
WINDOW, STRIDE = 100, 50


def fail(text: str) -> None:
    sys.exit(f"can_over_limit: {text}")


def import_set(options, repeats: int) -> tuple[pathlib.Path, int]:
    """The set's folder and the bytes of its file; the traffic is removed again."""
    shutil.rmtree(options.work / "bus", ignore_errors=True)
    write_repeated_traffic(options.work / "bus" / "train_01__flood.csv", SEED, repeats)
    data = options.work / "set"
    recipe_bench.call([options.program, "import", "can", options.work / "bus", "--out", data, "--window",
                       WINDOW, "--stride", STRIDE])
    shutil.rmtree(options.work / "bus")
    return data, (data / "graphs.safetensors").stat().st_size


def make_set(options) -> tuple[pathlib.Path, int]:
    """At least options.times the limit of graphs: a block tells how many repetitions that takes."""
    data, one = import_set(options, 1)
    wanted = int(options.times * options.limit * MIB)
    if one < wanted:
        shutil.rmtree(data)
        data, one = import_set(options, -(-wanted * 21 // (20 * one)))
    if one < wanted:
        fail(f"the set has {one} bytes, fewer than {options.times} × the limit")
    return data, one


def train(options, data: pathlib.Path, limited: bool) -> dict:
    """One run, in a cgroup of the limit if `limited`. Fails when it was killed or not held."""
    out = options.work / "run"
    shutil.rmtree(out, ignore_errors=True)
    command = [options.program, "train", "can-kd", "--data", data, "--out", out, "--config", "small", "--stage",
               "normal", "--max-epochs", 1, "--seed", SEED, "--compute-threads", options.threads,
               "--quiet", "--json"]
    if limited:
        with MemoryCgroup(options.limit * MIB) as group:
            run = group.run([str(part) for part in [*command, "--memory-limit", f"{options.limit}MiB"]])
        if run.returncode or run.oom_kills:
            fail(f"the limited run ended with {run.returncode}, {run.oom_kills} kills for memory\n"
                 f"{run.stderr[-2000:]}")
        summary = run.last_json
        summary["peak_resident_bytes"] = run.peak_resident_bytes  # The kernel's word.
        if run.peak_resident_bytes > options.limit * MIB:
            fail(f"resident up to {run.peak_resident_bytes} bytes, over {options.limit} MiB")
    else:
        summary = json.loads(recipe_bench.call(command).strip().splitlines()[-1])
    [admitted] = [e for e in recipe_bench.events(out) if e["event"] == "admitted"]
    if summary["status"] != "finished" or admitted["graph_set_cached"] == limited:
        fail(f"a run ended {summary['status']}, its set cached: {admitted['graph_set_cached']}")
    return summary


def load_as_the_original_does(options, data: pathlib.Path) -> None:
    """A list of all graphs must be killed in the same cgroup, while it is loaded."""
    with MemoryCgroup(options.limit * MIB) as group:
        run = group.run([sys.executable, str(HERE / "original_loading.py"), str(data)])
    if run.oom_kills == 0 or run.returncode != -9:
        fail(f"a list of all graphs ended with {run.returncode}, {run.oom_kills} kills for memory\n"
             f"{run.stderr[-1000:]}")
    if run.stdout.split() != ["begun"]:
        fail(f"the list of graphs was killed before or after it was loaded: {run.stdout[-200:]}")
    print(f"a list of all graphs: killed after {run.seconds:.1f} s in the same cgroup", flush=True)


def benchmark(options) -> dict:
    data, size = make_set(options)
    load_as_the_original_does(options, data)
    pairs = []
    for number in range(options.pairs):
        order = [True, False] if number % 2 == 0 else [False, True]
        done = {limited: train(options, data, limited) for limited in order}
        pairs.append((done[True], done[False]))
        print(f"pair {number + 1}: " + ", ".join(
            f"{name} {run['graphs_per_second']:,.0f} graphs/s, resident up to "
            f"{run['peak_resident_bytes'] / MIB:,.0f} MiB"
            for name, run in zip(("limited", "unlimited"), pairs[-1])), flush=True)
    states = {run["state_sha256"] for pair in pairs for run in pair}
    if len(states) != 1:
        fail(f"the runs ended in different states: {sorted(states)}")
    ratios = [a["graphs_per_second"] / b["graphs_per_second"] for a, b in pairs]
    value = statistics.median(ratios)
    over = size / (options.limit * MIB)
    print(f"limited ÷ unlimited {value:.3f} (pairs: {', '.join(f'{r:.3f}' for r in ratios)}), bar {BAR}; "
          f"the set is {over:.1f} × the limit")
    return {"name": "can_over_limit", "value": round(value, 4), "unit": "x unlimited", "bar": BAR,
            "pass": options.smoke or (value >= BAR and over >= 10),
            "peers": {name: {"graphs_per_s": round(statistics.median(
                pair[k]["graphs_per_second"] for pair in pairs)), "peak_mib": max(
                    pair[k]["peak_resident_bytes"] for pair in pairs) // MIB}
                for k, name in enumerate(("limited", "unlimited"))},
            "times_the_limit": round(over, 2),
            "limit_mib": options.limit, "set_mib": size // MIB, "pairs": options.pairs,
            "threads": options.threads, "seed": SEED, "state_sha256": states.pop()}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    recipe_bench.add_options(parser, "bench_can_over_limit")
    parser.add_argument("--limit", type=int, default=320, help="MiB of the limited run")
    parser.add_argument("--times", type=float, help="set ÷ limit; default 10, --smoke 1.2")
    parser.add_argument("--pairs", type=int, help="default 3, --smoke 1")
    parser.add_argument("--threads", type=int, default=min(2, os.cpu_count() or 1))
    options = parser.parse_args()
    options.times = options.times or (1.2 if options.smoke else 10)
    options.pairs = options.pairs or (1 if options.smoke else 3)
    if reason := MemoryCgroup.why_not():
        fail(f"this benchmark needs a cgroup: {reason}")
    return recipe_bench.run(options, lambda: benchmark(options))


if __name__ == "__main__":
    sys.exit(main())
