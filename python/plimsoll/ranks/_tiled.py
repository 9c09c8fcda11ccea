# SPDX-License-Identifier: Apache-2.0
"""Tiled: a module that is applied to the rows of a batch in tiles of a fixed number of rows.

    outputs      of tile 0, of tile 1, …, one below the other
    gradients    ((tile 0 + tile 1) + tile 2) + …

So sums over rows have one order, whichever process computes a tile, and whether a tile keeps its graph or is computed again.

Reading order: this file, _pieces.py, _dealt_tiles.py, _crew.py.
Threads: the thread that trains.   Memory: the outputs twice; a gradient of the parameters more than without tiles.
"""
from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch.autograd.function import once_differentiable

if TYPE_CHECKING:
    from ._group import Group

Tensors = tuple[torch.Tensor, ...]
Gradients = list["torch.Tensor | None"]


class Tiled:
    """Applies a module to tiles of a batch's rows, so that a batch that is compared as a whole need not be encoded as a whole.

        encode = plimsoll.Tiled(model, 512, recompute=True)
        images, texts = encode(image, text)             # in the function of run.step()
        loss = compare(images, texts)

    The module takes tensors and returns tensors, rows first. Each row of its results depends on the same row of its arguments alone, and
    on nothing that is drawn at random. The bits do not depend on `recompute`. In a recipe with `helped`, started by torchrun, the ranks
    share the tiles; the bits do not depend on their number.

    module:    the module. Its parameters get the sum of the tiles' gradients, in their order.
    rows:      rows of a tile.
    recompute: computes each tile again in backward (Gao et al. 2021, section 3): one tile's graph at a time, and more time.
    group:     run.group of a recipe whose ranks share the tiles; None: this process has them all.
    """

    def __init__(self, module: torch.nn.Module, rows: int, *, recompute: bool = False, group: Group | None = None) -> None:
        if rows < 1:
            raise ValueError(f"Tiled: rows {rows} must be at least 1")
        self._module, self._rows, self._recompute = module, rows, recompute
        self._crew = None if group is None else group.crew

    def __call__(self, *inputs: torch.Tensor) -> Tensors:
        """Returns module(*inputs). Errors: ValueError for arguments of different numbers of rows; those of the module."""
        rows = {len(one) for one in inputs}
        if len(rows) != 1:
            raise ValueError(f"Tiled: arguments of {sorted(rows)} rows; all need the same number")
        parameters = [one for one in self._module.parameters() if one.requires_grad]
        wants = [one.requires_grad for one in inputs]
        graded = torch.is_grad_enabled() and (any(wants) or bool(parameters))
        asked = Asked(self._module, self._rows, parameters if graded else [], [graded and one for one in wants], graded and not self._recompute)
        shares = self._crew is not None and max(rows) > self._rows
        tiles: Tiles = self._crew.dealt(asked, inputs) if self._crew is not None and shares else OwnTiles(asked, inputs)
        return _Apply.apply(_Batch(tiles, asked, inputs), *inputs, *parameters) if graded else _joined(tiles.outputs())


class Asked:
    """A use of a module: on tiles of so many rows, with gradients of some arguments and parameters."""

    def __init__(self, module: torch.nn.Module, rows: int, parameters: list[torch.nn.Parameter], wants: list[bool], keeps: bool) -> None:
        self.module, self.rows, self.parameters, self.wants = module, rows, parameters, wants
        self.keeps = keeps
        """Whether a tile keeps its graph until its gradients are computed."""
        self.graded = bool(parameters) or any(wants)

    def cut(self, inputs: Sequence[torch.Tensor]) -> list[Tensors]:
        """Returns the tiles of a batch."""
        return list(zip(*(one.detach().split(self.rows) for one in inputs), strict=True))


class Tiles:
    """The tiles of a batch, in order."""

    constant: list[bool]
    """Whether an output has no gradient, for each; known from outputs() on."""

    def outputs(self) -> list[Tensors]:
        """Computes each tile's outputs, without graph."""
        raise NotImplementedError

    def gradients(self, given: list[Tensors]) -> Iterator[Gradients]:
        """Yields, for each tile, the gradients of the wanted arguments and of the parameters. given: those of each tile's outputs."""
        raise NotImplementedError


