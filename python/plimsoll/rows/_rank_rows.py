# SPDX-License-Identifier: Apache-2.0
"""Tables whose rows are dealt to ranks: a rank owns whole virtual shards (decision 0045), in order.

    rank 1 of 4                     shards 1,024 to 2,047
    a lookup                        ids to their owners, rows back                       look_up()
    gradients                       each worker's, to the owners, once a step            owned()
    another number of ranks         tables made anew of the shards that they have        moved()

A row's gradients are added in the order (worker, lookup), and duplicates of an id within a lookup before that, so
that the sum's bits do not depend on who made them.

Reading order: _virtual_workers.py, _ranks.py, this file, _run_embedding.py, _run_tables.py.
Threads: the thread that trains.
Memory:  a step's rows and gradients, leased, once more while they are exchanged (src/memory/rank_memory.h).
"""
from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from .. import _core
from .._core import RankMemory, RankRows
from ..errors import NotFoundError
from ._embedding import EmbeddingStore

if TYPE_CHECKING:
    from ..ranks._group import Group
    from ..ranks._ranks import Ranks

SHARDS = 4096
_ID_BYTES = 8
_ID_BITS = 48  # Of ids, which are less than a table's rows.


def owners_of(ids: np.ndarray, ranks: int) -> np.ndarray:
    """The rank that has each id. Shape: int64 [n] both."""
    shards = np.empty_like(ids)
    _core.virtual_shards(ids, shards)
    return shards * ranks // SHARDS


def overlap(rank: int, ranks: int, other: int, others: int) -> bool:
    """Whether a rank of so many has shards that another of `others` has."""
    return rank * others < (other + 1) * ranks and other * ranks < (rank + 1) * others


@dataclasses.dataclass
class Wanted:
    """Distinct ids, grouped by the rank that owns them."""

    ids: np.ndarray
    counts: list[int]
    """How many of the ids each rank owns."""
    places: np.ndarray
    """Where the ids that were asked for are among them."""
    shared: RankRows | None = None
    """In memory that all ranks have, until they are looked up."""

    @classmethod
    def of(cls, asked: np.ndarray, ranks: int) -> Wanted:
        if ranks == 1:
            ids, places = np.unique(asked, return_inverse=True)
            return cls(ids, [len(ids)], places)
        keys, places = np.unique(owners_of(asked, ranks) << _ID_BITS | asked, return_inverse=True)
        ends = np.searchsorted(keys, np.arange(1, ranks + 1) << _ID_BITS)
        return cls(keys & ((1 << _ID_BITS) - 1), np.diff(ends, prepend=0).tolist(), places)


class LookedUp:
    """Rows of one lookup: a leaf of the graph, then its gradient and what that weighs."""

    def __init__(self, table: DealtTable, wanted: Wanted, tensor: torch.Tensor) -> None:
        self.table, self.wanted, self.tensor = table, wanted, tensor
        self.gradient: Any = None
        self.weight = 0.0

    def take(self, share: float, weight: float) -> None:
        """The leaf's gradient multiplied by `share`, of a worker of that weight."""
        self.gradient, self.tensor.grad, self.weight = self.tensor.grad, None, weight
        if self.gradient is not None and share != 1:
            self.gradient.mul_(share)


@dataclasses.dataclass
class Owned:
    """Gradients of rows that this rank has, for _transaction.Together as Rows are."""

    _store: EmbeddingStore
    ids: np.ndarray
    tensor: torch.Tensor
    """The gradients."""

    def _gradient(self) -> np.ndarray:
        return self.tensor.numpy()

    def _end(self) -> None:
        pass


