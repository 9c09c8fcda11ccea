# SPDX-License-Identifier: Apache-2.0
"""Random runs of `train cosir`, `train can-kd` and of loops of users' own, each in a cgroup of its limit.

A run completes inside its limit, or is refused before its first step, naming a larger limit; a limit that
"would do" must complete, and the limits that refusals name lead to one that does (tests/support/named_limits.py).
Nothing is ever killed. Model, data, batch and limit are drawn from (seed, run); each outcome is one line of JSON. Loops are random_loops.py's;
they need the package.

    PLIMSOLL_PROGRAM=build/dev/bin/plimsoll PYTHONPATH=build/dev/python \\
        python -m tests.budget.random_runs --runs 1000 --seed 1 --out runs.jsonl --loops 0.3
"""
import argparse
import collections
import contextlib
import json
import os
import pathlib
import random
import shutil
import subprocess
import sys
import tempfile

from tests.budget.random_loops import References, Wrong, drawn_loop, run_loop
from tests.support.can_traffic import write_traffic
from tests.support.cgroup import MemoryCgroup
from tests.support.named_limits import until_it_does
from tests.support.python_can_kd import events

MIB = 1 << 20
PAIRS = (600, 1500, 4000, 9000)   # Of image and text.
WINDOWS = (60, 300, 1200)         # Of traffic.


def drawn(seed: int, index: int, loops: float = 0) -> dict:
    """The options of one run: that share of them is of loops, every third of the others of graphs."""
    if random.Random(f"{seed}/{index}/kind").random() < loops:
        return drawn_loop(random.Random(f"{seed}/{index}/loop"))
    dice = random.Random(f"{seed}/{index}")
    return drawn_graphs(dice) if index % 3 == 2 else drawn_pairs(dice)


def drawn_graphs(dice: random.Random) -> dict:
    preset = dice.choice(["small", "small", "large", ""])
    # So that no epoch takes minutes: an LSTM over wide layers is not drawn, and sees little of the bus.
    jk = dice.choice(["cat", "lstm"] if preset == "small" else ["cat"])
    return {
        "recipe": "can-kd",
        "data": f"windows-{dice.choice(WINDOWS[:1] if jk == 'lstm' else WINDOWS[1:])}",
        "min_steps_per_epoch": 1,
        "batch_size": dice.choice(["auto", 16, 64, 256, 1024, 4096]),
        "config": preset,
        "stage": dice.choice(["autoencoder", "normal"]),
        "model_size": dice.choice(["teacher", "both"]),
        "max_epochs": 1,
        "student_gat_hidden": dice.choice([8, 32] if jk == "lstm" else [8, 32, 96]),
        "student_gat_heads": dice.choice([1, 4] if jk == "lstm" else [1, 4, 8]),
        "student_gat_layers": dice.choice([1, 3, 6]),
        "gat_jk": jk,
        "gradient_checkpointing": dice.choice(["true", "false"]),
        "accumulate_grad_batches": dice.choice([1, 1, 3]),
        "precision": dice.choice(["32", "bf16-mixed"]),
        "use_teacher_cache": dice.choice(["true", "false"]),
        "offload_teacher_to_cpu": dice.choice(["true", "false"]),
        "scoring_chunk": dice.choice([16, 500, 2000]),
        "cache_bytes": dice.choice([-1, 0]),
        "foreign_bytes": f"{dice.choice([96, 128])}MiB",
        "limit_mib": int(dice.triangular(240, 1300, 450)),
    }


def drawn_pairs(dice: random.Random) -> dict:
    wide = dice.random() < 0.3
    return {
        "recipe": "cosir",
        "data": f"pairs-{dice.choice(PAIRS)}",
        "batch_size": dice.choice(["auto", 16, 64, 200, 512, 1024, 2048]),
        "label_dim": dice.choice([2, 8, 64, 256]),
        "projections": "true" if wide else "auto",
        "dim": 256 if wide else 0,
        "label_dtype": dice.choice(["float32", "bfloat16"]),
        "label_optimizer": dice.choice(["adamw", "adamw_fresh", "adagrad"]),
        "loader_threads": dice.choice([1, 2, 4]),
        "epochs": 1,
        "phase2_epochs": int(dice.random() < 0.15),
        "eval_pairs": dice.choice([0, 50, 400]),
        "foreign_bytes": f"{dice.choice([96, 128])}MiB",
        "limit_mib": int(dice.triangular(240, 850, 400)),
        "gradient_caching": dice.choice(["true", "false"]),
    }


