#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Rows of a table dealt to ranks, looked up and given their gradients as plimsoll.Run does it, beside all_to_all_single of
gloo with the same bytes: in the same processes, in turn."""
import argparse
import json
import shutil
import statistics
import sys
import tempfile
import time
import uuid

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

import plimsoll
from plimsoll.rows._rank_rows import DealtTable, LookedUp, Wanted, owners_of
from plimsoll.ranks._ranks import Ranks

BAR, SEED, ROWS, ASKED, DIM = 0.8, 20250601, 131072, 8192, 128


def rows_of(ids: np.ndarray, dim: int) -> torch.Tensor:
    """What the table has."""
    return (torch.from_numpy(ids)[:, None] * 7 % 1013 + torch.arange(dim)).float()


def meet(ranks: Ranks) -> None:
    """No rank goes on before all are here: what one does next would be in the time of others that share its core."""
    ranks.say("a lookup")


def raw(ranks: Ranks, wanted: Wanted, asked_by: list[list[int]], dim: int, back: bool) -> float:
    """Seconds of all_to_all_single with ids, and with rows the other way (back) or beside them."""
    given = [counts[ranks.rank] for counts in asked_by]
    asked, ids = torch.empty(sum(given), dtype=torch.int64), torch.from_numpy(wanted.ids)
    there, here = torch.ones(sum(given), dim), torch.ones(len(wanted.ids), dim)
    meet(ranks)
    began = time.perf_counter()
    dist.all_to_all_single(asked, ids, given, wanted.counts, group=ranks.group)
    if back:
        dist.all_to_all_single(here, there, wanted.counts, given, group=ranks.group)
    else:
        dist.all_to_all_single(there, here, given, wanted.counts, group=ranks.group)
    took = time.perf_counter() - began
    meet(ranks)
    return took


def timed(folder: str, rounds: int, rows: int, count: int, dim: int) -> tuple[list[list[float]], bool]:
    """On a rank: seconds of each round's lookup, of its bytes, of its gradients, of theirs; whether all were right."""
    torch.set_num_threads(1)
    ranks = Ranks()
    right, took = True, []
    ids = np.arange(rows)
    own = ids[owners_of(ids, ranks.count) == ranks.rank]
    with plimsoll.Governor("2GiB") as governor:
        store = plimsoll.EmbeddingStore.open(governor, f"{folder}/{ranks.rank}", ids=own, dim=dim, optimizer=plimsoll.SGD(lr=1.0),
                                             store_bytes=8 * dim * len(own) + (16 << 20), batch_rows=count)
        store.update(own, rows_of(own, dim).numpy())
        table = DealtTable("items", store, rows, ranks)
        random = np.random.default_rng([SEED, ranks.rank])
        for _ in range(rounds):
            asked = random.choice(rows, count, replace=False)
            meet(ranks)
            began = time.perf_counter()
            wanted, got = table.look_up(asked)
            seconds = [time.perf_counter() - began]
            meet(ranks)
            right = right and torch.equal(got[torch.from_numpy(wanted.places)], rows_of(asked, dim))
            asked_by = [list(map(int, one.text.split(","))) for one in ranks.say("a lookup", text=",".join(map(str, wanted.counts)))]
            seconds.append(raw(ranks, wanted, asked_by, dim, back=True))
            looked_up = LookedUp(table, wanted, got)
            looked_up.gradient = got
            meet(ranks)
            began = time.perf_counter()
            owned = table.owned([looked_up], lambda _: 0.5)
            seconds.append(time.perf_counter() - began)
            meet(ranks)
            right = right and torch.equal(owned.tensor, 0.5 * rows_of(owned.ids, dim)) and len(owned.ids) == sum(
                counts[ranks.rank] for counts in asked_by)
            seconds.append(raw(ranks, wanted, asked_by, dim, back=False))
            took.append(seconds)
        store.close()
    ranks.close()
    return took, right


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--smoke", action="store_true", help="two ranks, few rounds, few rows; only the answer counts")
    parser.add_argument("--rounds", type=int, default=60)
    parser.add_argument("--directory", help="where the tables are made; default: the system's folder for temporary files")
    options = parser.parse_args()
    rounds, rows, asked = (min(options.rounds, 3), 2000, 100) if options.smoke else (options.rounds, ROWS, ASKED)
    peers, ratios = {}, []
    for count in (2,) if options.smoke else (2, 4, 8):
        config = LaunchConfig(min_nodes=1, max_nodes=1, nproc_per_node=count, run_id=uuid.uuid4().hex, rdzv_backend="c10d",
                              rdzv_endpoint="localhost:0", start_method="spawn", max_restarts=0, monitor_interval=0.05)
        folder = tempfile.mkdtemp(dir=options.directory, prefix="rank_rows-")
        try:
            made = elastic_launch(config, timed)(folder, rounds, rows, asked, DIM)
        finally:
            shutil.rmtree(folder)
        if not all(right for _, right in made.values()):
            sys.exit(f"rank_rows: with {count} ranks a row or a gradient is wrong")
        warm = min(5, rounds - 1)
        # A round is as long as its slowest rank's.
        found, there, given, back = (statistics.median(max(one[which] for one in together) for together in zip(
            *(took[warm:] for took, _ in made.values()))) for which in range(4))
        ratios.append((there + back) / (found + given))
        peers[f"{count} ranks"] = {"ratio": round(ratios[-1], 3), "look_up_ms": round(1e3 * found, 2),
                                   "look_up_raw_ms": round(1e3 * there, 2), "gradients_ms": round(1e3 * given, 2),
                                   "gradients_raw_ms": round(1e3 * back, 2)}
    value = min(ratios)
    result = {"name": "rank_rows", "value": round(value, 3), "unit": "x", "bar": BAR,
              "pass": options.smoke or value >= BAR, "seed": SEED, "rounds": rounds, "peers": peers}
    print(json.dumps(result))
    return 0 if result["pass"] else 1


if __name__ == "__main__":
    sys.exit(main())
