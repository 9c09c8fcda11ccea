#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Measures torch_geometric's DataLoader on graphs of the sizes of graph_batches; prints one JSON object.

A list of Data in memory, shuffled batches of 256, no worker processes, one thread: what the original
does. Without torch_geometric the object says so; PLIMSOLL_PEER_PATH names a folder to look in first.
"""
import argparse
import json
import os
import statistics
import sys
import time

NODES, EDGES, FEATURES, BATCH = 26, 64, 11, 256


def graphs_per_second(graphs: int, probes: int) -> float:
    import torch
    from torch_geometric.data import Data
    from torch_geometric.loader import DataLoader

    torch.set_num_threads(1)
    torch.manual_seed(3)
    data = [Data(x=torch.rand(NODES, FEATURES), edge_index=torch.randint(0, NODES, (2, EDGES)),
                 edge_attr=torch.rand(EDGES, FEATURES), y=torch.tensor(i % 2))
            for i in range(graphs)]
    loader = DataLoader(data, batch_size=BATCH, shuffle=True)

    def probe() -> float:
        begin = time.perf_counter()
        seen = sum(batch.num_graphs for batch in loader)
        assert seen == graphs
        return graphs / (time.perf_counter() - begin)

    probe()
    return statistics.median(probe() for _ in range(probes))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--smoke", action="store_true")
    smoke = parser.parse_args().smoke
    if "PLIMSOLL_PEER_PATH" in os.environ:
        sys.path.insert(0, os.environ["PLIMSOLL_PEER_PATH"])
    try:
        import torch_geometric
        import torch_geometric.loader
    except ImportError as error:
        print(json.dumps({"torch_geometric": f"absent: {error}"}))
        return
    rate = graphs_per_second(1024 if smoke else 20_000, 1 if smoke else 5)
    print(json.dumps({"torch_geometric": torch_geometric.__version__,
                      "torch_geometric_graphs_per_s": rate}))


if __name__ == "__main__":
    main()
