# SPDX-License-Identifier: Apache-2.0
"""Random programs under `plimsoll run --signal`, each with the kernel's killer armed a little above what it may hold.

Leaks, spikes of known rates, workers that grow (one may ignore the signal), shared memory in segments, tensors and files,
runs that commit: what grows by less than 1 GB a second ends by the signal, or stops at a commit, before the kernel kills,
and is told so by `plimsoll why`. What grows faster may be killed; then that is told, and of which cgroup. Programs
that print "OOM in the classroom" and end well are no incident. Kind, rates and limit are drawn from (seed, index). Every
second program is in the cgroup that `plimsoll run` makes; the others are measured (--no-cgroup) inside one that is
SLACK_MIB larger than their limit.

    PLIMSOLL_PROGRAM=build/dev/bin/plimsoll PYTHONPATH=build/dev/python \\
        python -m tests.budget.random_programs --count 200 --seed 1 --out programs.jsonl
"""
import argparse
import collections
import concurrent.futures
import contextlib
import json
import os
import pathlib
import random
import shutil
import statistics
import subprocess
import sys
import tempfile

from tests.support.cgroup import MemoryCgroup

MIB = 1 << 20
SLACK_MIB = 24
PROGRAM = pathlib.Path(__file__).parents[1] / "support" / "growing_program.py"
KINDS = {"leak": 18, "spike": 25, "workers": 22, "shared": 13, "run": 7, "fast": 7, "classroom": 8}  # In a hundred.
ENDLESS = 1e12
LISTENS_S = 3.0  # From the first signal to the end, beside what saving takes.
DEAF_S = 13.0    # The same of who does not listen: the second signal comes after ten seconds at the latest.
EARLIEST = 0.2   # Of the limit: no signal comes while more is left, and more than comes in EARLIEST_S.
EARLIEST_S = 0.25

# A run whose loop, or whose data set in a worker, keeps so many bytes a step.
RUN = """
import sys, time
import torch
import plimsoll

folder, limit, rate, where = sys.argv[1], sys.argv[2], float(sys.argv[3]), sys.argv[4]
print("OOM in the classroom: Killed process 12 (python), out of memory", flush=True)
piece, kept = int(rate * 0.02), []

class Data(torch.utils.data.Dataset):
    def __len__(self): return 40000
    def __getitem__(self, at):
        if where == "worker":
            time.sleep(0.02)
            kept.append(b"x" * piece)
        return torch.ones(8)

with plimsoll.Run(folder, memory_limit=limit, seed=1, foreign_bytes="96MiB") as run:
    model = torch.nn.Linear(8, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    run.track(model=model, optimizer=optimizer)
    data = run.loader(Data(), batch_size=1, workers=int(where == "worker"))
    for batch in run.steps(data, epochs=1, commit_every_steps=10, progress=False):
        run.step(lambda x: model(x).mean(), batch)
        if where == "loop":
            time.sleep(0.02)
            kept.append(b"x" * piece)
    sys.exit(0 if run.stopped == "" else 1)
"""


class Wrong(Exception):
    """A program ended otherwise than it must, or was told to have."""


