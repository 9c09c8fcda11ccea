# SPDX-License-Identifier: Apache-2.0
"""Graphs, Classifier and Autoencoder: a batch of graphs, and the two models that answer it.

A node is an id that spoke: its index, and ten numbers. An edge says who spoke after whom. Both models embed the index, put the
numbers beside it, and pass messages by graph attention. Outside training an answer depends on its own graph alone.
Dropout and sampling are functions of `Graphs.noise`, of the place in the model and of the element. A step made again has
the same masks.
Reading order: plimsoll.kernels, this file, _losses.py.

Sources: Veličković et al., "Graph Attention Networks" (ICLR 2018); Xu et al., "Representation Learning on Graphs with
         Jumping Knowledge Networks" (ICML 2018); Kipf and Welling, "Variational Graph Auto-Encoders" (2016).
Threads: those of torch.
Memory:  the weights; for backward each layer's input and result, or with `checkpointing` its result alone.
"""
from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint, set_checkpoint_early_stop

from ... import kernels
from ...data._graphs import GraphBatch

FEATURES = 10
_LOG_VARIANCE_MAX = 10.0
_DECODER_HEADS = 4


@dataclasses.dataclass
class Graphs:
    """A batch of graphs.

    labels:   int64 [graphs], 1 for an attack.
    ids:      int64 [nodes]. features: float32 [nodes, 10].
    edges:    the result of kernels.sort_edges().
    graph:    int64 [nodes], ascending: the index of each node's graph in the batch.
    runs:     int32 [graphs + 1]: where each graph's nodes begin.
    numbers:  int64 [graphs], the graphs' places in the set; in host memory.
    noise:    the seed of a training step's dropout and sampling.
    """

    labels: torch.Tensor
    ids: torch.Tensor
    features: torch.Tensor
    edges: tuple[torch.Tensor, ...]
    graph: torch.Tensor
    runs: torch.Tensor
    numbers: torch.Tensor
    noise: int = 0

    def __len__(self) -> int:
        return len(self.labels)


def graphs_of(batch: GraphBatch, device: str | torch.device = "cpu", noise: int = 0) -> Graphs:
    """Makes a batch for the models from one of a GraphSet. noise: from 0 to 2^64 − 1."""
    x, graph, labels = (batch.tensor(name) for name in ("x", "batch", "y"))
    edges = kernels.sort_edges(batch.tensor("edge_index"), len(x))
    counts = torch.bincount(graph, minlength=len(labels))
    runs = functional.pad(counts.cumsum(0), (1, 0)).to(torch.int32)
    made = Graphs(labels, x[:, 0].long(), x[:, 1:].contiguous(), edges, graph, runs, torch.from_numpy(batch.graphs),
                  noise - (1 << 64) if noise >> 63 else noise)
    return made if str(device) == "cpu" else to_device(made, device)


def to_device(graphs: Graphs, device: str | torch.device) -> Graphs:
    """Copies a batch to a device; the numbers of its graphs stay in host memory."""
    def there(tensor: torch.Tensor) -> torch.Tensor:
        return tensor.to(device)

    return dataclasses.replace(
        graphs, ids=there(graphs.ids), features=there(graphs.features), edges=tuple(map(there, graphs.edges)),
        graph=there(graphs.graph), runs=there(graphs.runs), labels=there(graphs.labels))


class Draws:
    """Hands out first weights, each from a stream of its own. seed: None leaves them unset, to be read from a file."""

    def __init__(self, seed: int | None) -> None:
        self._seed, self._stream = seed, -1

    def uniform(self, *shape: int, width: float) -> nn.Parameter:
        self._stream += 1
        return nn.Parameter(torch.empty(shape) if self._seed is None else kernels.random_uniform(shape, width, self._seed, self._stream))

    def normal(self, *shape: int) -> nn.Parameter:
        self._stream += 1
        return nn.Parameter(torch.empty(shape) if self._seed is None else kernels.random_normal(shape, 1.0, self._seed, self._stream))