def train(program: str, data: pathlib.Path, out: pathlib.Path, options: dict, limit_mib: int):
    shutil.rmtree(out, ignore_errors=True)
    flags = [word for key, value in options.items() if key not in ("recipe", "data", "limit_mib") and value != ""
             for word in (f"--{key.replace('_', '-')}", value)]
    with MemoryCgroup(limit_mib * MIB) as group:
        run = group.run([program, "train", options["recipe"], "--data", data, "--out", out,
                         "--memory-limit", f"{limit_mib}MiB", "--tensorboard", "false", "--quiet",
                         "--json", *flags], timeout=600)
    if run.oom_kills or run.returncode not in (0, 1):
        raise Wrong(f"{options} at {limit_mib} MiB: status {run.returncode}, {run.oom_kills} kills")
    if run.returncode == 0 and run.peak_resident_bytes > limit_mib * MIB:  # Python and torch alone may be more than a limit that is refused.
        raise Wrong(f"{options} at {limit_mib} MiB: {run.peak_resident_bytes >> 10} KiB resident")
    return run


def train_drawn(program: str, options: dict, folder: pathlib.Path,
                data_of: dict[str, pathlib.Path]) -> dict:
    data, out = data_of[options["data"]], folder / "run"
    tried = []

    def tried_at(limit: int) -> argparse.Namespace:
        run = train(program, data, out, options, limit)
        tried.append(limit)
        if run.returncode and (out / "events.jsonl").exists() and events(out, "step"):
            raise Wrong(f"{options} at {limit} MiB: refused after a step: {run.stderr[-600:]}")
        return argparse.Namespace(status=run.returncode, err=run.stderr[-600:], run=run)

    try:
        limit, done = until_it_does(tried_at, options["limit_mib"])
    except AssertionError as wrong:
        raise Wrong(f"{options} at {tried} MiB: {wrong}") from None
    summary = done.run.last_json
    if summary["status"] != "finished":
        raise Wrong(f"{options} at {limit} MiB: {summary['status']}, {summary['stop_reason']}")
    return {**options, "outcome": "finished" if len(tried) == 1 else "refused", "limits": tried,
            "peak_mib": done.run.peak_resident_bytes >> 20, "seconds": round(done.run.seconds, 2)}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--program", default=os.environ.get("PLIMSOLL_PROGRAM", ""))
    parser.add_argument("--runs", type=int, default=30)
    parser.add_argument("--first", type=int, default=0, help="index of the first run")
    parser.add_argument("--loops", type=float, default=0, help="share of runs that are Python loops [0]")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--out", type=pathlib.Path, help="a line of JSON a run is appended here")
    parser.add_argument("--work", default="build", help="where data and runs are made [build]")
    parser.add_argument("--keep-going", action="store_true", help="count what is wrong, go on")
    options = parser.parse_args()
    reason = MemoryCgroup.why_not()
    if reason:
        print(f"random_runs: skipped: {reason}")
        return 0
    seen: collections.Counter = collections.Counter()
    with tempfile.TemporaryDirectory(dir=options.work) as name, \
            References() if options.loops else contextlib.nullcontext() as references:
        folder = pathlib.Path(name).resolve()
        data_of = make_data(options.program, folder) if options.loops < 1 else {}
        for index in range(options.first, options.first + options.runs):
            run = drawn(options.seed, index, options.loops)
            try:
                if run.get("kind") == "loop":
                    line = run_loop(run, folder / "loop", references)
                else:
                    line = train_drawn(options.program, run, folder, data_of)
            except Wrong as wrong:
                print(f"run {index} of seed {options.seed}: {wrong}", flush=True)
                if not options.keep_going:
                    return 1
                line = {**run, "outcome": "wrong", "why": str(wrong)[:1500]}
            seen[line["outcome"]] += 1
            if options.out:
                with open(options.out, "a", encoding="utf-8") as file:
                    file.write(json.dumps({"seed": options.seed, "index": index, **line}) + "\n")
    print(json.dumps({"seed": options.seed, "runs": options.runs, **seen}))
    return 1 if seen["wrong"] else 0


def make_data(program: str, folder: pathlib.Path) -> dict[str, pathlib.Path]:
    made = {}

    def make(name: str, *command) -> None:
        made[name] = folder / name
        subprocess.run([program, *map(str, command), "--out", made[name]], check=True,
                       capture_output=True)

    for pairs in PAIRS:
        make(f"pairs-{pairs}", "synth", "cosir", "--rows", pairs, "--seed", 0)
    for windows in WINDOWS:
        traffic = folder / f"train_{windows}.csv"
        write_traffic(traffic, 0, windows * 50 + 1, 250)
        make(f"windows-{windows}", "import", "can", traffic, "--window", 50, "--stride", 50)
    return made


if __name__ == "__main__":
    sys.exit(main())