def drawn(seed: int, index: int) -> dict:
    dice = random.Random(f"programs/{seed}/{index}")
    kind, = dice.choices(list(KINDS), KINDS.values())
    limit = dice.randint(450 if kind == "run" else 256, 600)
    one = {"kind": kind, "cgroup": dice.choice(["own", "around"]), "limit_mib": limit, "what": "heap", "workers": 0,
           "base": dice.uniform(0, 0.5) * limit * MIB, "wait": dice.uniform(0, 0.5), "most": ENDLESS, "hold": False,
           "hears": dice.choice(["default", "default", "save"]), "save_s": dice.choice([0.02, 0.1, 0.3]),
           "signals": dice.choice(["TERM", "TERM,KILL"]), "start": dice.choice(["fork", "spawn"]), "daemon": True,
           "deaf_worker": -1, "survives": False, "status": 0}
    one["rate"] = 1e6 * dice.choice([dice.uniform(50, 900), dice.uniform(50, 300), dice.uniform(600, 900)])
    if kind == "leak":
        one["rate"] = 1e6 * dice.uniform(15, 120)
        one["base"] = max(0.0, limit * MIB - dice.uniform(2, 5) * one["rate"] - 32 * MIB)
        if dice.random() < 0.25:
            one.update(hears="deaf", signals="TERM,KILL")
            # Or it stops growing when little is left: the second signal comes ten seconds later.
            if dice.random() < 0.3:
                one.update(most=limit * MIB * 0.965 - one["base"] - 8 * MIB, hold=True)
    elif kind == "workers":
        one["workers"] = dice.randint(1, 4)
        one["daemon"] = dice.random() < 0.6
        if dice.random() < 0.4:
            one.update(deaf_worker=dice.randrange(one["workers"]))
        if one["hears"] == "save" or dice.random() < 0.15:
            one["signals"] = "TERM,KILL"  # At its exit it waits for its workers, one of which may not listen.
        if dice.random() < 0.15:
            one.update(hears="deaf", signals="TERM,KILL")
    elif kind == "shared":
        one["what"] = dice.choice(["segments", "tensors", "files"])
        one["limit_mib"] = limit = max(limit, 420) if one["what"] == "tensors" else limit
        one["workers"] = dice.choice([0, 0, 2])
        one["start"] = "fork"
        if one["workers"]:
            one["signals"] = "TERM,KILL"
    elif kind == "run":
        one["rate"] = 1e6 * dice.uniform(15, 150)
        one["where"] = dice.choice(["loop", "worker"])
    elif kind == "fast":
        one["workers"] = dice.choice([0, 0, 1])
        one["survives"] = dice.random() < 0.5
        one["most"] = one["rate"] = dice.uniform(1.1, 2.5) * limit * MIB
        one["hears"] = "default"
    elif kind == "classroom":
        one["base"], one["most"], one["workers"] = dice.uniform(0, 0.4) * limit * MIB, 0, dice.choice([0, 0, 2])
        one["status"] = dice.choice([0, 0, 3])
    ticks = dice.choice([0.005, 0.01, 0.02])  # Seconds of a piece.
    one["piece"] = int(one["most"]) if kind == "fast" else max(1 << 18, int(one["rate"] / max(1, one["workers"]) * ticks))
    return one


def must(condition: bool, text: str) -> None:
    if not condition:
        raise Wrong(text)


