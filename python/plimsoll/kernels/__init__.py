# SPDX-License-Identifier: Apache-2.0
"""Kernels that torch lacks, as operators: `plimsoll.kernels.symmetric_info_nce(a, b, groups, 0.07)`.

Each is also `torch.ops.plimsoll.NAME`, once this module (or `plimsoll._torch`) is imported. Float32 on the CPU has a kernel of
its own: one pass, the same bits for any number of threads. Float64 and other devices run a composition of torch's operators.
Differentiable operators have gradients. All have shapes for FakeTensor, so `torch.compile(fullgraph=True)` accepts them.
A gradient has no gradient of its own; torch refuses to compute one.

Errors: TypeError for dtypes, ValueError for shapes, IndexError for row numbers out of range.
Threads: those of torch (`torch.set_num_threads()`).
"""
from ..core import _torch_gate

_torch_gate.load()  # Registers the operators.

from ._contrast import displacement_cosines, nearest_neighbors, normalize_rows, polar_coordinates, rotate_toward, symmetric_info_nce
from ._graphs import (
    dropout_factors,
    gat_conv,
    id_cross_entropy,
    id_cross_entropy_rows,
    linear_rows,
    mean_square,
    neighbor_cross_entropy,
    normal_divergence,
    sort_edges,
)
from ._layers import column_moments, logistic, lstm_cell, mix_layers, norm_relu_dropout, relu_dropout, sample_normal, segment_mean
from ._random import mix64, philox, random_normal, random_uniform, uniform_of
from ._recall import recall_ranks, turned_gallery_ranks, turned_query_ranks

__all__ = ["column_moments", "displacement_cosines", "dropout_factors", "gat_conv", "id_cross_entropy", "id_cross_entropy_rows", "linear_rows",
           "logistic", "lstm_cell", "mean_square", "mix64", "mix_layers", "nearest_neighbors", "neighbor_cross_entropy", "norm_relu_dropout",
           "normal_divergence", "normalize_rows", "philox", "polar_coordinates", "random_normal", "random_uniform", "recall_ranks",
           "relu_dropout", "rotate_toward", "sample_normal", "segment_mean", "sort_edges", "symmetric_info_nce", "turned_gallery_ranks",
           "turned_query_ranks", "uniform_of"]
