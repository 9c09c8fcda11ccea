# SPDX-License-Identifier: Apache-2.0
"""Cosines, nearest neighbours and statistics over rows that come in pieces.

Threads: pure functions.   Memory: one piece, and k neighbours.
"""
from __future__ import annotations

from collections.abc import Iterable

import numpy as np

Pieces = Iterable[tuple[int, np.ndarray, np.ndarray]]


def _unit(rows: np.ndarray) -> np.ndarray:
    lengths = np.linalg.norm(rows, axis=-1, keepdims=True)
    return np.divide(rows, lengths, out=np.zeros_like(rows), where=lengths > 0)


def similarities(rows: np.ndarray, out: np.ndarray) -> None:
    """Computes the cosine of every two rows; 0 for a row of zeros. Shape: [n, dim] in, [n, n] out."""
    unit = _unit(rows)
    np.matmul(unit, unit.T, out=out)


def nearest(row: np.ndarray, own_id: int, k: int, pieces: Pieces) -> list[tuple[int, float]]:
    """Returns (position, cosine) of the k rows nearest to `row`, best first; equal cosines by position."""
    target = _unit(row.astype(np.float64))
    best_at, best = np.empty(0, np.int64), np.empty(0)
    for begin, ids, rows in pieces:
        # One row at a time by a fixed sum, so that equal rows have equal cosines.
        values = np.einsum("ij,j->i", _unit(rows.astype(np.float64)), target)
        others = np.flatnonzero(ids != own_id)
        best_at = np.concatenate([best_at, begin + others])
        best = np.concatenate([best, values[others]])
        keep = np.lexsort((best_at, -best))[:k]
        best_at, best = best_at[keep], best[keep]
    return list(zip(best_at.tolist(), best.tolist(), strict=True))


def statistics(count: int, dim: int, pieces: Pieces) -> dict[str, float]:
    """Computes mean, deviation, minimum and maximum of all values and of the rows' norms, piece by piece (Chan et al., 1979)."""
    values, norms = _Moments(), _Moments()
    for _, _, rows in pieces:
        wide = rows.astype(np.float64)
        values.add(wide.reshape(-1))
        norms.add(np.linalg.norm(wide, axis=1))
    return {"num_embeddings": count, "embedding_dim": dim, "mean": values.mean,
            "std": values.deviation(), "min": values.least, "max": values.most,
            "mean_norm": norms.mean, "std_norm": norms.deviation(), "min_norm": norms.least,
            "max_norm": norms.most}


class _Moments:
    def __init__(self) -> None:
        self.count, self.mean, self._squares = 0, 0.0, 0.0
        self.least, self.most = float("inf"), float("-inf")

    def add(self, values: np.ndarray) -> None:
        mean, count = float(values.mean()), len(values)
        gap, total = mean - self.mean, self.count + count
        self._squares += float(((values - mean) ** 2).sum()) + gap * gap * self.count * count / total
        self.mean += gap * count / total
        self.count = total
        self.least = min(self.least, float(values.min()))
        self.most = max(self.most, float(values.max()))

    def deviation(self) -> float:
        return (self._squares / self.count) ** 0.5
