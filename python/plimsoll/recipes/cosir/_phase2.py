# SPDX-License-Identifier: Apache-2.0
"""Phase 2 of `cosir`: a classifier learns which of twelve conditions suits a pair, also when its image or its text is missing.

docs/recipes/cosir.md, section 5, has the formulas. Combiner and projections are frozen.

Threads: the calling one, and torch's.   Memory: the classifier; about twelve [batch, dim] tensors for each of three modes in a step.
"""
from __future__ import annotations

import math
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from ...kernels import mix64, normalize_rows, philox, random_normal, rotate_toward, symmetric_info_nce, uniform_of
from ._evaluate import polar_grid
from ._model import Draws, Model
from ._pairs import Pairs
from ._random import Purpose, seed_for

REPRESENTATIVES = 12
MODES = ("both", "img", "txt")
_CLASS_WEIGHT, _NCE_WEIGHT = 0.9, 0.1
_IMAGE_DROPOUT, _TEXT_DROPOUT, _HEAD_DROPOUT, _GUMBEL = range(4)
_ROWS = 512


class Noise:
    """Dropout masks and Gumbel noise of a mode's step: a function of seed, sample, epoch and place."""

    def __init__(self, seed: int, mode: int, ids: torch.Tensor, epoch: int) -> None:
        self._seed, self._mode, self._ids, self._epoch = seed_for(seed, Purpose.NOISE), mode, ids, epoch

    def _words(self, use: int, width: int) -> torch.Tensor:
        """Makes random words. Shape: [rows, width]."""
        counter = (self._epoch << 32) + torch.arange(-(-width // 4), device=self._ids.device)
        return philox(mix64(self._seed ^ mix64(use * 4 + self._mode)), self._ids.unsqueeze(1), counter).flatten(1)[:, :width]

    def dropout(self, x: torch.Tensor, use: int) -> torch.Tensor:
        """Drops half of the values, and doubles the others."""
        return x * ((self._words(use, x.shape[1]) >> 31) * 2).to(x.dtype)

    def gumbel(self) -> torch.Tensor:
        """Makes the noise of a draw among the representatives. Shape: [rows, 12]."""
        return -(-uniform_of(self._words(_GUMBEL, REPRESENTATIVES)).log()).log()


class _Head(nn.Module):
    """Linear → GELU → LayerNorm → Dropout(½) → Linear."""

    def __init__(self, draws: Draws, width: int, dim: int, out: int) -> None:
        super().__init__()
        self.hidden, self.norm, self.out = draws.linear(dim, width), nn.LayerNorm(dim), draws.linear(out, dim)

    def forward(self, x: torch.Tensor, noise: Noise | None, use: int) -> torch.Tensor:
        hidden = self.norm(functional.gelu(self.hidden(x)))
        return self.out(hidden if noise is None else noise.dropout(hidden, use))


class Classifier(nn.Module):
    """Encoders of image and text, learned vectors that stand in for a missing side, and a head over both."""

    def __init__(self, dim: int, seed: int) -> None:
        super().__init__()
        draws = Draws(seed_for(seed, Purpose.CLASSIFIER))
        self.image, self.text = _Head(draws, dim, dim, dim), _Head(draws, dim, dim, dim)
        self.image_mask, self.text_mask = (
            nn.Parameter(random_normal((dim,), 1 / math.sqrt(dim), draws.seed, draws.next())) for _ in range(2))
        self.head = _Head(draws, 2 * dim, dim, REPRESENTATIVES)

    def forward(self, mode: str, image: torch.Tensor, text: torch.Tensor, noise: Noise | None = None) -> torch.Tensor:
        """Returns logits [rows, 12] of images and texts of length 1. noise: None: nothing is dropped."""
        sides = (self.image_mask.expand_as(image) if mode == "txt" else self.image(image, noise, _IMAGE_DROPOUT),
                 self.text_mask.expand_as(text) if mode == "img" else self.text(text, noise, _TEXT_DROPOUT))
        return self.head(torch.cat(sides, 1), noise, _HEAD_DROPOUT)


class Phase2:
    """The loss and the accuracy of a classifier. radius: that of the representatives, which lie at twelve angles."""

    @torch.no_grad()
    def __init__(self, model: Model, classifier: Classifier, temperature: float, seed: int, radius: float, device: str) -> None:
        self.model, self.classifier, self._temperature, self._seed = model, classifier, temperature, seed
        self._conditions = polar_grid(REPRESENTATIVES, (radius,), model.shape.label_dim, device)
        self._turns = model.turn(self._conditions)

    def loss(self, image: torch.Tensor, text: torch.Tensor, ids: torch.Tensor, groups: torch.Tensor, epoch: int) -> torch.Tensor:
        """Computes the mean over the three modes. Arguments are a batch's."""
        image, text, unit, target = self._seen(image, text)
        losses = []
        for number, mode in enumerate(MODES):
            noise = Noise(self._seed, number, ids, epoch)
            logits = self.classifier(mode, image, unit, noise)
            share = (logits + noise.gumbel()).softmax(1)
            turned, _ = rotate_toward(text, *self.model.turn(share @ self._conditions))
            nce = symmetric_info_nce(turned, image, groups, self._temperature)
            losses.append((functional.cross_entropy(logits, target) * _CLASS_WEIGHT + nce * _NCE_WEIGHT) / len(MODES))
        return losses[0] + losses[1] + losses[2]

    @torch.no_grad()
    def accuracy(self, pairs: Pairs, most: int) -> dict[str, Any]:
        """Returns accuracies on held-out pairs in percent: of each mode, by chance, of always naming the commonest target."""
        held, right = pairs.held_out(most), dict.fromkeys(MODES, 0)
        counts = torch.zeros(REPRESENTATIVES, dtype=torch.int64)
        for begin in range(0, len(held.ids), _ROWS):
            image, _, unit, target = self._seen(*pairs.read(held.ids[begin:begin + _ROWS]))
            counts += target.cpu().bincount(minlength=REPRESENTATIVES)
            for mode in MODES:
                right[mode] += int((self.classifier(mode, image, unit).argmax(1) == target).sum())
        percent = 100 / max(1, len(held.ids))
        return {**{mode: percent * count for mode, count in right.items()}, "chance": 100 / REPRESENTATIVES,
                "commonest": percent * int(counts.max()), "pairs": len(held.ids)}

    @torch.no_grad()
    def _seen(self, image: torch.Tensor, text: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Returns the image of length 1, the text, the text of length 1, and the representative that brings them closest."""
        image, text = normalize_rows(self.model.project_image(image)), self.model.project_text(text)
        similar = []
        for course, angle, scale in zip(*self._turns, strict=True):
            out, _ = rotate_toward(text, course.expand_as(text).contiguous(), angle.repeat(len(text)), scale.repeat(len(text)))
            similar.append((out * image).sum(1))
        return image, text, normalize_rows(text), torch.stack(similar, 1).argmax(1)
