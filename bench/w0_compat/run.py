#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""The original's replay through plimsoll.compat, beside a plain program that works as it did."""
import argparse
import json
import os
import pathlib
import shutil
import statistics
import sys
import tempfile
import time

import numpy as np
import torch

import plimsoll
from original_way import OriginalWay
from plimsoll.compat import TrainableEmbeddingManager

ROWS, DIM, CHUNK, BATCH, STEPS = 1000, 128, 100, 32, 30
BAR_MS, COMMITS_MOST = 5.0, 4


class Replay:
    """The requests and what every row must hold afterwards."""

    def __init__(self, seed: int) -> None:
        random = np.random.default_rng(seed)
        self.ids = [random.choice(ROWS, BATCH, replace=False).tolist() for _ in range(STEPS)]
        torch.manual_seed(seed)
        self.rows = [torch.randn(BATCH, DIM) for _ in range(STEPS)]
        self.warm_ids = list(range(BATCH))

    def expected(self, first: torch.Tensor) -> torch.Tensor:
        out = first.clone()
        for ids, rows in zip(self.ids, self.rows, strict=True):
            out[ids] = rows
        return out

    def run(self, manager) -> dict[str, float]:
        """Milliseconds: of all, and of reading, of updating and of the sync at the end."""
        clock = time.perf_counter
        warm = manager.get_embeddings(self.warm_ids)
        manager.update_embeddings(self.warm_ids, warm)
        reading = updating = 0.0
        slowest = 0.0
        begin = clock()
        for ids, rows in zip(self.ids, self.rows, strict=True):
            t0 = clock()
            manager.get_embeddings(ids)
            t1 = clock()
            manager.update_embeddings(ids, rows)
            t2 = clock()
            reading += t1 - t0
            updating += t2 - t1
            slowest = max(slowest, t2 - t1)
        t0 = clock()
        manager.force_sync_all_chunks()
        end = clock()
        return {"total": (end - begin) * 1e3, "get": reading * 1e3, "update": updating * 1e3,
                "final sync": (end - t0) * 1e3, "slowest update": slowest * 1e3}


def ours(folder: pathlib.Path) -> TrainableEmbeddingManager:
    return TrainableEmbeddingManager(
        range(ROWS), DIM, storage_mode="disk", embeddings_dir=folder, chunk_size=CHUNK,
        cache_l1_size_mb=128, cache_l2_size_mb=256, sync_batch_size=10)


def check(replay: Replay, folder: pathlib.Path) -> tuple[float, int]:
    """Runs the replay once and compares everything. Returns hit rate and commits.

    Errors: SystemExit saying what is wrong.
    """
    manager = ours(folder)
    first = manager.get_embeddings(range(ROWS))
    before = manager.get_cache_performance()
    replay.run(manager)
    after = manager.get_cache_performance()
    requests = after["total_requests"] - before["total_requests"]
    commits = after["sync_operations"] - before["sync_operations"]
    wanted = replay.expected(first)
    live = manager.get_embeddings(range(ROWS))
    manager._table.commit_at_exit = False  # What is not durable by now is lost.
    manager.close()
    with ours(folder) as again:
        kept = again.get_embeddings(range(ROWS))
    problems = []
    if not torch.equal(live, wanted):
        problems.append("rows differ from what was written")
    if not torch.equal(kept, wanted):
        problems.append("rows are not all there after opening the table again")
    if requests != 2 * BATCH * (STEPS + 1) or after["cache_hit_rate"] != 1.0:
        problems.append(f"{requests} requests at a hit rate of {after['cache_hit_rate']}: the "
                        "table fits its slab, so every one is a hit")
    if commits > COMMITS_MOST:
        problems.append(f"{commits} commits, at most {COMMITS_MOST} are due")
    if problems:
        sys.exit("w0_compat: " + "; ".join(problems))
    return after["cache_hit_rate"], commits


def sync_us(folder: pathlib.Path) -> float:
    """Median microseconds of one 4 KiB append made durable, where the tables are."""
    handle = os.open(folder / "probe", os.O_RDWR | os.O_CREAT)
    times = []
    for at in range(100):
        begin = time.perf_counter()
        os.pwrite(handle, bytes(4096), 4096 * at)
        os.fdatasync(handle)
        times.append((time.perf_counter() - begin) * 1e6)
    os.close(handle)
    return statistics.median(times)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--smoke", action="store_true", help="two runs; only the answer counts")
    parser.add_argument("--runs", type=int, default=21, help="runs of each, interleaved")
    parser.add_argument("--seed", type=int, default=7)
    parser.add_argument("--directory", default="", help="where to put the tables (a real disk)")
    options = parser.parse_args()
    runs = 2 if options.smoke else options.runs
    root = pathlib.Path(__file__).resolve().parents[2] / "build"
    parent = options.directory or (root if root.exists() else ".")
    scratch = pathlib.Path(tempfile.mkdtemp(prefix="w0-", dir=parent))
    torch.set_num_threads(1)
    replay = Replay(options.seed)
    peers = {"before": {"sync_batch_size": 1}, "after": {"sync_batch_size": 10},
             "quick": {"auto_sync": False}}
    times: dict[str, list[dict[str, float]]] = {name: [] for name in ("ours", *peers)}
    opening = []
    try:
        with plimsoll.Governor("2GiB"):
            hit_rate, commits = check(replay, scratch / "check" / "a" / "b")
            for name, settings in peers.items():
                peer = OriginalWay(range(ROWS), DIM, scratch / f"{name}-check", CHUNK, **settings)
                first = peer.get_embeddings(list(range(ROWS)))
                replay.run(peer)
                if not torch.equal(peer.read_files(), replay.expected(first)):
                    sys.exit(f"w0_compat: the peer {name!r} lost rows")
            for run in range(runs):
                begin = time.perf_counter()
                manager = ours(scratch / f"ours-{run}" / "a" / "b")
                opening.append((time.perf_counter() - begin) * 1e3)
                times["ours"].append(replay.run(manager))
                manager.close()
                for name, settings in peers.items():
                    peer = OriginalWay(range(ROWS), DIM, scratch / f"{name}-{run}", CHUNK,
                                       **settings)
                    times[name].append(replay.run(peer))
        probe = sync_us(scratch)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)

    print(f"answer: {ROWS} rows, hit rate {hit_rate:.1%}, {commits} commits, all durable")
    print(f"{'':16}" + "".join(f"{name:>16}" for name in times["ours"][0]))
    for name, each in times.items():
        print(f"{name:16}" + "".join(
            f"{statistics.median(one[part] for one in each):13.2f} ms" for part in each[0]))
    print(f"opening a new table: {statistics.median(opening):.1f} ms (not counted); one append of "
          f"4 KiB made durable: {probe:.0f} us")
    value = statistics.median(one["total"] for one in times["ours"])
    print(json.dumps({
        "name": "w0_compat", "value": round(value, 3), "unit": "ms", "bar": BAR_MS,
        "pass": bool(options.smoke or value <= BAR_MS),
        "peers": {f"original_{name}_ms": round(
            statistics.median(one["total"] for one in times[name]), 2) for name in peers},
        "min": round(min(one["total"] for one in times["ours"]), 3),
        "max": round(max(one["total"] for one in times["ours"]), 3), "runs": runs,
        "commits": commits, "hit_rate": hit_rate, "append_fdatasync_us": round(probe, 1),
        "seed": options.seed}))
    return 0 if options.smoke or value <= BAR_MS else 1


if __name__ == "__main__":
    sys.exit(main())
