# SPDX-License-Identifier: Apache-2.0
"""Operators that compare or turn rows: contrastive losses, neighbours, rotations."""
from __future__ import annotations

import torch

_ops = torch.ops.plimsoll


def normalize_rows(x: torch.Tensor) -> torch.Tensor:
    """Divides each row of `x` by max(its Euclidean length, 1e-8).

    x: [rows, features] float32 or float64.
    Returns: the same shape and dtype.
    """
    return _ops.normalize_rows(x)


def polar_coordinates(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Computes the radius and the angle of each row.

    The radius is the length of the row. The angle is atan2(q, x[0]): with two columns q is x[1], with more it is the length of
    x[1:] with the sign of x[1]. Gradients are 0 where they are undefined.

    x: [rows, columns] float32 or float64.
    Returns: (radius, angle), [rows] each.
    """
    return _ops.polar_coordinates(x)


def rotate_toward(x: torch.Tensor, direction: torch.Tensor, angle: torch.Tensor, scale: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Turns each row of `x` by an angle toward a direction, and gives it length 1.

        out = norm(scale · ‖x‖ · norm(cos(angle) · norm(x) + sin(angle) · norm(direction)))

    norm() divides by max(length, 1e-8). Only the sign of `scale` matters.

    x, direction: [rows, features] float32 or float64.
    angle, scale: [rows] of the same dtype.
    Returns: (out, norm(x)), [rows, features] each. norm(x) takes no gradient where x takes none.
    Source:  the combiner of the recipe `cosir` (docs/recipes/cosir.md, section 1).
    """
    return _ops.rotate_toward(x, direction, angle, scale)


def symmetric_info_nce(a: torch.Tensor, b: torch.Tensor, groups: torch.Tensor, temperature: float) -> torch.Tensor:
    """Computes the symmetric InfoNCE loss of two lists of rows, row i of `a` belonging to row i of `b`.

        s = a @ b.T / temperature
        loss = (cross_entropy(s, arange(rows)) + cross_entropy(s.T, arange(rows))) / 2

    Different rows of one group are not negatives of each other. The kernel computes the gradients in the forward pass. So the
    [rows, rows] matrix exists only during the call, and the tensors kept for backward are as large as `a` and `b`.

    a, b:   [rows, features] float32 or float64, two rows or more, whose lengths are at most 1 (normalize_rows()).
    groups: [rows] int64, any numbers; torch.arange(rows) for one group per row.
    temperature: 0.025 or more, so that no exponential underflows.
    Returns: a scalar of the same dtype.
    Memory:  rows² × 4 B during the call, and a 32nd of that for sums.
    Source:  van den Oord et al., "Representation Learning with Contrastive Predictive Coding" (2018), equation 4; both ways as
             in Radford et al., "Learning Transferable Visual Models From Natural Language Supervision" (2021), figure 3.
    """
    return _ops.symmetric_info_nce(a, b, groups, temperature)


def nearest_neighbors(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Finds the three nearest other rows of each row, and the other row of the largest cosine. Ties go to the lower index.

    x: [rows, columns] float32 or float64, two rows or more. It gets no gradient.
    Returns: (nearest, best_angle, best_cosine). nearest is [rows, 3] int64 by Euclidean distance, the nearest first, −1 where
             there are fewer rows. best_angle is [rows] int64, and best_cosine its cosine.
    """
    return _ops.nearest_neighbors(x)


def displacement_cosines(a: torch.Tensor, b: torch.Tensor, pairs0: torch.Tensor | None = None,
                         pairs1: torch.Tensor | None = None) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Computes the lengths of the displacements a − b, and the cosine of each displacement with another row's.

    a, b:   [rows, features] float32 or float64.
    pairs0, pairs1: [rows] int64, the index of the other row; None: not computed.
    Returns: (length, cosine0, cosine1), [rows] each; cosines that are not computed are 0. A cosine is
             x·y / max(‖x‖ ‖y‖, 1e-8).
    """
    return _ops.displacement_cosines(a, b, pairs0, pairs1)