class DealtTable:
    """One table of a run; `store` has this rank's rows."""

    def __init__(self, name: str, store: EmbeddingStore, rows: int, group: Group) -> None:
        self.name, self.store, self.rows, self.dim = name, store, rows, store.dim
        self._group, self.index = group, len(group.tables)
        group.tables.append(self)

    def look_up(self, asked: np.ndarray) -> tuple[Wanted, torch.Tensor]:
        """Rows of ids, whoever has them: the distinct ones, float32 [n, dim].

        Several ranks: those that have none to look up meanwhile serve (Ranks.agreed).
        Errors: NotFoundError naming the first unknown id; what a rank's table raises, on all ranks.
        """
        unknown = (asked < 0) | (asked >= self.rows)
        if unknown.any():
            raise NotFoundError(f"{self.name}: there is no row {int(asked[unknown][0])}; ids are from 0 to {self.rows - 1}")
        wanted = Wanted.of(asked, self._group.count)
        return wanted, self._group.look_up(self, wanted)

    def lay(self, memory: RankMemory, wanted: Wanted) -> int:
        """Before a lookup: ids where all ranks can read them, and room for their rows. Returns where. Errors: BudgetExceeded."""
        wanted.shared = memory.take(len(wanted.ids), self.dim, self.store._governor._core)
        wanted.shared.ids[:] = wanted.ids
        return wanted.shared.begin

    def exchanged(self, ranks: Ranks, wanted: Wanted | None, asked_by: list[list[int]], begins: list[int]) -> torch.Tensor | None:
        """The part of this rank in a lookup of some: ids to their owners, and rows back. wanted None: it only serves.

        asked_by: how many ids each rank asks of each; begins: where each has laid them.
        """
        if ranks.memory is not None:
            return self._exchanged_in(ranks.memory, ranks, wanted, asked_by, begins)
        own = [0] * ranks.count if wanted is None else wanted.counts
        given = [counts[ranks.rank] for counts in asked_by]
        asked = np.empty(sum(given), np.int64)  # Of NumPy's memory, which is not refused.
        ids = np.empty(0, np.int64) if wanted is None else wanted.ids
        ranks.all_to_all(torch.from_numpy(asked), torch.from_numpy(ids), given, own)
        rows, got = ranks.agreed("a lookup", lambda: (self.gathered(asked), torch.empty(sum(own), self.dim)))[0]
        ranks.all_to_all(got, rows, own, given)
        return got

    def _exchanged_in(self, memory: RankMemory, ranks: Ranks, wanted: Wanted | None, asked_by: list[list[int]],
                      begins: list[int]) -> torch.Tensor | None:
        """Rows are written beside the ids, where those that asked then have them."""
        def served() -> None:
            for rank, (counts, begin) in enumerate(zip(asked_by, begins)):
                if counts[ranks.rank]:
                    shared, some = memory.rows(rank, begin, sum(counts), self.dim), _part(counts, ranks.rank)
                    self.gathered(shared.ids[some], shared.rows[some])

        ranks.agreed("a lookup", served)
        if wanted is None or wanted.shared is None:
            return None
        got, wanted.shared = torch.from_numpy(wanted.shared.rows), None
        return got

    def gathered(self, ids: np.ndarray, into: np.ndarray | None = None) -> torch.Tensor:
        """Rows that this rank has; in memory of their own, or `into`."""
        rows = torch.empty(len(ids), self.dim) if into is None else torch.from_numpy(into)
        if len(ids):
            self.store._core.gather(ids, rows.numpy())
        return rows

    def owned(self, looked_up: Sequence[LookedUp], share: Callable[[LookedUp], float]) -> Owned:
        """Gradients of rows that this rank has, of all ranks' lookups in the order of their workers."""
        return self._group.either(lambda: Owned(self.store, *_joined(looked_up, share, self.dim)),
                                  lambda ranks: self._owned_of(ranks, looked_up, share))

    def _owned_of(self, ranks: Ranks, looked_up: Sequence[LookedUp], share: Callable[[LookedUp], float]) -> Owned:
        if ranks.memory is not None:
            return self._owned_in(ranks.memory, ranks, looked_up, share)
        width = _ID_BYTES + 4 * (self.dim + self.dim % 2)

        def packed() -> tuple[torch.Tensor, list[int]]:
            counts = _counted(looked_up, ranks.count)
            given = torch.empty(sum(counts), width, dtype=torch.uint8)
            _packed(looked_up, share, *self._columns(given))
            return given, counts

        (given, counts), said = ranks.agreed("run.step()", packed, words=lambda done: ranks.counts_as_text(done[1]))
        got_of = [int(one.text.split(",")[ranks.rank]) for one in said]
        got = ranks.agreed("run.step()", lambda: torch.empty(sum(got_of), width, dtype=torch.uint8))[0]
        ranks.all_to_all(got, given, got_of, counts)
        del given

        def unpacked() -> Owned:
            ids, grads = self._columns(got)
            return Owned(self.store, ids.contiguous().numpy(), grads.contiguous())

        owned: Owned = ranks.agreed("run.step()", unpacked)[0]
        return owned

    def _owned_in(self, memory: RankMemory, ranks: Ranks, looked_up: Sequence[LookedUp], share: Callable[[LookedUp], float]) -> Owned:
        """Each rank lays its own for all, and reads those of its rows."""
        def laid() -> tuple[RankRows, list[int]]:
            counts = _counted(looked_up, ranks.count)
            shared = memory.take(sum(counts), self.dim, self.store._governor._core)
            _packed(looked_up, share, torch.from_numpy(shared.ids), torch.from_numpy(shared.rows))
            return shared, counts

        own, said = ranks.agreed("run.step()", laid, lambda done: (done[0].begin,), lambda done: ranks.counts_as_text(done[1]))

        def read() -> Owned:
            given = [list(map(int, one.text.split(","))) for one in said]
            total = sum(counts[ranks.rank] for counts in given)
            owned, at = Owned(self.store, np.empty(total, np.int64), torch.empty(total, self.dim)), 0
            for rank, counts in enumerate(given):
                if counts[ranks.rank]:
                    shared, some = memory.rows(rank, int(said[rank].numbers[0]), sum(counts), self.dim), _part(counts, ranks.rank)
                    into, at = slice(at, at + counts[ranks.rank]), at + counts[ranks.rank]
                    owned.ids[into] = shared.ids[some]
                    owned.tensor[into].copy_(torch.from_numpy(shared.rows[some]))
            return owned

        owned: Owned = ranks.agreed("run.step()", read)[0]
        del own  # Kept until all have read it.
        return owned

    def _columns(self, packed: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Views of ids, int64 [n], and gradients, float32 [n, dim]."""
        ids = packed[:, :_ID_BYTES].view(torch.int64).squeeze(1)
        return ids, packed[:, _ID_BYTES:_ID_BYTES + 4 * self.dim].view(torch.float32)


def _counted(looked_up: Sequence[LookedUp], ranks: int) -> list[int]:
    """Gradients for each owner."""
    return [sum(one.wanted.counts[rank] for one in looked_up) for rank in range(ranks)]


def _packed(looked_up: Sequence[LookedUp], share: Callable[[LookedUp], float], ids: torch.Tensor, grads: torch.Tensor) -> None:
    """Writes all ids and scaled gradients, those of an owner together."""
    at = 0
    for rank in range(len(looked_up[0].wanted.counts) if looked_up else 0):
        for one in looked_up:
            some, into = _part(one.wanted.counts, rank), slice(at, at + one.wanted.counts[rank])
            ids[into] = torch.from_numpy(one.wanted.ids[some])
            torch.mul(one.gradient[some], share(one), out=grads[into])
            at = into.stop


def _part(counts: Sequence[int], owner: int) -> slice:
    """Where an owner's are, of those of one rank."""
    begin = sum(counts[:owner])
    return slice(begin, begin + counts[owner])


def _joined(looked_up: Sequence[LookedUp], share: Callable[[LookedUp], float], dim: int) -> tuple[np.ndarray, torch.Tensor]:
    if not looked_up:
        return np.empty(0, np.int64), torch.empty(0, dim)
    return (np.concatenate([one.wanted.ids for one in looked_up]),
            torch.cat([one.gradient * share(one) for one in looked_up]))


def moved(to: EmbeddingStore, before: EmbeddingStore, rank: int, ranks: int) -> None:
    """Copies into one table, from another, rows, optimizer states and counts of steps of the shards that are this rank's;
    those that are still as they began are left out. Errors: CorruptError; OSError."""
    def visit(ids: np.ndarray, sequences: np.ndarray, values: np.ndarray) -> None:
        mine = owners_of(np.ascontiguousarray(ids), ranks) == rank
        ids, sequences, values = ids[mine], sequences[mine], values[mine]
        if not len(ids):
            return
        begun = np.empty((len(ids), to.dim), np.float32)
        to._core.gather(ids, begun)
        changed = (sequences > 0) | (begun != values[:, :to.dim]).any(1) | (values[:, to.dim:] != 0).any(1)
        if changed.any():
            to._core.restore(ids[changed], sequences[changed], np.ascontiguousarray(values[changed]))

    before.scan(visit)
