# SPDX-License-Identifier: Apache-2.0
"""DealtTiles: the tiles of a batch that the ranks of a crew compute together.

    tile t is of rank t mod N; rank 0 has the batch
    forward     parameters to all, arguments to each; outputs back
    backward    in rounds of N tiles: gradients of outputs to each, gradients of arguments and parameters back

Rank 0 adds the gradients in the order of tiles, so that the number of ranks changes no bit. Reading order: _crew.py, this file.

Threads: the thread that trains.
Memory:  rank 0: outputs, and N gradients of the parameters; another rank: its tiles. Rooms: see _pieces.py.
"""
from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from ._pieces import ALL, Piece, flat, lease, pass_on
from ._tiled import Asked, Gradients, Tensors, Tile, Tiles

if TYPE_CHECKING:
    from ._ranks import Ranks, Said

PLACE = "the tiles"


class Column(NamedTuple):
    """A tensor of a batch but for its number of rows."""

    dtype: str
    shape: list[int]

    @classmethod
    def of(cls, one: torch.Tensor) -> Column:
        return cls(str(one.dtype).removeprefix("torch."), list(one.shape[1:]))

    def empty(self, rows: int) -> torch.Tensor:
        return torch.empty(rows, *self.shape, dtype=getattr(torch, self.dtype))

    def bytes(self, rows: int) -> int:
        size = rows * torch.empty((), dtype=getattr(torch, self.dtype)).element_size()
        for one in self.shape:
            size *= one
        return size


class Dealt:
    """The tiles of a batch as one rank sees them."""

    def __init__(self, ranks: Ranks, asked: Asked, rows: int, columns: list[Column]) -> None:
        self._ranks, self._asked, self._columns = ranks, asked, columns
        self._rows = [min(asked.rows, rows - begin) for begin in range(0, rows, asked.rows)]
        self._tiles: dict[int, Tile] = {}  # This rank's, by number.
        self._outputs: list[Column] = []

    def _owner(self, tile: int) -> int:
        return tile % self._ranks.count

    def _theirs(self, tiles: Sequence[int]) -> list[int]:
        """Returns the tiles among these that are not rank 0's."""
        return [tile for tile in tiles if self._owner(tile)]

    def _rounds(self) -> Iterator[range]:
        count = self._ranks.count
        return (range(first, min(first + count, len(self._rows))) for first in range(0, len(self._rows), count))

    def _pieces(self, tiles: Sequence[int], columns: Sequence[Column], tensors: dict[int, Tensors], back: bool) -> list[Piece]:
        """Returns the pieces of some tiles' tensors on their way from rank 0, or back to it."""
        return [Piece(self._owner(tile) if back else 0, 0 if back else self._owner(tile), column.bytes(self._rows[tile]),
                      flat(tensors[tile][place]) if tile in tensors else None)
                for tile in self._theirs(tiles) for place, column in enumerate(columns)]

    def _state(self) -> list[torch.Tensor]:
        module = self._asked.module
        return [one.detach().contiguous() for one in (*module.parameters(), *module.buffers())]

    def _of_state(self, state: list[torch.Tensor]) -> list[Piece]:
        return [Piece(0, ALL, one.nbytes, flat(one)) for one in state]

    def _computed(self) -> dict[int, Tensors]:
        return {number: tile.outputs() for number, tile in self._tiles.items()}


class DealtTiles(Dealt, Tiles):
    """The tiles as rank 0 sees them."""

    def __init__(self, crew: Any, module: int, asked: Asked, inputs: Sequence[torch.Tensor]) -> None:
        """Takes a batch. crew: the Leader. module: the number by which the others know the module."""
        super().__init__(crew.ranks, asked, len(inputs[0]), [Column.of(one) for one in inputs])
        self._crew, self._number, self._inputs = crew, module, asked.cut(inputs)
        self._tiles = {tile: Tile(asked, one) for tile, one in enumerate(self._inputs) if self._owner(tile) == 0}

    def _contiguous(self, tiles: Sequence[int], tensors: list[Tensors]) -> dict[int, Tensors]:
        """Returns what other ranks get."""
        return {tile: tuple(one.contiguous() for one in tensors[tile]) for tile in self._theirs(tiles)}

    def _give(self, pieces: list[Piece]) -> None:
        self._ranks.on_all(PLACE, lambda: lease(self._ranks, pieces))
        pass_on(self._ranks, pieces)

    def outputs(self) -> list[Tensors]:
        ranks, every = self._ranks, range(len(self._rows))
        with self._crew.together():
            self._crew.say("forward", self._number, sum(self._rows), self._asked.rows, self._asked.keeps, bool(self._asked.parameters),
                           text=json.dumps([self._columns, self._asked.wants]))
            self._give(self._of_state(self._state()) + self._pieces(every, self._columns, self._contiguous(every, self._inputs), back=False))
            self._inputs = []  # Tiles that this rank computes keep their own.

            def computed() -> dict[int, Tensors]:
                made = self._computed()
                self._outputs = list(map(Column.of, made[0]))
                return made | {tile: tuple(one.empty(self._rows[tile]) for one in self._outputs) for tile in self._theirs(every)}

            made: dict[int, Tensors] = ranks.agreed(PLACE, computed, words=lambda _: json.dumps(self._outputs))[0]
            pass_on(ranks, self._pieces(every, self._outputs, made, back=True))
        self.constant = self._tiles[0].constant
        return [made[tile] for tile in every]

    def gradients(self, given: list[Tensors]) -> Iterator[Gradients]:
        with self._crew.together():
            self._crew.say("backward")
        for tiles in self._rounds():
            with self._crew.together():
                made = self._of_round(tiles, given)
            yield from made

    def _of_round(self, tiles: range, given: list[Tensors]) -> list[Gradients]:
        ranks, asked = self._ranks, self._asked
        self._give(self._pieces(tiles, self._outputs, self._contiguous(tiles, given), back=False))
        wanted = [column for column, wants in zip(self._columns, asked.wants) if wants]

        def computed() -> tuple[Gradients, list[Gradients]]:
            own = self._tiles.pop(tiles[0]).gradients(given[tiles[0]])
            rooms: list[Gradients] = [[None if gradient is None else torch.empty_like(one) for one, gradient in zip(
                [*(column.empty(self._rows[tile]) for column in wanted), *asked.parameters], own, strict=True)] for tile in tiles[1:]]
            return own, rooms

        (own, rooms), said = ranks.agreed(PLACE, computed, words=lambda made: used(made[0]))
        _must_be_alike(said)
        pass_on(ranks, [Piece(self._owner(tile), 0, one.nbytes, flat(one)) for tile, room in zip(tiles[1:], rooms) for one in room if one is not None])
        return [own, *rooms]


