# SPDX-License-Identifier: Apache-2.0
"""Constraints and regularisers on rows, and the EmbeddingScheduler that applies them by epoch.

Each is a function of float [n, dim], in NumPy or torch. u are the rows scaled to length 1 (a row of
zeros stays zero); sums run over pairs of different rows:

    similarity   1 − mean uᵢ·uⱼ       least when all rows point one way
    diversity    mean (uᵢ·uⱼ)²        least when they are at right angles
    l1, l2       Σ|e| / n, Σ e² / n
    orthogonal   ‖E·Eᵀ − 1‖² / n²

None builds an n × n matrix: ‖E·Eᵀ‖² = ‖Eᵀ·E‖², and Σ uᵢ·uⱼ = ‖Σ u‖² − Σ ‖u‖².

Threads: pure functions; a scheduler is for one thread.
Memory:  two arrays of the size of the rows, and dim × dim.
"""
from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from ..core._arrays import _to_numpy

if TYPE_CHECKING:
    from ._embeddings import TrainableEmbeddingManager

CONSTRAINTS = ("similarity", "diversity")
REGULARIZERS = ("l1", "l2", "orthogonal")
_TINY = 1e-30


def _unit(rows: Any) -> tuple[Any, Any]:
    """Returns (rows scaled to length 1, lengths [n, 1]) of an array or tensor."""
    lengths = ((rows * rows).sum(1) + _TINY) ** 0.5
    return rows / lengths[:, None], lengths[:, None]


def _pairs(rows: Any) -> int:
    return max(len(rows) * (len(rows) - 1), 1)


def constraint_loss(kind: str, rows: Any) -> Any:
    """Computes the value of one constraint or regulariser: a float for an array, a differentiable scalar tensor for a tensor.

    Shape:  rows is float [n, dim].
    Errors: ValueError for another kind.
    """
    count = max(len(rows), 1)
    if kind == "l1":
        return abs(rows).sum() / count
    if kind == "l2":
        return (rows * rows).sum() / count
    if kind == "orthogonal":
        gram = rows.T @ rows
        return ((gram * gram).sum() - 2.0 * (rows * rows).sum() + len(rows)) / count ** 2
    if kind not in CONSTRAINTS:
        raise ValueError(f"kind: {kind!r} is none of {', '.join(CONSTRAINTS + REGULARIZERS)}")
    unit, _ = _unit(rows)
    if kind == "similarity":
        total = unit.sum(0)
        return 1.0 - ((total * total).sum() - (unit * unit).sum()) / _pairs(rows)
    gram = unit.T @ unit
    own = (unit * unit).sum(1)
    return ((gram * gram).sum() - (own * own).sum()) / _pairs(rows)


def constraint_gradient(kind: str, rows: np.ndarray) -> np.ndarray:
    """Computes the derivative of constraint_loss() by the rows. Shape: float64 [n, dim], in and out."""
    count = max(len(rows), 1)
    if kind == "l1":
        return np.sign(rows) / count
    if kind == "l2":
        return 2.0 * rows / count
    if kind == "orthogonal":
        return 4.0 * (rows @ (rows.T @ rows) - rows) / count ** 2
    unit, lengths = _unit(rows)
    if kind == "similarity":
        by_unit = -2.0 * (unit.sum(0) - unit) / _pairs(rows)
    elif kind == "diversity":
        own = (unit * unit).sum(1)[:, None]
        by_unit = 4.0 * (unit @ (unit.T @ unit) - own * unit) / _pairs(rows)
    else:
        raise ValueError(f"kind: {kind!r} is none of {', '.join(CONSTRAINTS + REGULARIZERS)}")
    return (by_unit - (by_unit * unit).sum(1)[:, None] * unit) / lengths


@dataclass(frozen=True)
class _Term:
    kind: str
    weight: float
    start_epoch: int
    end_epoch: float

    def active(self, epoch: int) -> bool:
        return self.start_epoch <= epoch < self.end_epoch


class EmbeddingScheduler:
    """A schedule of constraints and regularisers on rows: each holds in a range of epochs.

        scheduler = EmbeddingScheduler(manager)
        scheduler.add_constraint("diversity", weight=0.1, start_epoch=5)
        scheduler.add_regularizer("l2", weight=1e-4)
        scheduler.set_epoch(epoch)
        loss = task_loss + scheduler.loss(rows)      # In the loss, …
        scheduler.apply(ids, learning_rate=0.1)      # … or as a step of its own.
    """

    def __init__(self, manager: TrainableEmbeddingManager) -> None:
        """Makes a schedule for the rows of `manager`. It has no terms yet."""
        self._manager = manager
        self._terms: list[_Term] = []
        self.epoch = 0

    def add_constraint(self, kind: str, weight: float = 1.0, start_epoch: int = 0,
                       end_epoch: int | None = None) -> None:
        """Adds "similarity" or "diversity", in epochs [start_epoch, end_epoch).

        Errors: ValueError.
        """
        self._add(kind, CONSTRAINTS, weight, start_epoch, end_epoch)

    def add_regularizer(self, kind: str, weight: float = 1e-4, start_epoch: int = 0,
                        end_epoch: int | None = None) -> None:
        """Adds "l1", "l2" or "orthogonal", in epochs [start_epoch, end_epoch).

        Errors: ValueError.
        """
        self._add(kind, REGULARIZERS, weight, start_epoch, end_epoch)

    def _add(self, kind: str, kinds: tuple[str, ...], weight: float, start: int,
             end: int | None) -> None:
        if kind not in kinds:
            raise ValueError(f"kind: {kind!r} is none of {', '.join(kinds)}")
        if not math.isfinite(weight):
            raise ValueError(f"weight: {weight} is not a number")
        self._terms.append(_Term(kind, float(weight), start, math.inf if end is None else end))

    def set_epoch(self, epoch: int) -> None:
        """Sets the current epoch."""
        self.epoch = epoch

    def active(self) -> list[tuple[str, float]]:
        """Returns (kind, weight) of each term that holds in this epoch, in the order added."""
        return [(one.kind, one.weight) for one in self._terms if one.active(self.epoch)]

    def loss(self, rows: Any) -> Any:
        """Returns the weighted sum of this epoch's terms: a float for an array, a scalar tensor for a tensor.

        Shape: rows is float [n, dim].
        """
        return sum((weight * constraint_loss(kind, rows) for kind, weight in self.active()), 0.0)

    def apply(self, sample_ids: Any, learning_rate: float) -> float:
        """Makes one gradient step on the rows of `sample_ids`. Returns the loss before it. Frozen rows do not change.

        Errors: KeyError for an unknown id.
        """
        rows = np.asarray(_to_numpy(self._manager.get_embeddings(sample_ids), "rows"), np.float64)
        loss = float(self.loss(rows))
        step = np.zeros_like(rows)
        for kind, weight in self.active():
            step += weight * constraint_gradient(kind, rows)
        self._manager.update_embeddings(
            sample_ids, (rows - learning_rate * step).astype(np.float32))
        return loss
