# SPDX-License-Identifier: Apache-2.0
"""Layers that work row by row: seeded dropout, norms, means of runs of rows, an LSTM's step, mixtures of layers."""
from __future__ import annotations

from collections.abc import Sequence

import torch

_ops = torch.ops.plimsoll


def relu_dropout(x: torch.Tensor, rate: float, seed: int, place: int) -> torch.Tensor:
    """Computes relu(x) times dropout_factors(x, rate, seed, place), in one pass. Only the result is kept for backward.

    x: any shape, float32 or float64.
    """
    return _ops.relu_dropout(x, rate, seed, place)


def column_moments(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Computes the mean and the biased variance of each column, without gradients.

    x:      [rows, columns] float32 or float64, one row or more.
    Returns: (mean, variance), [columns] each.
    """
    return _ops.column_moments(x)


def norm_relu_dropout(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, mean: torch.Tensor, variance: torch.Tensor, *,
                      of_batch: bool, rate: float = 0.0, seed: int = 0, place: int = 0) -> torch.Tensor:
    """Computes batch norm, ReLU and dropout in one pass.

        y = relu((x − mean) / sqrt(variance + 1e-5) * weight + bias) * dropout_factors(x, rate, seed, place)

    x:      [rows, columns] float32 or float64.
    weight, bias, mean, variance: [columns].
    of_batch: True where mean and variance are column_moments(x): the gradient of x then goes through them. False: they are
            constants, such as running statistics.
    """
    return _ops.norm_relu_dropout(x, weight, bias, mean, variance, of_batch, rate, seed, place)


def logistic(x: torch.Tensor) -> torch.Tensor:
    """Computes 1 / (1 + exp(−x)). An element's bits do not depend on its position; those of torch.sigmoid() do.

    x: any shape, float32 or float64.
    """
    return _ops.logistic(x)


def sample_normal(mean: torch.Tensor, log_variance: torch.Tensor, seed: int, place: int) -> torch.Tensor:
    """Draws from N(mean, exp(log_variance)); the noise is a function of (seed, place, index), the same on any device.

    mean, log_variance: the same shape, float32 or float64. Both get gradients.
    Source:  Kingma and Welling, "Auto-Encoding Variational Bayes" (2014), section 2.4.
    """
    return _ops.sample_normal(mean, log_variance, seed, place)


def segment_mean(x: torch.Tensor, ptr: torch.Tensor) -> torch.Tensor:
    """Computes the mean of each run of rows, zeros for an empty one; the readout of a batch of graphs.

    x:      [rows, columns] float32 or float64.
    ptr:    [runs + 1] int32, ascending from 0 to rows: run g is x[ptr[g]:ptr[g + 1]].
    Returns: [runs, columns].
    """
    return _ops.segment_mean(x, ptr)


def lstm_cell(gates: torch.Tensor, before: torch.Tensor | None = None) -> tuple[torch.Tensor, torch.Tensor]:
    """Computes one step of an LSTM from its gates, which are in torch's order: input, forget, cell, output.

    gates:  [rows, 4 · hidden] float32 or float64, before their functions: x @ W.T + b + h @ U.T + c.
    before: [rows, hidden], the cell of the step before; None: zeros.
    Returns: (hidden, cell), [rows, hidden] each.
    Source:  Hochreiter and Schmidhuber, "Long Short-Term Memory" (1997), with forget gates, as torch.nn.LSTM.
    """
    return _ops.lstm_cell(gates, before)


def mix_layers(layers: Sequence[torch.Tensor], scores: torch.Tensor) -> torch.Tensor:
    """Computes the sum of layers weighted by softmax(scores), row by row: the end of torch_geometric's JumpingKnowledge("lstm").

    layers: [rows, columns] each, float32 or float64.
    scores: [rows, layers].
    Source:  Xu et al., "Representation Learning on Graphs with Jumping Knowledge Networks" (ICML 2018), section 4.
    """
    return _ops.mix_layers(layers, scores)