def run_drawn(program: str, one: dict, folder: pathlib.Path) -> dict:
    """Runs it, judges, and tells what it came to."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    kept = folder / ("run" if one["kind"] == "run" else "record")
    prefix = f"plimsoll-programs-{os.getpid()}-{folder.name}"
    if one["kind"] == "run":
        command = ["-c", RUN, kept, f"{one['limit_mib']}MiB", one["rate"], one["where"]]
    else:
        command = [PROGRAM, json.dumps({**one, "prefix": prefix, "saved": str(folder / "saved")})]
    words = [program, "run", "--memory-limit", f"{one['limit_mib']}MiB", "--signal", one["signals"], "--alert-file",
             folder / "alerts", "--json", "--record", folder / "record",
             *(["--no-cgroup"] if one["cgroup"] == "around" else []), "--", sys.executable, *command]
    with contextlib.ExitStack() as held:
        held.callback(lambda: [path.unlink() for path in pathlib.Path("/dev/shm").glob(f"{prefix}*")])
        around = (held.enter_context(MemoryCgroup((one["limit_mib"] + SLACK_MIB) * MIB)) if one["cgroup"] == "around"
                  else None)
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
        guard = around.start(words, **pipes) if around else subprocess.Popen([*map(str, words)], **pipes)
        try:
            out, err = guard.communicate(timeout=120)
        except subprocess.TimeoutExpired:
            guard.terminate()
            guard.communicate(timeout=30)
            raise Wrong("it does not come to an end") from None
        lines = [line for line in out.splitlines() if line.startswith('{"command"')]
        must(bool(lines), f"plimsoll run said nothing, status {guard.returncode}: {err[-600:]}")
        told = json.loads(lines[-1])
        told["all_kills"] = (around.oom_kills() if around else told["oom_kills"])
        done = subprocess.run([program, "why", kept, "--json"], text=True, capture_output=True, check=False)
    must(done.returncode == 0, f"plimsoll why: {done.stderr[-300:]}")
    alerts = [json.loads(line) for line in (folder / "alerts").read_text().splitlines()] \
        if (folder / "alerts").exists() else []
    return judged(one, told, json.loads(done.stdout), alerts, (folder / "saved").exists())


def judged(one: dict, told: dict, why: dict, alerts: list[dict], saved: bool) -> dict:
    signals = [line["time"] for line in alerts if line["level"] == "signal"]
    acts = [line for line in alerts if line["level"] == "act"]
    outcome = {"outcome": told["ending"], "status": told["status"], "kills": told["all_kills"], "cause": why["cause"],
               "signals": len(signals), "saved": saved, "seconds": round(told["seconds"], 2),
               "peak": round(told["charged_peak_bytes"] / MIB / one["limit_mib"], 3),
               "left_mib": acts[0]["left_bytes"] >> 20 if signals and acts else None,
               "after_s": round(told["time"] - signals[0], 2) if signals else None}
    shown = f"{outcome}; why: {why['summary']}"
    if one["kind"] != "run":
        must("while training" not in why["summary"] and "epoch" not in why["summary"], f"it is no run: {shown}")
    if one["kind"] == "classroom":
        must(not signals and told["all_kills"] == 0 and told["status"] == one["status"], f"it ends by itself: {shown}")
        must((why["cause"], why["incident"], why["memory"]) ==
             (("finished", False, False) if one["status"] == 0 else ("failed", True, False)), f"no incident: {shown}")
        return outcome
    if one["kind"] == "fast" and told["all_kills"]:
        return judged_kill(one, told, why, outcome)
    must(told["all_kills"] == 0, f"the kernel has killed: {shown}")
    if one["kind"] == "run":
        must(why["cause"] in ("pressure", "stopped", "refused") and why["memory"] and why["incident"],
             f"it stops at a commit: {shown}")
        must(why["checkpoint_step"] >= 0, f"nothing is committed: {shown}")
        return {**outcome, "outcome": why["cause"]}
    must(bool(signals) and told["ending"] == "stopped", f"it ends by the signal: {shown}")
    must((why["cause"], why["incident"], why["memory"]) == ("stopped", True, True), f"it was stopped: {shown}")
    deaf = one["hears"] == "deaf" or one["deaf_worker"] >= 0
    must(outcome["after_s"] <= (DEAF_S if deaf else LISTENS_S + one["save_s"]), f"it ends in time: {shown}")
    most = max(EARLIEST * one["limit_mib"] * MIB, EARLIEST_S * one["rate"])
    must(one["kind"] == "fast" or outcome["left_mib"] * MIB <= most, f"the signal comes too early: {shown}")
    statuses = {"default": {143}, "save": {0}, "deaf": {137}}[one["hears"]]
    must(told["status"] in statuses or (len(signals) == 2 and told["status"] == 137), f"another status: {shown}")
    # A program whose one thread saves grows no more meanwhile.
    must(one["hears"] != "save" or one["workers"] > 0 or saved, f"it had no time to save: {shown}")
    return outcome


def judged_kill(one: dict, told: dict, why: dict, outcome: dict) -> dict:
    """The kernel was quicker: what it killed, and in which cgroup, is told."""
    shown = f"{outcome}; why: {why['summary']} {why['evidence']}"
    killed = told["status"] == 137 or (told["status"] == 1 and one["workers"] > 0)
    if killed:
        cause = "killed_at_limit" if one["cgroup"] == "own" else "killed_in_cgroup"
        must((why["cause"], why["incident"], why["memory"]) == (cause, True, True), f"the kernel killed: {shown}")
        limit = one["limit_mib"] + (0 if one["cgroup"] == "own" else SLACK_MIB)
        must(f"{limit}.0 MiB" in why["summary"], f"its limit is named: {shown}")
    else:
        must(any("the kernel killed 1 of its processes" in line for line in why["evidence"]), f"a kill is told: {shown}")
    return {**outcome, "outcome": why["cause"]}


def table(lines: list[dict]) -> str:
    """A row a kind: how its programs ended."""
    rows = [["kind", "programs", "stopped", "of them saved", "by the second signal", "at a commit", "ended well",
             "killed, told rightly", "left at the signal", "to the end", "wrong"]]
    for kind in (*KINDS, "all"):
        of = [line for line in lines if kind in (line["kind"], "all")]
        good = [line for line in of if line["outcome"] != "wrong"]
        stopped = [line for line in good if line["cause"] == "stopped" and line["kind"] != "run"]
        left = [100 * line["left_mib"] / line["limit_mib"] for line in stopped if line["left_mib"] is not None]
        after = [line["after_s"] for line in stopped if line["after_s"] is not None]
        rows.append([kind, len(of), len(stopped), sum(line["saved"] for line in stopped),
                     sum(line["signals"] == 2 for line in stopped),
                     sum(line["kind"] == "run" for line in good),
                     sum(line["kind"] == "classroom" for line in good), sum(line["kills"] > 0 for line in good),
                     f"{min(left):.0f} to {max(left):.0f} %" if left else "",
                     f"{statistics.median(after):.2f} s, {max(after):.1f} at most" if after else "",
                     len(of) - len(good)])
    return "\n".join("| " + " | ".join(map(str, row)) + " |" for row in (rows[0], ["---"] * len(rows[0]), *rows[1:]))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--program", default=os.environ.get("PLIMSOLL_PROGRAM", ""))
    parser.add_argument("--count", type=int, default=40)
    parser.add_argument("--first", type=int, default=0, help="index of the first program")
    parser.add_argument("--kinds", default=",".join(KINDS), help="only those of these kinds [all]")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--jobs", type=int, default=1, help="how many at once [1]")
    parser.add_argument("--out", type=pathlib.Path, help="a line of JSON a program is appended here")
    parser.add_argument("--work", default="build", help="where they keep their looks [build]")
    options = parser.parse_args()
    if reason := MemoryCgroup.why_not():
        print(f"random_programs: skipped: {reason}")
        return 0
    program = os.path.abspath(options.program)
    lines: list[dict] = []
    with tempfile.TemporaryDirectory(dir=options.work) as name:

        def line_of(index: int) -> dict:
            one = drawn(options.seed, index)
            try:
                return {"index": index, **one, **run_drawn(program, one, pathlib.Path(name).resolve() / str(index))}
            except Wrong as wrong:
                return {"index": index, **one, "outcome": "wrong", "why": str(wrong)[:1500]}

        chosen = [index for index in range(options.first, options.first + options.count)
                  if drawn(options.seed, index)["kind"] in options.kinds.split(",")]
        with concurrent.futures.ThreadPoolExecutor(options.jobs) as pool:
            for line in pool.map(line_of, chosen):
                lines.append(line)
                if line["outcome"] == "wrong":
                    print(f"program {line['index']} of seed {options.seed}: {line['why']}", flush=True)
                if options.out:
                    with open(options.out, "a", encoding="utf-8") as file:
                        file.write(json.dumps({"seed": options.seed, **line}) + "\n")
    print(table(lines))
    seen = collections.Counter(line["outcome"] for line in lines)
    print(json.dumps({"seed": options.seed, "programs": len(lines), **seen}))
    return 1 if seen["wrong"] else 0


if __name__ == "__main__":
    sys.exit(main())
