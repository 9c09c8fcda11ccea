# SPDX-License-Identifier: Apache-2.0
"""The model of `cosir`: projections of image and text, and the combiner, which turns a text by its condition.

docs/recipes/cosir.md, section 1, has the formulas.

Threads: the calling one, and torch's.   Memory: its weights.
"""
from __future__ import annotations

import dataclasses
import math
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import nn
from torch.nn import functional

from ...kernels import normalize_rows, polar_coordinates, random_normal, random_uniform, rotate_toward
from ._random import Purpose, seed_for

if TYPE_CHECKING:
    from . import Options

_DIM, _HIDDEN = 256, 64


@dataclasses.dataclass(frozen=True)
class Shape:
    """Widths of the model."""

    image: int
    text: int
    dim: int
    label_dim: int
    projects: bool
    """Whether image and text are projected to dim."""

    @classmethod
    def of(cls, options: Options, image: int, text: int) -> Shape:
        """Resolves the options for features of these widths. Errors: ValueError naming the option."""
        dim = options.dim or (image if image == text else _DIM)
        aligned = image == text == dim
        projects = not aligned if options.projections == "auto" else options.projections == "true"
        if not projects and not aligned:
            raise ValueError(f"projections = false needs image, text and dim of one width, but they are {image}, {text} and {dim}; set "
                             'projections = "auto"')
        if not 2 <= options.label_dim <= dim:
            raise ValueError(f"label_dim = {options.label_dim} must lie between 2 and dim = {dim}; change label_dim")
        return cls(image, text, dim, options.label_dim, projects)


class Draws:
    """Draws first weights, each tensor from a stream of its own."""

    def __init__(self, seed: int) -> None:
        self.seed, self._stream = seed, -1

    def next(self) -> int:
        """Returns the next stream."""
        self._stream += 1
        return self._stream

    def linear(self, out: int, width: int) -> nn.Linear:
        """Makes a linear layer whose weights and biases are within ±1/√width."""
        made = nn.Linear(width, out)
        with torch.no_grad():
            for one in (made.weight, made.bias):
                one.copy_(random_uniform(tuple(one.shape), 1 / math.sqrt(width), self.seed, self.next()))
        return made

    def orthonormal(self, rows: int, columns: int) -> torch.Tensor:
        """Makes a matrix with orthonormal columns: Gram–Schmidt on normal ones, each taken twice."""
        x = random_normal((columns, rows), 1.0, self.seed, self.next()).double()
        for k in range(columns):
            for _ in range(2):
                x[k] -= x[:k].T @ (x[:k] @ x[k])
            x[k] /= x[k].norm()
        return x.T.float().contiguous()


class Branch(nn.Module):
    """Linear(1, 64) → ReLU → LayerNorm → Linear(64, 1), plus a skip Linear(1, 1): numbers [rows] → numbers [rows]."""

    def __init__(self, draws: Draws) -> None:
        super().__init__()
        self.hidden, self.norm = draws.linear(_HIDDEN, 1), nn.LayerNorm(_HIDDEN)
        self.out, self.skip = draws.linear(1, _HIDDEN), draws.linear(1, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        column = x.unsqueeze(1)
        return (self.out(self.norm(functional.relu(self.hidden(column)))) + self.skip(column)).squeeze(1)


class Turned(NamedTuple):
    """Rows of a batch before they are compared."""

    out: torch.Tensor
    """The text turned by its condition. Shape of all: [rows, dim], rows of length 1."""
    unit: torch.Tensor
    """The text as it was."""
    image: torch.Tensor


class Model(nn.Module):
    """Projections and combiner. Every weight is a function of the seed and its place in the order below."""

    direction_weight: torch.Tensor
    direction_bias: torch.Tensor

    def __init__(self, shape: Shape, seed: int) -> None:
        super().__init__()
        draws = Draws(seed_for(seed, Purpose.MODEL))
        self.shape = shape
        self.register_buffer("direction_weight", draws.orthonormal(shape.dim, shape.label_dim))  # Frozen, as is the bias.
        self.register_buffer("direction_bias", random_uniform((shape.dim,), 1 / math.sqrt(shape.dim), draws.seed, draws.next()))
        self.radius, self.angle = Branch(draws), Branch(draws)
        self._set_upright()
        self.image = draws.linear(shape.dim, shape.image) if shape.projects else None
        self.text = draws.linear(shape.dim, shape.text) if shape.projects else None

    @torch.no_grad()
    def _set_upright(self) -> None:
        """Mirrors a start that would turn every text around: the combiner's last norm leaves of the scale its sign alone."""
        if self.scale(torch.ones(1)).item() <= 0:
            for layer in (self.radius.out, self.radius.skip):
                layer.weight.neg_()
                layer.bias.neg_()

    def scale(self, radius: torch.Tensor) -> torch.Tensor:
        """Returns s = 0.8 + 0.4 · MLP_r(radius)."""
        return self.radius(radius) * 0.4 + 0.8

    def turn(self, conditions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Returns (direction [rows, dim], angle [rows], scale [rows]) of conditions."""
        radius, angle = polar_coordinates(conditions)
        return (functional.linear(conditions, self.direction_weight, self.direction_bias), self.angle(angle) * (math.pi / 6),
                self.scale(radius))

    def project_image(self, image: torch.Tensor) -> torch.Tensor:
        return image if self.image is None else self.image(normalize_rows(image))

    def project_text(self, text: torch.Tensor) -> torch.Tensor:
        return text if self.text is None else self.text(normalize_rows(text))

    def forward(self, image: torch.Tensor, text: torch.Tensor, conditions: torch.Tensor) -> Turned:
        """Computes what is compared: row by row, so that rows may come in parts."""
        return Turned(*rotate_toward(self.project_text(text), *self.turn(conditions)), normalize_rows(self.project_image(image)))

    def combiner(self) -> list[nn.Parameter]:
        """Returns the weights that say how a condition turns a text."""
        return [*self.radius.parameters(), *self.angle.parameters()]

    def projections(self) -> list[nn.Parameter]:
        """Returns the weights of the projections; none where features are aligned."""
        return [one for layer in (self.image, self.text) if layer is not None for one in layer.parameters()]
