#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""How long a commit of a plimsoll.Run holds the loop, beside torch.save() and fsync in the loop."""
import argparse
import json
import os
import pathlib
import shutil
import statistics
import sys
import tempfile
import time

import torch

import plimsoll

BAR = 0.75
WIDTH = 512  # Columns of every weight: a step takes some 50 ms on one core, a commit's file most of a second.


def made(mib: int):
    """A model whose weights and AdamW's two states of them take so much."""
    torch.manual_seed(1)
    layers = max(1, (mib << 20) // (3 * 4 * WIDTH * WIDTH))
    model = torch.nn.Sequential(*(torch.nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(layers)))
    return model, torch.optim.AdamW(model.parameters(), lr=1e-5, fused=True)


def saved(folder: pathlib.Path, model, optimizer) -> float:
    """Seconds that a checkpoint takes as people write it so that it survives a power cut."""
    began = time.perf_counter()
    with open(folder / "partial", "wb") as file:
        torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, file)
        file.flush()
        os.fsync(file.fileno())
    os.replace(folder / "partial", folder / "checkpoint.pt")
    handle = os.open(folder, os.O_RDONLY)
    os.fsync(handle)
    os.close(handle)
    return time.perf_counter() - began


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--smoke", action="store_true", help="3 MiB and four commits; only the answer counts")
    parser.add_argument("--state-mib", type=int, default=256, help="weights and the optimizer's state")
    parser.add_argument("--commits", type=int, default=30)
    parser.add_argument("--directory", type=pathlib.Path, help="where to put the runs; default: build")
    options = parser.parse_args()
    mib, commits = (3, 4) if options.smoke else (options.state_mib, options.commits)
    where = options.directory or pathlib.Path(__file__).resolve().parents[2] / "build"
    where.mkdir(parents=True, exist_ok=True)
    folder = pathlib.Path(tempfile.mkdtemp(prefix="run_commit_stall-", dir=where))
    try:
        return measured(folder, mib, commits, options.smoke)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def measured(folder: pathlib.Path, mib: int, commits: int, smoke: bool) -> int:
    """The run commits every tenth step, and five steps later the loop saves by hand; a step lasts until both
    were written, so that neither's disk is the other's."""
    by_hand, steps, beside, last = [], [], [], time.perf_counter()
    (folder / "hand").mkdir()
    with plimsoll.Run(folder / "run", memory_limit="16GiB", compute_threads=1, deterministic=False) as run:
        model, optimizer = made(mib)
        run.track(model=model, optimizer=optimizer)
        batches = [torch.randn(64, WIDTH, generator=torch.Generator().manual_seed(one)) for one in range(commits)]
        for batch in run.steps([one for one in batches for _ in range(10)], progress=False, commit_every_steps=10):
            run.step(lambda x: model(x).square().mean(), batch)
            place, now = run.steps_made % 10, time.perf_counter()
            (beside if place == 0 and run.steps_made else steps).append(now - last)
            if place == 3:
                run._life.end_writing()
            elif place == 5:
                by_hand.append(saved(folder / "hand", model, optimizer))
            last = time.perf_counter()
    events = [json.loads(line) for line in (folder / "run/events.jsonl").read_text().splitlines()]
    stalls = [one["stall_seconds"] for one in events if one["event"] == "commit"][:-1]  # The last is waited for.
    check(folder, model, optimizer, len(stalls), commits)
    value = statistics.median(stalls) / statistics.median(by_hand)
    result = {
        "name": "run_commit_stall", "value": round(value, 3), "unit": "x", "bar": BAR,
        "pass": smoke or value <= BAR,
        "peers": {"stall_ms_p50": ms(statistics.median(stalls)), "stall_ms_most": ms(max(stalls)),
                  "by_hand_ms_p50": ms(statistics.median(by_hand)), "by_hand_ms_most": ms(max(by_hand)),
                  "step_ms_p50": ms(statistics.median(steps)), "commits": commits, "state_mib": mib}}
    print(json.dumps(result))
    return 0 if result["pass"] else 1


def ms(seconds: float) -> float:
    return round(1000 * seconds, 2)


def check(folder: pathlib.Path, model, optimizer, stalls: int, commits: int) -> None:
    """The last commit holds the model and the optimizer as they are."""
    if stalls != commits - 1:
        sys.exit(f"run_commit_stall: {stalls} commits beside the loop of {commits - 1}")
    file = folder / f"run/checkpoints/step-{10 * commits:09}/parts.pt"
    parts = torch.load(file, weights_only=True)["parts"]
    same = all(torch.equal(parts["model"][name], value) for name, value in model.state_dict().items())
    for key, state in optimizer.state_dict()["state"].items():
        same = same and torch.equal(parts["optimizer"]["state"][key]["exp_avg_sq"], state["exp_avg_sq"])
    if not same:
        sys.exit("run_commit_stall: the commit is not the model")


if __name__ == "__main__":
    sys.exit(main())
