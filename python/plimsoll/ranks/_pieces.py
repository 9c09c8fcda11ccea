# SPDX-License-Identifier: Apache-2.0
"""Pieces: bytes that one rank passes to another one, or to all.

    through memory   each rank writes its pieces to its room, a half at a time, and the others read them there
    over gloo        each piece is a message

All ranks name the same pieces in the same order. Reading order: _ranks.py, this file, _crew.py.

Threads: the thread that trains.   Memory: the room of a rank, 4 MiB at most (src/memory/rank_memory.h).
"""
from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from .._core import RankMemory

if TYPE_CHECKING:
    from ._ranks import Ranks

ALL = -1
_TAG = 2  # Messages have 0, slices of gradients 1.
_HALF = RankMemory.ROOM_BYTES // 2


@dataclasses.dataclass(frozen=True)
class Piece:
    """Bytes on their way from one rank to another. Ranks that are neither need no tensor."""

    source: int
    target: int
    """A rank, or ALL."""
    size: int
    tensor: torch.Tensor | None = None
    """Where the bytes are on the source, and where they go on the target. Shape: uint8 [size]."""

    def goes_to(self, rank: int) -> bool:
        """Whether the rank receives it."""
        return self.source != rank and self.target in (ALL, rank)


def flat(one: torch.Tensor) -> torch.Tensor:
    """Returns the bytes of a contiguous tensor, uint8 [n], without a copy."""
    return one.detach().view(-1).view(torch.uint8)


def lease(ranks: Ranks, pieces: Sequence[Piece]) -> None:
    """Leases the room that pass_on() writes to on this rank. Errors: BudgetExceeded."""
    size = sum(one.size for one in pieces if one.source == ranks.rank)
    if ranks.memory is not None and size:
        ranks.memory.grow_room(size if size <= _HALF else 2 * _HALF, ranks.core_governor)


def pass_on(ranks: Ranks, pieces: Sequence[Piece]) -> None:
    """Passes all pieces on, once lease() succeeded on all ranks. Errors: ConnectionError when a rank has ended."""
    if ranks.memory is None:
        ranks.exchange(lambda: _by_sockets(ranks, pieces))
    else:
        _by_rooms(ranks, ranks.memory, pieces)


def _by_rooms(ranks: Ranks, memory: RankMemory, pieces: Sequence[Piece]) -> None:
    streams: dict[int, list[Piece]] = {}
    for piece in pieces:
        streams.setdefault(piece.source, []).append(piece)
    longest = max((sum(one.size for one in stream) for stream in streams.values()), default=0)
    for turn, begin in enumerate(range(0, longest, _HALF)):
        at = turn % 2 * _HALF  # Other ranks may still read the other half.
        for piece, inner, place in _between(streams.get(ranks.rank, ()), begin):
            _room(memory, ranks.rank, at, place).copy_(_tensor_of(piece)[inner])
        ranks.exchange(memory.meet)
        for source, stream in streams.items():
            for piece, inner, place in _between(stream, begin):
                if piece.goes_to(ranks.rank):
                    _tensor_of(piece)[inner].copy_(_room(memory, source, at, place))
    ranks.exchange(memory.meet)


def _between(stream: Sequence[Piece], begin: int) -> Iterator[tuple[Piece, slice, slice]]:
    """Yields the pieces of a stream that lie in the half room from byte `begin`: (piece, bytes of it, their place in the half)."""
    first = 0
    for piece in stream:
        low, high = max(first, begin), min(first + piece.size, begin + _HALF)
        if low < high:
            yield piece, slice(low - first, high - first), slice(low - begin, high - begin)
        first += piece.size


def _room(memory: RankMemory, rank: int, at: int, place: slice) -> torch.Tensor:
    return torch.from_numpy(memory.room(rank))[at + place.start:at + place.stop]


def _tensor_of(piece: Piece) -> torch.Tensor:
    assert piece.tensor is not None and len(piece.tensor) == piece.size
    return piece.tensor


def _by_sockets(ranks: Ranks, pieces: Sequence[Piece]) -> None:
    """Posts the receives first, as Ranks._await_rows() does."""
    works: list[Any] = [dist.irecv(_tensor_of(one), one.source, group=ranks.group, tag=_TAG) for one in pieces if one.goes_to(ranks.rank)]
    try:
        for one in pieces:
            if one.source == ranks.rank:
                works += [dist.isend(_tensor_of(one), rank, group=ranks.group, tag=_TAG) for rank in range(ranks.count) if one.goes_to(rank)]
        for work in works:
            work.wait()
    finally:
        works.clear()  # Works keep connections open, and an error keeps this frame.