class HelpedTiles(Dealt):
    """The tiles as another rank sees them."""

    @classmethod
    def of(cls, ranks: Ranks, modules: list[torch.nn.Module], said: Said) -> HelpedTiles:
        """Makes them from what rank 0 said."""
        number, rows, tile, keeps, graded = map(int, said.numbers[1:])
        columns, wants = json.loads(said.text)
        parameters = [one for one in modules[number].parameters() if one.requires_grad] if graded else []
        return cls(ranks, Asked(modules[number], tile, parameters, wants, bool(keeps)), rows, [Column(*one) for one in columns])

    def forward(self, check: Callable[[], None]) -> None:
        """Computes this rank's tiles. check: raises where memory is short here."""
        ranks, every, rank = self._ranks, range(len(self._rows)), self._ranks.rank
        mine = [tile for tile in every if self._owner(tile) == rank]

        def room() -> tuple[dict[int, Tensors], list[torch.Tensor]]:
            check()
            return {tile: tuple(column.empty(self._rows[tile]) for column in self._columns) for tile in mine}, self._state()

        got, state = ranks.on_all(PLACE, room)
        pass_on(ranks, self._of_state(state) + self._pieces(every, self._columns, got, back=False))

        def computed() -> dict[int, Tensors]:
            self._take(state)
            self._tiles = {tile: Tile(self._asked, inputs) for tile, inputs in got.items()}
            made = {tile: tuple(one.contiguous() for one in outputs) for tile, outputs in self._computed().items()}
            lease(ranks, [Piece(rank, 0, one.nbytes) for outputs in made.values() for one in outputs])
            return made

        made, said = ranks.agreed(PLACE, computed)
        self._outputs = [Column(*one) for one in json.loads(said[0].text)]
        pass_on(ranks, self._pieces(every, self._outputs, made, back=True))

    @torch.no_grad()
    def _take(self, state: list[torch.Tensor]) -> None:
        """Takes the module's state, where that is not in the same memory."""
        module = self._asked.module
        for one, values in zip((*module.parameters(), *module.buffers()), state, strict=True):
            if one.data_ptr() != values.data_ptr():
                one.copy_(values)

    def backward(self) -> None:
        """Computes the gradients of this rank's tiles."""
        for tiles in self._rounds():
            self._round(tiles)

    def _round(self, tiles: range) -> None:
        ranks, rank = self._ranks, self._ranks.rank
        mine = [tile for tile in tiles if self._owner(tile) == rank]
        given: dict[int, Tensors] = ranks.on_all(
            PLACE, lambda: {tile: tuple(column.empty(self._rows[tile]) for column in self._outputs) for tile in mine})
        pass_on(ranks, self._pieces(tiles, self._outputs, given, back=False))

        def computed() -> Gradients:
            made: Gradients = [None if one is None else one.contiguous() for one in self._tiles.pop(mine[0]).gradients(given[mine[0]])] if mine else []
            lease(ranks, [Piece(rank, 0, one.nbytes) for one in made if one is not None])
            return made

        made, said = ranks.agreed(PLACE, computed, words=used)
        _must_be_alike(said)
        wanted = [column for column, wants in zip(self._columns, self._asked.wants) if wants]
        pieces = []
        for tile in self._theirs(tiles):
            sizes = [*(column.bytes(self._rows[tile]) for column in wanted), *(one.nbytes for one in self._asked.parameters)]
            for place, (size, there) in enumerate(zip(sizes, said[0].text, strict=True)):
                own = made[place] if self._owner(tile) == rank else None
                if there == "1":
                    pieces.append(Piece(self._owner(tile), 0, size, None if own is None else flat(own)))
        pass_on(ranks, pieces)


def used(gradients: Gradients) -> str:
    """Returns which gradients there are: "1101"."""
    return "".join("0" if one is None else "1" for one in gradients)


def _must_be_alike(said: list[Said]) -> None:
    """Raises ValueError on all ranks where a rank's tile has gradients that rank 0's has not, or the other way round."""
    for rank, one in enumerate(said):
        if one.text and one.text != said[0].text:
            error = ValueError(f"Tiled: tiles of ranks 0 and {rank} use different parameters of the module; all must use the same")
            error._told_to_ranks = True  # type: ignore[attr-defined]
            raise error