class Model(nn.Module):
    """A model of graphs: how it computes, beside its weights."""

    checkpointing = False
    """Whether a layer of a training step keeps its result alone, and is computed again for its gradients."""
    bf16 = False
    """Whether the products of a training step take bfloat16."""

    def remember(self) -> None:
        """Moves batch statistics on, once after a training pass, however often its layers were computed."""
        for part in self.modules():
            if isinstance(part, BatchNorm):
                part.remember()

    def settings(self, graphs: Graphs, rate: float) -> Pass:
        return Pass(self.training, graphs.noise, rate if self.training else 0.0, self.bf16 and self.training)

    def layer(self, run: Callable[..., torch.Tensor], *inputs: torch.Tensor) -> torch.Tensor:
        """Returns run(*inputs). With gradient checkpointing, backward computes it again."""
        if not (self.checkpointing and self.training and torch.is_grad_enabled()):
            return run(*inputs)
        made: torch.Tensor = again_in_backward(run, *inputs)
        return made


def again_in_backward(run: Callable[..., Any], *inputs: Any) -> Any:
    """Returns run(*inputs) without keeping its activations: they are computed again when backward needs them.

    Each time run() is made to its end. Where torch stops early, by an exception, an operator that saves its result would never
    let go of it.
    """
    with set_checkpoint_early_stop(False):
        return checkpoint(run, *inputs, use_reentrant=False, preserve_rng_state=False)


@dataclasses.dataclass(frozen=True)
class Pass:
    """How a forward pass computes."""

    training: bool
    noise: int
    rate: float
    bf16: bool


class Dense(nn.Module):
    """A dense layer, begun as torch.nn.Linear is."""

    def __init__(self, inputs: int, outputs: int, draws: Draws) -> None:
        super().__init__()
        self.weight = draws.uniform(outputs, inputs, width=inputs ** -0.5)
        self.bias = draws.uniform(outputs, width=inputs ** -0.5)

    def forward(self, x: torch.Tensor, how: Pass) -> torch.Tensor:
        return kernels.linear_rows(x, self.weight, self.bias, bf16=how.bf16)


class Attention(nn.Module):
    """A layer of graph attention; its heads stand side by side, or `mean` takes their mean."""

    def __init__(self, inputs: int, outputs: int, heads: int, draws: Draws, *, mean: bool = False) -> None:
        super().__init__()
        def glorot(rows: int, columns: int) -> nn.Parameter:
            return draws.uniform(rows, columns, width=(6.0 / (rows + columns)) ** 0.5)

        self.concat = not mean
        self.weight = glorot(heads * outputs, inputs)
        self.att_source = glorot(heads, outputs)
        self.att_target = glorot(heads, outputs)
        self.bias = nn.Parameter(torch.zeros(outputs if mean else heads * outputs))

    def forward(self, x: torch.Tensor, graphs: Graphs, how: Pass) -> torch.Tensor:
        return kernels.gat_conv(x, self.weight, self.att_source, self.att_target, self.bias, graphs.edges, concat=self.concat, bf16=how.bf16)


class BatchNorm(nn.Module):
    """Batch norm, ReLU and dropout in one pass."""

    running_mean: torch.Tensor
    running_variance: torch.Tensor

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.ones(width)), nn.Parameter(torch.zeros(width))
        self.register_buffer("running_mean", torch.zeros(width))
        self.register_buffer("running_variance", torch.ones(width))
        self._seen: tuple[torch.Tensor, torch.Tensor, int] | None = None

    def forward(self, x: torch.Tensor, how: Pass, place: int) -> torch.Tensor:
        mean, variance = self.running_mean, self.running_variance
        if how.training:
            mean, variance = kernels.column_moments(x)
            self._seen = mean, variance, len(x)
        return kernels.norm_relu_dropout(x, self.weight, self.bias, mean, variance, of_batch=how.training, rate=how.rate, seed=how.noise,
                                         place=place)

    @torch.no_grad()
    def remember(self) -> None:
        """Moves the running statistics on by the last pass."""
        if self._seen is not None and self._seen[2] > 1:
            mean, variance, rows = self._seen
            self.running_mean.mul_(0.9).add_(mean, alpha=0.1)
            self.running_variance.mul_(0.9).add_(variance, alpha=0.1 * rows / (rows - 1.0))
        self._seen = None


