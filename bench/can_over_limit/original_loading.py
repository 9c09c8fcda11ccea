#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""original_loading.py DIR: the graphs of a set as the original holds them, a list of one object of
four tensors each (K1). Prints how many there are so far, every thousand.
"""
import sys

import torch
from safetensors import safe_open


def main() -> int:
    graphs = []
    with safe_open(f"{sys.argv[1]}/graphs.safetensors", framework="pt") as file:
        nodes, edges = file.get_tensor("node_ptr").tolist(), file.get_tensor("edge_ptr").tolist()
        labels = file.get_tensor("y")
        x, attributes, pairs = (file.get_slice(name) for name in ("x", "edge_attr", "edges"))
        for graph, label in enumerate(labels.tolist()):
            node, edge = (slice(ptr[graph], ptr[graph + 1]) for ptr in (nodes, edges))
            graphs.append({"x": x[node].clone(), "edge_index": pairs[edge].T.long().contiguous(),
                           "edge_attr": attributes[edge].clone(), "y": torch.tensor(label)})
            if len(graphs) % 1000 == 0:
                print(len(graphs), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
