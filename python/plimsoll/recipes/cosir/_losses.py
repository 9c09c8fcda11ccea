# SPDX-License-Identifier: Apache-2.0
"""The loss of `cosir`: symmetric InfoNCE, and five terms that shape the space of conditions.

docs/recipes/cosir.md, section 2, has the formulas. A term whose weight is 0 is not computed.

Threads: the calling one, and torch's.   Memory: a [batch, batch] matrix while InfoNCE is computed; about eight [batch, dim] tensors.
"""
from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch

from ...kernels import displacement_cosines, nearest_neighbors, philox, polar_coordinates, rotate_toward, symmetric_info_nce
from ...ranks._tiled import Tiled
from ._model import Model, Turned

if TYPE_CHECKING:
    from ...ranks._group import Group

TERMS = ("infonce", "laplacian", "angular", "radius", "rotation", "boundary")
TILE_ROWS = 512
_NEIGHBORS = 3
_RADIUS_PAIRS, _RADIUS_DEGREES, _RADIUS_MARGIN = 50, 15.0, 0.05
_ROTATION_TEXTS, _BOUNDARY = 64, 10.0


class Loss:
    """Computes the loss of a batch. `terms` has the last one's terms by name, unweighted; 0 where one was not computed."""

    def __init__(self, model: Model, weights: dict[str, float], temperature: float, seed: int, *, recompute: bool = False,
                 group: Group | None = None) -> None:
        """Takes the weights of the terms. recompute: encodes the tiles of a batch again in backward (gradient caching): less memory, the same bits.
        group: run.group, whose ranks share the tiles."""
        self.model, self._weights, self._temperature, self._seed = model, weights, temperature, seed
        self._encoded = Tiled(model, TILE_ROWS, recompute=recompute, group=group)
        self.terms: dict[str, torch.Tensor | float] = dict.fromkeys(TERMS, 0.0)

    def __call__(self, image: torch.Tensor, text: torch.Tensor, ids: torch.Tensor, groups: torch.Tensor, epoch: int,
                 conditions: torch.Tensor) -> torch.Tensor:
        """Compares all pairs of a batch. Shape: [rows, width], [rows, width], int64 [rows], int64 [rows], a number, [rows, label_dim]."""
        found = self._compared(text, Turned(*self._encoded(image, text, conditions)), ids, groups, epoch, conditions)
        self.terms = {name: found[name].detach() if name in found else 0.0 for name in TERMS}
        total = [found[name] * self._weights[name] for name in TERMS if name in found]
        return sum(total[1:], total[0]) if total else conditions.sum() * 0

    def _compared(self, text: torch.Tensor, rows: Turned, ids: torch.Tensor, groups: torch.Tensor, epoch: int,
                  conditions: torch.Tensor) -> dict[str, torch.Tensor]:
        wanted = {name for name in TERMS if self._weights[name] != 0}
        radius, _ = polar_coordinates(conditions)
        found = {}
        if "infonce" in wanted:
            found["infonce"] = symmetric_info_nce(rows.out, rows.image, groups, self._temperature)
        if wanted & {"laplacian", "angular", "radius"}:
            nearest, best, best_cosine = nearest_neighbors(conditions)
            picked = pick_neighbours(nearest, ids, self._seed, epoch) if "laplacian" in wanted else None
            length, near_cosine, angle_cosine = displacement_cosines(rows.out, rows.unit, picked, best if "angular" in wanted else None)
            if picked is not None:
                found["laplacian"] = laplacian(near_cosine, conditions, picked)
            if "angular" in wanted:
                found["angular"] = (1 - angle_cosine).mean()
            if "radius" in wanted:
                found["radius"] = radius_order(best, best_cosine, radius, length)
        if "rotation" in wanted:
            found["rotation"] = rotation(self.model, text, radius)
        if "boundary" in wanted:
            found["boundary"] = (radius - _BOUNDARY).relu().square().mean()
        return found


def pick_neighbours(nearest: torch.Tensor, ids: torch.Tensor, seed: int, epoch: int) -> torch.Tensor:
    """Picks one of each row's nearest neighbours, by seed, id and epoch. Shape: int64 [rows, 3], int64 [rows] → int64 [rows]."""
    count = min(_NEIGHBORS, len(nearest) - 1)
    words = philox(seed, ids, epoch)[:, 0]
    return nearest.gather(1, (words % count).unsqueeze(1)).squeeze(1)


def laplacian(cosine: torch.Tensor, conditions: torch.Tensor, picked: torch.Tensor) -> torch.Tensor:
    """Computes the loss by which close conditions act alike."""
    square = (conditions - conditions[picked]).square().sum(1)
    equal = square == 0  # The distance has no gradient there.
    distance = square.masked_fill(equal, 1.0).sqrt().masked_fill(equal, 0.0)
    return ((1 - cosine) * torch.exp(-distance)).mean()


def radius_order(best: torch.Tensor, cosine: torch.Tensor, radius: torch.Tensor, length: torch.Tensor) -> torch.Tensor:
    """Computes the loss by which, among neighbours in angle, the condition with the larger radius turns its text further."""
    near = (cosine > math.cos(math.radians(_RADIUS_DEGREES))).nonzero().squeeze(1)[:_RADIUS_PAIRS]
    if not len(near):
        return length.sum() * 0
    other = best[near]
    ordered = radius[near] <= radius[other]
    low, high = torch.where(ordered, near, other), torch.where(ordered, other, near)
    return (_RADIUS_MARGIN - (length[high] - length[low])).relu().mean()


def rotation(model: Model, text: torch.Tensor, radius: torch.Tensor) -> torch.Tensor:
    """Computes the loss by which four conditions a quarter turn apart move texts in unrelated directions."""
    text, mean = model.project_text(text[:_ROTATION_TEXTS]), radius.detach().mean()
    anchors = torch.zeros(4, model.shape.label_dim, device=text.device)
    anchors[0, 0] = anchors[1, 1] = mean
    anchors[2, 0] = anchors[3, 1] = -mean
    out, unit = rotate_toward(text.repeat(4, 1), *(one.repeat_interleave(len(text), 0) for one in model.turn(anchors)))
    moved = (out - unit).view(4, len(text), -1).mean(1)
    after = moved.roll(-1, 0)
    lengths = (moved.norm(dim=1) * after.norm(dim=1)).clamp_min(1e-8)
    return ((moved * after).sum(1) / lengths).square().mean()
