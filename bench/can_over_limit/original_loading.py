#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""original_loading.py DIR: the graphs of a set as the original holds them, a list of one object of
four tensors each (K1), all in memory before the first step. Prints "begun", then how many there are.
"""
import sys

import torch
from safetensors.torch import load_file


def main() -> int:
    print("begun", flush=True)
    arrays = load_file(f"{sys.argv[1]}/graphs.safetensors")
    arrays = {name: array.clone() for name, array in arrays.items()}  # No longer the file's pages.
    nodes, edges = arrays["node_ptr"].tolist(), arrays["edge_ptr"].tolist()
    graphs = [{"x": arrays["x"][nodes[g]:nodes[g + 1]].clone(),
               "edge_index": arrays["edges"][edges[g]:edges[g + 1]].T.long().contiguous(),
               "edge_attr": arrays["edge_attr"][edges[g]:edges[g + 1]].clone(),
               "y": torch.tensor(int(label))} for g, label in enumerate(arrays["y"])]
    print(len(graphs), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