class Tile:
    """A tile that this process computes."""

    def __init__(self, asked: Asked, inputs: Tensors) -> None:
        self._asked, self._inputs = asked, inputs
        self._made: tuple[Tensors, Tensors] | None = None

    def outputs(self) -> Tensors:
        """Computes the outputs."""
        made = self._computed(self._asked.graded)
        self.constant = [not one.requires_grad for one in made[1]]
        self._made = made if self._asked.keeps else None
        return tuple(one.detach() for one in made[1])

    def gradients(self, given: Tensors) -> Gradients:
        """Computes the gradients of the wanted arguments and of the parameters. None: the outputs do not depend on it."""
        leaves, made = self._made or self._computed(True)
        self._made = None
        parts = [(one, gradient) for one, gradient in zip(made, given, strict=True) if one.requires_grad]
        wanted = [*(one for one in leaves if one.requires_grad), *self._asked.parameters]
        if not parts or not wanted:
            return [None] * len(wanted)
        return list(torch.autograd.grad([one for one, _ in parts], wanted, [one for _, one in parts], allow_unused=True))

    def _computed(self, graded: bool) -> tuple[Tensors, Tensors]:
        with torch.set_grad_enabled(graded):
            leaves = tuple(one.detach().requires_grad_(graded and wanted) for one, wanted in zip(self._inputs, self._asked.wants, strict=True))
            made = self._asked.module(*leaves)
        return leaves, (made,) if isinstance(made, torch.Tensor) else tuple(made)


class OwnTiles(Tiles):
    """Tiles of which this process computes all."""

    def __init__(self, asked: Asked, inputs: Sequence[torch.Tensor]) -> None:
        self._tiles = [Tile(asked, one) for one in asked.cut(inputs)]

    def outputs(self) -> list[Tensors]:
        made = [one.outputs() for one in self._tiles]
        self.constant = self._tiles[0].constant
        return made

    def gradients(self, given: list[Tensors]) -> Iterator[Gradients]:
        return (tile.gradients(one) for tile, one in zip(self._tiles, given, strict=True))


class _Batch:
    """A batch between forward and backward."""

    def __init__(self, tiles: Tiles, asked: Asked, inputs: Sequence[torch.Tensor]) -> None:
        self._tiles, self._asked = tiles, asked
        self._shapes = [one.shape for one in inputs]

    def outputs(self) -> Tensors:
        made = _joined(self._tiles.outputs())
        self._nothing = [one.new_zeros(()).expand(one.shape) for one in made]
        return made

    def constant(self, outputs: Tensors) -> Tensors:
        """Returns those of the outputs that have no gradient. None is asked of what computes from them."""
        return tuple(one for one, constant in zip(outputs, self._tiles.constant, strict=True) if constant)

    def gradients(self, found: Sequence[torch.Tensor | None]) -> Gradients:
        """Returns the gradients of all arguments and parameters. found: those of the outputs; None: zeros."""
        given = [nothing if one is None else one for one, nothing in zip(found, self._nothing, strict=True)]
        wanted = [place for place, one in enumerate(self._asked.wants) if one]
        inputs: Gradients = [None] * len(self._asked.wants)
        sums: Gradients = []
        parts = list(zip(*(one.split(self._asked.rows) for one in given), strict=True))
        for tile, made in enumerate(self._tiles.gradients(parts)):
            for place, one in zip(wanted, made):
                if one is not None:
                    whole = inputs[place] = _zeros(inputs[place], one, self._shapes[place])
                    whole[tile * self._asked.rows:][:len(one)] = one
            sums = _added(sums, made[len(wanted):], in_place=tile > 1)
        return [*inputs, *sums]


class _Apply(torch.autograd.Function):
    """The batch as one node of the graph."""

    @staticmethod
    def forward(ctx: Any, batch: _Batch, *tensors: torch.Tensor) -> Tensors:
        ctx.batch = batch
        ctx.set_materialize_grads(False)
        outputs = batch.outputs()
        ctx.mark_non_differentiable(*batch.constant(outputs))
        return outputs

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *given: torch.Tensor | None) -> tuple[Any, ...]:
        batch, ctx.batch = ctx.batch, None
        return (None, *batch.gradients(given))


def _joined(outputs: list[Tensors]) -> Tensors:
    return outputs[0] if len(outputs) == 1 else tuple(torch.cat(parts) for parts in zip(*outputs, strict=True))


def _zeros(there: torch.Tensor | None, like: torch.Tensor, shape: torch.Size) -> torch.Tensor:
    return there if there is not None else like.new_zeros(shape)


def _added(sums: Gradients, more: Gradients, in_place: bool) -> Gradients:
    """Adds a tile's gradients. in_place: the sums are this module's own; the first tile's gradients may be others' memory."""
    if not sums:
        return more
    both = [(one, other) for one, other in zip(sums, more, strict=True) if one is not None and other is not None]
    if len(both) != sum(one is not None for one in sums) or len(both) != sum(one is not None for one in more):
        raise ValueError("Tiled: two tiles use different parameters of the module; all must use the same")
    if in_place:
        torch._foreach_add_([one for one, _ in both], [other for _, other in both])
        return sums
    made = iter(torch._foreach_add([one for one, _ in both], [other for _, other in both]) if both else ())
    return [None if one is None else next(made) for one in sums]
