#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""One layer of graph attention, forward and backward, beside torch_geometric's GATConv on the CPU: in one process, in turns.

PLIMSOLL_PEER_PATH names a folder to import torch_geometric from. Without it the answer alone is checked, and the bar is not met.
"""
import argparse
import json
import os
import statistics
import sys
import time

import torch

import plimsoll
from plimsoll import kernels

SIZES = {"student": (96, 24, 4), "teacher": (512, 64, 8)}  # in, out of a head, heads.
GRAPHS, NODES, EDGES, SEED, BAR = 256, 26, 60, 3, 1.0
TOLERANCE = 2e-5  # Of an answer, as a share of its largest element.


def inputs(size: tuple[int, int, int], graphs: int) -> tuple[torch.Tensor, list[torch.Tensor], torch.Tensor]:
    """(edges, x and parameters that take gradients, a weighting of the result)."""
    width, out, heads = size
    random = torch.Generator().manual_seed(SEED)
    edges = torch.randint(0, NODES, (2, graphs * EDGES), generator=random) + torch.arange(graphs).repeat_interleave(EDGES) * NODES
    shapes = ((graphs * NODES, width), (heads * out, width), (heads, out), (heads, out), (heads * out,))
    scales = (1.0, width ** -0.5, out ** -0.5, out ** -0.5, 0.1)
    leaves = [(torch.randn(shape, generator=random) * scale).requires_grad_() for shape, scale in zip(shapes, scales)]
    return edges, leaves, torch.randn((graphs * NODES, heads * out), generator=random)


def answer(y: torch.Tensor, leaves: list[torch.Tensor], weighting: torch.Tensor) -> list[torch.Tensor]:
    """The value, then the gradients."""
    return [y.detach(), *torch.autograd.grad([y], leaves, [weighting])]


def ours(edges: torch.Tensor, leaves: list[torch.Tensor], weighting: torch.Tensor) -> list[torch.Tensor]:
    return answer(kernels.gat_conv(*leaves, kernels.sort_edges(edges, len(leaves[0]))), leaves, weighting)


def formula(edges: torch.Tensor, leaves: list[torch.Tensor], weighting: torch.Tensor) -> list[torch.Tensor]:
    """Edge by edge, in float64."""
    exact = [one.detach().double().requires_grad_() for one in leaves]
    x, weight, att_source, att_target, bias = exact
    heads, out = att_source.shape
    own = torch.arange(len(x))
    source, target = torch.cat([edges[:, edges[0] != edges[1]], torch.stack([own, own])], 1)
    h = (x @ weight.T).view(-1, heads, out)
    score = torch.nn.functional.leaky_relu((h * att_source).sum(2)[source] + (h * att_target).sum(2)[target], 0.2)
    e = (score - score.detach().max()).exp()
    alpha = e / torch.zeros(len(x), heads, dtype=torch.float64).index_add(0, target, e)[target]
    y = torch.zeros_like(h).index_add(0, target, h[source] * alpha.unsqueeze(2)).reshape(len(x), -1) + bias
    return answer(y, exact, weighting.double())


def peer_of(size: tuple[int, int, int], leaves: list[torch.Tensor]):
    """The peer's layer with our parameters: a function like ours()."""
    from torch_geometric.nn import GATConv

    width, out, heads = size
    conv = GATConv(width, out, heads=heads)
    with torch.no_grad():
        for theirs, mine in zip((conv.lin.weight, conv.att_src, conv.att_dst, conv.bias), leaves[1:]):
            theirs.copy_(mine.view(theirs.shape))
    x = leaves[0].detach().clone().requires_grad_()
    parameters = [x, conv.lin.weight, conv.att_src, conv.att_dst, conv.bias]
    return lambda edges, _, weighting: answer(conv(x, edges), parameters, weighting)


def near(name: str, made: list[torch.Tensor], wanted: list[torch.Tensor]) -> None:
    for k, (one, exact) in enumerate(zip(made, wanted, strict=True)):
        exact = exact.double().reshape(one.shape)
        apart = float((one.double() - exact).abs().max() / exact.abs().max())
        if not apart < TOLERANCE:
            sys.exit(f"gat_step: {name}: answer {k} is {apart} apart")


def seconds(function, *given) -> float:
    began = time.perf_counter()
    function(*given)
    return time.perf_counter() - began


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--smoke", action="store_true", help="few graphs, one probe; only the answer counts")
    parser.add_argument("--graphs", type=int, default=GRAPHS)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--probes", type=int, default=40)
    options = parser.parse_args()
    graphs, probes = (8, 1) if options.smoke else (options.graphs, options.probes)
    if "PLIMSOLL_PEER_PATH" in os.environ:
        sys.path.insert(0, os.environ["PLIMSOLL_PEER_PATH"])
    torch.set_num_threads(options.threads)
    peers: dict = {"threads": options.threads, "graphs": graphs, "plimsoll": plimsoll.__version__}
    try:
        import torch_geometric
        peers["torch_geometric"] = torch_geometric.__version__
    except ImportError as error:
        peers["torch_geometric"] = f"absent: {error}"
    there = not peers["torch_geometric"].startswith("absent")
    ratios = []
    for name, size in SIZES.items():
        given = inputs(size, graphs)
        near(name, ours(*given), formula(*given))
        told = peers[name] = {"nodes": graphs * NODES, "edges": graphs * EDGES}
        sides = {"plimsoll": ours}
        if there:
            sides["torch_geometric"] = peer_of(size, given[1])
            near(f"{name}, torch_geometric", ours(*given), sides["torch_geometric"](*given))
        turns = [[seconds(side, *given) for side in sides.values()] for _ in range(probes + 3)][3:]
        for side, spent in zip(sides, zip(*turns)):
            told[side] = {"seconds": statistics.median(spent), "seconds_min": min(spent)}
        if there:
            told["ratio"] = statistics.median(peer / own for own, peer in turns)
            ratios.append(told["ratio"])
    value = min(ratios, default=0.0)
    result = {"name": "gat_step", "value": round(value, 3), "unit": "times as fast as torch_geometric, the slower of both sizes", "bar": BAR,
              "pass": options.smoke or value >= BAR, "seed": SEED, "peers": peers}
    print(json.dumps(result))
    return 0 if result["pass"] else 1


if __name__ == "__main__":
    sys.exit(main())
