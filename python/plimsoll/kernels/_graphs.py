# SPDX-License-Identifier: Apache-2.0
"""Layers and losses of graphs: attention over edges, products whose bits depend on no other row, losses of nodes."""
from __future__ import annotations

from collections.abc import Sequence

import torch

_ops = torch.ops.plimsoll


def sort_edges(edge_index: torch.Tensor, nodes: int) -> tuple[torch.Tensor, ...]:
    """Sorts the edges of a batch of graphs by target and by source, once for all layers.

    Each node gets one self loop, as the last of its edges. It replaces the self loops in `edge_index`, as in
    torch_geometric. Other edges keep their order; parallel edges are kept.

    edge_index: [2, edges] int64: sources, then targets.
    nodes: number of nodes in the batch.
    Returns: six tensors, for `edges` of gat_conv() and neighbor_cross_entropy(): in_ptr, in_source, out_ptr, out_target, out_edge
             (int32) and self_edge (uint8). Lists of edges have edges + nodes entries; those behind in_ptr[nodes] are 0.
    """
    return tuple(_ops.sort_edges(edge_index, nodes))


def gat_conv(x: torch.Tensor, weight: torch.Tensor, att_source: torch.Tensor, att_target: torch.Tensor, bias: torch.Tensor,
             edges: Sequence[torch.Tensor], *, concat: bool = True, dropout: float = 0.0, seed: int = 0, place: int = 0,
             bf16: bool = False) -> torch.Tensor:
    """Computes one layer of graph attention over sorted edges.

        h = x @ weight.T, split into heads
        e[i, j] = leaky_relu(att_source · h[j] + att_target · h[i], 0.2) for an edge j → i
        y[i] = sum over j of softmax(e[i])[j] * h[j], heads side by side or their mean, plus bias

    The kernel stores no message per edge.

    x:      [nodes, in] float32 or float64.
    weight: [heads · out, in]; att_source, att_target: [heads, out], at most 64 heads.
    bias:   [heads · out] with concat, else [out].
    edges:  the result of sort_edges().
    concat: puts heads side by side instead of taking their mean.
    dropout: the share of attention weights that is dropped, chosen by dropout_factors() with `seed` and `place`.
    bf16:   as in linear_rows().
    Returns: [nodes, heads · out] or [nodes, out].
    Source:  Veličković et al., "Graph Attention Networks" (ICLR 2018); the defaults of torch_geometric's GATConv.
    """
    return _ops.gat_conv(x, weight, att_source, att_target, bias, edges, concat, dropout, seed, place, bf16)


def dropout_factors(like: torch.Tensor, rate: float, seed: int, place: int) -> torch.Tensor:
    """Makes the factors of dropout: 0 for a share of `rate`, else 1 / (1 − rate), in steps of 2^-16.

    A factor is a function of (seed, place, index) alone: the same on any device, for any number of threads and in a repeated
    step. Different `place` give different masks of one seed.

    like:   a tensor with the factors' shape, dtype (float32 or float64) and device.
    """
    return _ops.dropout_factors(like, rate, seed, place)


def linear_rows(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None, *, bf16: bool = False) -> torch.Tensor:
    """Computes x @ weight.T + bias, each element as one sum in order.

    The bits of a row depend on no other row and not on the number of threads. Those of torch's products do.

    x:      [rows, in] float32 or float64.
    weight: [out, in]; bias: [out], or None.
    bf16:   rounds x, weight and the gradient to bfloat16 for the products; sums and results stay float32.
    Returns: [rows, out].
    """
    return _ops.linear_rows(x, weight, bias, bf16)


def mean_square(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """Computes the mean of (x − y)² over all elements, as a scalar; summed in float64.

    x, y:   the same shape, float32 or float64, one element or more.
    """
    return _ops.mean_square(x, y)


def normal_divergence(mean: torch.Tensor, log_variance: torch.Tensor) -> torch.Tensor:
    """Computes the mean Kullback-Leibler divergence from N(mean, exp(log_variance)) to N(0, 1), as a scalar.

    mean, log_variance: the same shape, float32 or float64, one element or more.
    Source:  Kingma and Welling, "Auto-Encoding Variational Bayes" (2014), appendix B.
    """
    return _ops.normal_divergence(mean, log_variance)


def id_cross_entropy(rows: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, ids: torch.Tensor, *, bf16: bool = False) -> torch.Tensor:
    """Computes the mean cross entropy of `ids` under the logits rows @ weight.T + bias, 1,024 rows at a time.

    The gradients are computed in the forward pass, so the logits never exist as a whole.

    rows:   [rows, width] float32 or float64, one row or more.
    weight: [ids, width]; bias: [ids].
    ids:    [rows] int64, from 0 to the number of ids − 1.
    bf16:   as in linear_rows().
    Returns: a scalar.
    """
    return _ops.id_cross_entropy(rows, weight, bias, ids, bf16)


def id_cross_entropy_rows(rows: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """Computes the cross entropy of each row like id_cross_entropy(), without a gradient.

    Returns: [rows]. The bits of a row depend on no other row.
    """
    return _ops.id_cross_entropy_rows(rows, weight, bias, ids)


def neighbor_cross_entropy(rows: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, ids: torch.Tensor, edges: Sequence[torch.Tensor], *,
                           bf16: bool = False) -> torch.Tensor:
    """Computes the mean binary cross entropy of "this node sends to a node of this id", over nodes and ids.

    A node sends to itself only where `edge_index` of sort_edges() has that edge. Neither logits nor targets [nodes, ids] exist
    as a whole.

    rows:   [nodes, width] float32 or float64, one node or more.
    weight: [ids, width]; bias: [ids].
    ids:    [nodes] int64: the id of each node.
    edges:  the result of sort_edges().
    bf16:   as in linear_rows().
    Returns: a scalar.
    """
    return _ops.neighbor_cross_entropy(rows, weight, bias, ids, edges, bf16)
