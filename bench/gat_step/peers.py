#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Measures torch_geometric's GATConv on the CPU, forward and backward; prints one JSON object.

For each size it writes its inputs and answers (value and every gradient) as raw little-endian arrays
into a new folder named in the object, so that gat_step can compare its own before timing itself on
the same graphs. Without torch_geometric the object says so. PLIMSOLL_PEER_PATH names a folder to
import it from.
"""
import argparse
import json
import os
import pathlib
import statistics
import sys
import tempfile
import time

SIZES = {"student": (96, 24, 4), "teacher": (512, 64, 8)}  # in, out of a head, heads.
GRAPHS, NODES, EDGES, THREADS, SEED = 256, 26, 60, 2, 3


def measure(size: tuple[int, int, int], graphs: int, probes: int, folder: pathlib.Path) -> dict:
    import torch
    from torch_geometric.nn import GATConv

    width, out, heads = size
    generator = torch.Generator().manual_seed(SEED)
    nodes = graphs * NODES
    first = torch.arange(graphs).repeat_interleave(EDGES) * NODES
    edges = torch.randint(0, NODES, (2, graphs * EDGES), generator=generator) + first
    x = torch.randn((nodes, width), generator=generator, requires_grad=True)
    weighting = torch.randn((nodes, out * heads), generator=generator)
    torch.manual_seed(SEED)
    conv = GATConv(width, out, heads=heads)
    parameters = [x, conv.lin.weight, conv.att_src, conv.att_dst, conv.bias]

    def step():
        y = conv(x, edges)
        return y, torch.autograd.grad([y], parameters, [weighting])

    y, gradients = step()
    arrays = {"edges": edges, "x": x, "weighting": weighting, "weight": conv.lin.weight,
              "att_source": conv.att_src, "att_target": conv.att_dst, "bias": conv.bias, "y": y}
    arrays |= {f"grad_{name}": gradient for name, gradient in
               zip(("x", "weight", "att_source", "att_target", "bias"), gradients)}
    folder.mkdir()
    for name, array in arrays.items():
        (folder / name).write_bytes(array.detach().contiguous().numpy().tobytes())
    seconds = []
    for probe in range(probes + 3):
        begin = time.perf_counter()
        step()
        if probe >= 3:
            seconds.append(time.perf_counter() - begin)
    return {"nodes": nodes, "edges": graphs * EDGES, "seconds": statistics.median(seconds),
            "seconds_min": min(seconds)}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--smoke", action="store_true")
    smoke = parser.parse_args().smoke
    if "PLIMSOLL_PEER_PATH" in os.environ:
        sys.path.insert(0, os.environ["PLIMSOLL_PEER_PATH"])
    try:
        import torch
        import torch_geometric
        import torch_geometric.nn
    except ImportError as error:
        print(json.dumps({"torch_geometric": f"absent: {error}"}))
        return
    torch.set_num_threads(THREADS)
    folder = pathlib.Path(tempfile.mkdtemp(prefix="gat_step_"))
    made = {"torch_geometric": torch_geometric.__version__, "torch": torch.__version__,
            "threads": THREADS, "graphs": 8 if smoke else GRAPHS, "folder": str(folder)}
    for name, size in SIZES.items():
        made[name] = measure(size, made["graphs"], 1 if smoke else 40, folder / name)
    print(json.dumps(made))


if __name__ == "__main__":
    main()
