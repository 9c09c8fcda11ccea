#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Gradients of ranks added up as plimsoll.Run does it (a tree, the same bits for any number of ranks), beside
all-reduce of gloo: in the same processes, in turn."""
import argparse
import json
import statistics
import sys
import time
import uuid

import torch
import torch.distributed as dist
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from plimsoll.ranks._ranks import Ranks
from plimsoll.ranks._virtual_workers import Node, Tree

BAR, SEED, GRADIENTS, SIZE = 1.4, 20250601, 16, 262144


def gradients_of(rank: int, size: int) -> list[torch.Tensor]:
    random = torch.Generator().manual_seed(SEED + rank)
    return [torch.randn(size, generator=random) for _ in range(GRADIENTS)]


def timed(rounds: int, size: int) -> tuple[list[float], list[float], list[float], bool]:
    """On a rank: seconds of each round of the tree, of all-reduce a gradient and of all in one, and whether all sums are
    right."""
    torch.set_num_threads(1)
    ranks = Ranks()
    weights = [float(rank % 3 + 1) for rank in range(ranks.count)]
    own = gradients_of(ranks.rank, size)
    parameters = [torch.nn.Parameter(torch.zeros(size)) for _ in own]
    trees, plain, whole = [], [], []
    for _ in range(rounds):
        for parameter, gradient in zip(parameters, own):
            parameter.grad = gradient.clone()
        room = ranks.sums.room(parameters)
        dist.barrier(group=ranks.group)
        began = time.perf_counter()
        ranks.sums.add_up([one.grad for one in parameters], room, weights, False)
        trees.append(time.perf_counter() - began)
        made = [one.grad for one in parameters]
        summed = [one.clone() for one in own]
        dist.barrier(group=ranks.group)
        began = time.perf_counter()
        for one in summed:
            dist.all_reduce(one, group=ranks.group)
        plain.append(time.perf_counter() - began)
        flat = torch.cat(own)
        dist.barrier(group=ranks.group)
        began = time.perf_counter()
        dist.all_reduce(flat, group=ranks.group)
        whole.append(time.perf_counter() - began)
    right = True
    for k in range(GRADIENTS):
        each = [gradients_of(rank, size)[k] for rank in range(ranks.count)]
        tree = Tree(False)
        for weight, one in zip(weights, each):
            tree.add(Node(0.0, weight, {0: one.clone()}))
        mean = sum(one.double() * weight for one, weight in zip(each, weights)) / sum(weights)
        right = (right and torch.equal(made[k], tree.whole().gradients[0])
                 and torch.allclose(made[k].double(), mean, atol=1e-5)
                 and torch.allclose(flat.view(GRADIENTS, -1)[k].double(), summed[k].double(), atol=1e-4)
                 and torch.allclose(summed[k].double(), sum(one.double() for one in each), atol=1e-4))
    ranks.close()
    return trees, plain, whole, right


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--smoke", action="store_true", help="two ranks, few rounds, small gradients; only the answer counts")
    parser.add_argument("--rounds", type=int, default=60)
    options = parser.parse_args()
    rounds, size = (min(options.rounds, 3), 20000) if options.smoke else (options.rounds, SIZE)
    peers, ratios = {}, []
    for count in (2,) if options.smoke else (2, 4, 8):
        config = LaunchConfig(min_nodes=1, max_nodes=1, nproc_per_node=count, run_id=uuid.uuid4().hex, rdzv_backend="c10d",
                              rdzv_endpoint="localhost:0", start_method="spawn", max_restarts=0, monitor_interval=0.05)
        made = elastic_launch(config, timed)(rounds, size)
        if not all(one[-1] for one in made.values()):
            sys.exit(f"rank_sums: with {count} ranks a sum is wrong")
        warm = min(5, rounds - 1)
        # A round is as long as its slowest rank's.
        tree, plain, whole = ([max(seconds) for seconds in zip(*(one[which][warm:] for one in made.values()))]
                              for which in range(3))
        peer = min(statistics.median(plain), statistics.median(whole))
        ratios.append(statistics.median(tree) / peer)
        peers[f"{count} ranks"] = {"ratio": round(ratios[-1], 3), "tree_ms": round(1e3 * statistics.median(tree), 2),
                                   "tree_ms_worst": round(1e3 * max(tree), 2),
                                   "all_reduce_ms": round(1e3 * statistics.median(plain), 2),
                                   "all_reduce_in_one_ms": round(1e3 * statistics.median(whole), 2)}
    value = max(ratios)
    result = {"name": "rank_sums", "value": round(value, 3), "unit": "x", "bar": BAR,
              "pass": options.smoke or value <= BAR, "seed": SEED, "rounds": rounds, "peers": peers}
    print(json.dumps(result))
    return 0 if result["pass"] else 1


if __name__ == "__main__":
    sys.exit(main())