class NormedAttention(Attention):
    """Attention, then batch norm, ReLU and dropout. Heads that do not share the width evenly are all so wide; their mean is taken."""

    def __init__(self, inputs: int, width: int, heads: int, draws: Draws) -> None:
        shared = width % heads == 0
        super().__init__(inputs, width // heads if shared else width, heads, draws, mean=not shared)
        self.norm = BatchNorm(width)


@dataclasses.dataclass
class Reconstruction:
    """An autoencoder's answer.

    z, mean, log_variance: [nodes, latent]; reconstruction: [nodes, 10], from 0 to 1.
    ids:        the dense layer whose logits of z name the node's id.
    neighbours: the rows that the next layer reads, and that layer, whose logits name the ids that the node sends to.
    """

    z: torch.Tensor
    mean: torch.Tensor
    log_variance: torch.Tensor
    reconstruction: torch.Tensor
    ids: Dense
    neighbours: tuple[torch.Tensor, Dense]
    bf16: bool


class Autoencoder(Model):
    """A variational autoencoder of a graph's nodes.

    id embedding | numbers → attention with batch norm … → mean, log variance → z → attention … → the numbers
                                                                              z → the id; z → dense, dense → the neighbours
    widths: of the encoder's layers, the last the latent's. heads: of its first layer. ids: every id and the unknown one.
    """

    def __init__(self, ids: int, embedding: int, widths: Sequence[int], heads: int, dropout: float, seed: int | None) -> None:
        super().__init__()
        draws, latent, inputs = Draws(seed), widths[-1], embedding + FEATURES
        self.dropout = dropout
        self.embedding = draws.normal(ids, embedding)
        self.encoder = nn.ModuleList()
        for layer, width in enumerate(widths[:-1]):
            self.encoder.append(NormedAttention(inputs, width, 1 if layer else heads, draws))
            inputs = width
        self.mean = Dense(inputs, latent, draws)
        self.log_variance = Dense(inputs, latent, draws)
        self.decoder, inputs = nn.ModuleList(), latent
        for width in reversed(widths[1:-1]):
            self.decoder.append(NormedAttention(inputs, width, _DECODER_HEADS, draws))
            inputs = width
        self.decoder.append(Attention(inputs, FEATURES, 1, draws))
        self.id = Dense(latent, ids, draws)
        self.neighbours = nn.ModuleList(Dense(latent, width, draws) for width in (latent, latent, ids))

    def forward(self, graphs: Graphs) -> Reconstruction:
        how = self.settings(graphs, self.dropout)
        x = torch.cat([functional.embedding(graphs.ids, self.embedding), graphs.features], 1)
        for place, layer in enumerate(self.encoder):
            x = self._normed(layer, x, graphs, how, place)
        mean = self.mean(x, how)
        log_variance = torch.clamp(self.log_variance(x, how), -_LOG_VARIANCE_MAX, _LOG_VARIANCE_MAX)
        x = z = kernels.sample_normal(mean, log_variance, how.noise, 1000) if how.training else mean
        for place, layer in enumerate(self.decoder[:-1], 2000):
            x = self._normed(layer, x, graphs, how, place)
        reconstruction = kernels.logistic(self.decoder[-1](x, graphs, how))
        x = z
        for place, dense in enumerate(self.neighbours[:-1], 3000):
            x = kernels.relu_dropout(dense(x, how), how.rate, how.noise, place)
        last: Any = self.neighbours[-1]
        return Reconstruction(z, mean, log_variance, reconstruction, self.id, (x, last), how.bf16)

    def _normed(self, layer: Any, x: torch.Tensor, graphs: Graphs, how: Pass, place: int) -> torch.Tensor:
        return self.layer(lambda x: layer.norm(layer(x, graphs, how), how, place), x)


class LayerMix(nn.Module):
    """Weighs the layers of each node by an LSTM over them, in both directions, and adds them up."""

    def __init__(self, width: int, layers: int, draws: Draws) -> None:
        super().__init__()
        hidden = layers * width // 2
        self.ahead, self.back = (nn.ParameterDict({
            name: draws.uniform(*shape, width=hidden ** -0.5) for name, shape in (
                ("input", (4 * hidden, width)), ("hidden", (4 * hidden, hidden)), ("input_bias", (4 * hidden,)),
                ("hidden_bias", (4 * hidden,)))}) for _ in range(2))
        self.score = Dense(2 * hidden, 1, draws)

    def forward(self, layers: Sequence[torch.Tensor], how: Pass) -> torch.Tensor:
        ahead = self._states(self.ahead, layers, how)
        back = self._states(self.back, layers[::-1], how)[::-1]
        scores = [self.score(torch.cat(both, 1), how) for both in zip(ahead, back, strict=True)]
        return kernels.mix_layers(layers, torch.cat(scores, 1))

    @staticmethod
    def _states(weights: nn.ParameterDict, layers: Sequence[torch.Tensor], how: Pass) -> list[torch.Tensor]:
        states: list[torch.Tensor] = []
        cell = None
        for layer in layers:
            gates = kernels.linear_rows(layer, weights["input"], weights["input_bias"], bf16=how.bf16)
            gates = gates + (kernels.linear_rows(states[-1], weights["hidden"], weights["hidden_bias"], bf16=how.bf16) if states
                             else weights["hidden_bias"])
            hidden, cell = kernels.lstm_cell(gates, cell)
            states.append(hidden)
        return states


class Classifier(Model):
    """Graph attention with jumping knowledge; two classes per graph.

    id embedding | numbers → (attention, ReLU, dropout) … → all layers side by side, or mixed by an LSTM → mean of a graph's nodes
    → dense layers → logits

    hidden: the width of a head. Dense layers before the last are hidden · heads wide.
    """

    def __init__(self, ids: int, embedding: int, hidden: int, layers: int, heads: int, dense: int, lstm: bool, dropout: float,
                 seed: int | None, dense_width: int = 0) -> None:
        super().__init__()
        draws, width = Draws(seed), hidden * heads
        self.dropout = dropout
        self.embedding = draws.normal(ids, embedding)
        self.convs = nn.ModuleList(Attention(width if layer else embedding + FEATURES, hidden, heads, draws) for layer in range(layers))
        self.jk = LayerMix(width, layers, draws) if lstm else None
        widths = [width if lstm else width * layers, *[dense_width or width] * (dense - 1), 2]
        self.dense = nn.ModuleList(Dense(*two, draws) for two in zip(widths, widths[1:]))

    def forward(self, graphs: Graphs) -> torch.Tensor:
        """Returns logits [graphs, 2]."""
        how = self.settings(graphs, self.dropout)
        x = torch.cat([functional.embedding(graphs.ids, self.embedding), graphs.features], 1)
        layers: list[torch.Tensor] = []
        for number, conv in enumerate(self.convs):
            x = self.layer(lambda x, conv=conv, number=number: kernels.relu_dropout(
                conv(x, graphs, how), how.rate, how.noise, 2 * number + 1), x)
            layers.append(x)
        if self.jk is not None:
            mix = self.jk
            x = kernels.segment_mean(self.layer(lambda *layers: mix(layers, how), *layers), graphs.runs)
        else:
            x = torch.cat([kernels.segment_mean(layer, graphs.runs) for layer in layers], 1)
        for place, dense in enumerate(self.dense[:-1], 1000):
            x = kernels.relu_dropout(dense(x, how), how.rate, how.noise, place)
        return self.dense[-1](x, how)


def file_tensors(model: nn.Module) -> dict[str, torch.Tensor]:
    """Returns a model's parameters and buffers, which share its memory, by their names in its file."""
    return {name.replace("jk.ahead.", "jk.forward.").replace("jk.back.", "jk.backward."): tensor for name, tensor in model.state_dict().items()}
