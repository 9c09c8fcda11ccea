# SPDX-License-Identifier: Apache-2.0
"""OriginalStudent: a student that the original published, to be evaluated beside ours.

features → layers × (graph attention, ReLU) → mixed by an LSTM → mean of a graph's nodes → dense → logit

It is read from safetensors with torch_geometric's names (convs.N.lin.weight, jk.lstm.weight_ih_l0, lin.weight, …).
These models have no table of ids. Their ten features are the arbitration id as a number, the means of the eight bytes within
0 … 255, and how many frames of the window the node sent, of windows of 50 frames.

Threads: those of torch.   Memory: the weights, about 1.1 MB.
"""
from __future__ import annotations

import pathlib

import numpy as np
import torch
from torch import nn

from ... import kernels
from ...data._graphs import GraphBatch
from ._models import FEATURES, Attention, Dense, Draws, Graphs, LayerMix, Pass
from ._teacher_file import filled, read_weights

_ADVICE = "give a student with two or more GATConv layers and an LSTM over them"
_HOW = Pass(training=False, noise=0, rate=0.0, bf16=False)


class OriginalStudent(nn.Module):
    """Says how much each graph looks like an attack."""

    def __init__(self, layers: int, heads: int, hidden: int) -> None:
        super().__init__()
        draws, width = Draws(None), heads * hidden
        self.convs = nn.ModuleList(Attention(width if layer else FEATURES, hidden, heads, draws) for layer in range(layers))
        self.jk = LayerMix(width, layers, draws)
        self.lin = Dense(width, 1, draws)

    def forward(self, features: torch.Tensor, graphs: Graphs) -> torch.Tensor:
        """Returns logits [graphs]. features: of original_features(), [nodes, 10]."""
        layers: list[torch.Tensor] = []
        for conv in self.convs:
            layers.append(torch.relu(conv(layers[-1] if layers else features, graphs, _HOW)))
        return self.lin(kernels.segment_mean(self.jk(layers, _HOW), graphs.runs), _HOW).squeeze(1)


def load_original(path: pathlib.Path) -> OriginalStudent:
    """Reads a published student, to be asked. Errors: ValueError naming the tensor that is missing or does not fit; CorruptError."""
    saved = read_weights(path)
    first = saved.get("convs.0.att_source")
    if first is None or len(first.shape) != 2 or not all(first.shape):
        raise ValueError(f"{path}: convs.0.att_src is missing, or not of shape [1, heads, width]; {_ADVICE}")
    layers = sum(name.endswith(".att_source") for name in saved)
    with torch.device("meta"):
        model = OriginalStudent(layers, *first.shape)
    return filled(path, model, saved, _ADVICE)


def original_features(batch: GraphBatch, vocabulary: np.ndarray) -> torch.Tensor:
    """Returns what the original's models read, [nodes, 10] float32. An id that is not in the vocabulary is given as 0.

    Frames of a node are those of its edges, which keep them.
    """
    ids = batch.x[:, 0].astype(np.int64)
    features = np.zeros((len(ids), FEATURES), np.float32)
    features[:, 0] = np.append(vocabulary, 0)[np.minimum(ids, len(vocabulary))]
    features[:, 1:9] = batch.x[:, 1:9] * np.float32(255)
    features[:, 9] = np.bincount(batch.edge_index[0], batch.edge_attr[:, 0], len(ids))
    return torch.from_numpy(features)
