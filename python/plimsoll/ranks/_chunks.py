# SPDX-License-Identifier: Apache-2.0
"""Rows that ranks make in turn: work that has the same bits whoever does it, such as scores of held-out data.

    turn 0 of two ranks    rank 0: chunk 0    rank 1: chunk 1    then each passes its rows to the other
    turn 1                 rank 0: chunk 2    rank 1: chunk 3    …

Threads: the thread that trains.
Memory:  the rows; during an exchange a chunk of them for each rank.
"""
from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from ._group import Group
    from ._ranks import Ranks

_PLACE = "chunks of rows"


def by_chunks(group: Group, rows: int, chunk: int, work: Callable[[int, int], np.ndarray], look: Callable[[], object]) -> np.ndarray:
    """Returns the rows, as Ranks.by_chunks() says. Shape: [rows, …] of what work() returns; float32 [0] for no rows."""
    whole = np.empty(0, np.float32)
    chunks = [(begin, min(begin + chunk, rows)) for begin in range(0, rows, chunk)]
    for first in range(0, len(chunks), group.count):
        look()
        turn = chunks[first:first + group.count]
        for (begin, end), made in zip(turn, _made(group, turn, chunk, work)):
            if begin == 0:
                whole = np.empty((rows, *made.shape[1:]), made.dtype)
            whole[begin:end] = made
    return whole


def _made(group: Group, turn: list[tuple[int, int]], chunk: int, work: Callable[[int, int], np.ndarray]) -> list[np.ndarray]:
    return group.either(lambda: [work(*turn[0])], lambda ranks: _exchanged(ranks, turn, chunk, work))


def _exchanged(ranks: Ranks, turn: list[tuple[int, int]], chunk: int, work: Callable[[int, int], np.ndarray]) -> list[np.ndarray]:
    """Returns what the ranks made of the chunks of a turn, in order. Rank 0 has one in each turn."""
    import torch
    import torch.distributed as dist

    def made() -> np.ndarray | None:
        return np.ascontiguousarray(work(*turn[ranks.rank])) if ranks.rank < len(turn) else None

    own, said = ranks.agreed(_PLACE, made, words=lambda rows: "" if rows is None else " ".join([rows.dtype.str, *map(str, rows.shape[1:])]))
    kind, *wide = said[0].text.split()
    shape = (chunk, *map(int, wide))
    sent = np.zeros(shape, kind)
    if own is not None:
        sent[:len(own)] = own
    held = np.empty((ranks.count, *shape), kind)
    flat, place = (torch.from_numpy(one.reshape(-1).view(np.uint8)) for one in (held, sent))
    ranks.exchange(lambda: dist.all_gather(list(flat.chunk(ranks.count)), place, group=ranks.group))
    return [held[rank, :end - begin] for rank, (begin, end) in enumerate(turn)]
