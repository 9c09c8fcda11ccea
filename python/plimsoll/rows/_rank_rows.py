# SPDX-License-Identifier: Apache-2.0
"""Tables whose rows are divided among ranks: each rank owns whole virtual shards (decision 0045), in order.

    rank 1 of 4                     shards 1,024 to 2,047
    a lookup                        ids to their owners, rows back                       look_up()
    gradients                       each worker's, to the owners, once per step          owned()
    another number of ranks         new tables, from the rows of their shards            moved()

A row's gradients are added in the order (worker, lookup), after duplicates of an id within a lookup. So the bits of
the sum do not depend on the rank that computed each gradient.

Reading order: _virtual_workers.py, _ranks.py, this file, _run_embedding.py, _run_tables.py.
Threads: the thread that trains.
Memory:  a step's rows and gradients, leased; twice that during an exchange (src/memory/rank_memory.h).
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
_ID_BITS = 48  # Bits that an id takes: it is less than the number of a table's rows.


def owners_of(ids: np.ndarray, ranks: int) -> np.ndarray:
    """Returns the rank that owns each id. Shape: int64 [n] both."""
    shards = np.empty_like(ids)
    _core.virtual_shards(ids, shards)
    return shards * ranks // SHARDS


def overlap(rank: int, ranks: int, other: int, others: int) -> bool:
    """Whether rank `rank` of `ranks` and rank `other` of `others` own a common shard."""
    return rank * others < (other + 1) * ranks and other * ranks < (rank + 1) * others


@dataclasses.dataclass
class Wanted:
    """Distinct ids, grouped by the rank that owns them."""

    ids: np.ndarray
    counts: list[int]
    """The number of these ids that each rank owns."""
    places: np.ndarray
    """The index in `ids` of each requested id."""
    shared: RankRows | None = None
    """The ids and their rows in memory that all ranks map, during the lookup."""

    @classmethod
    def of(cls, asked: np.ndarray, ranks: int) -> Wanted:
        if ranks == 1:
            ids, places = np.unique(asked, return_inverse=True)
            return cls(ids, [len(ids)], places)
        keys, places = np.unique(owners_of(asked, ranks) << _ID_BITS | asked, return_inverse=True)
        ends = np.searchsorted(keys, np.arange(1, ranks + 1) << _ID_BITS)
        return cls(keys & ((1 << _ID_BITS) - 1), np.diff(ends, prepend=0).tolist(), places)


class LookedUp:
    """The rows of one lookup: a leaf of the graph, later its gradient and the gradient's weight."""

    def __init__(self, table: DealtTable, wanted: Wanted, tensor: torch.Tensor) -> None:
        self.table, self.wanted, self.tensor = table, wanted, tensor
        self.gradient: Any = None
        self.weight = 0.0

    def take(self, share: float, weight: float) -> None:
        """Takes the leaf's gradient, multiplied by `share`. weight: that of the worker."""
        self.gradient, self.tensor.grad, self.weight = self.tensor.grad, None, weight
        if self.gradient is not None and share != 1:
            self.gradient.mul_(share)


@dataclasses.dataclass
class Owned:
    """Gradients of rows that this rank owns; _transaction.Together accepts it in place of Rows."""

    _store: EmbeddingStore
    ids: np.ndarray
    tensor: torch.Tensor
    """The gradients."""

    def _gradient(self) -> np.ndarray:
        return self.tensor.numpy()

    def _end(self) -> None:
        pass


class DealtTable:
    """A table of a run. `store` has the rows that this rank owns."""

    def __init__(self, name: str, store: EmbeddingStore, rows: int, group: Group) -> None:
        self.name, self.store, self.rows, self.dim = name, store, rows, store.dim
        self._group, self.index = group, len(group.tables)
        group.tables.append(self)

    def look_up(self, asked: np.ndarray) -> tuple[Wanted, torch.Tensor]:
        """Fetches the rows of the distinct ids in `asked` from the ranks that own them. Shape: asked int64 [m]; rows float32 [n, dim].

        With several ranks, those without a lookup of their own serve meanwhile (Ranks.agreed).
        Errors: NotFoundError naming the first unknown id; an error of any rank's table, on all ranks.
        """
        unknown = (asked < 0) | (asked >= self.rows)
        if unknown.any():
            raise NotFoundError(f"{self.name}: there is no row {int(asked[unknown][0])}; ids are from 0 to {self.rows - 1}")
        wanted = Wanted.of(asked, self._group.count)
        return wanted, self._group.look_up(self, wanted)

    def lay(self, memory: RankMemory, wanted: Wanted) -> int:
        """Writes the ids to memory that all ranks map, with room for their rows. Returns their position. Errors: BudgetExceeded."""
        wanted.shared = memory.take(len(wanted.ids), self.dim, self.store._governor._core)
        wanted.shared.ids[:] = wanted.ids
        return wanted.shared.begin

    def exchanged(self, ranks: Ranks, wanted: Wanted | None, asked_by: list[list[int]], begins: list[int]) -> torch.Tensor | None:
        """Sends ids to their owners and returns the rows of `wanted`. For wanted None, only serves the other ranks.

        asked_by: for each rank, how many ids it requests from each rank; begins: the positions of the ranks' ids.
        """
        if ranks.memory is not None:
            return self._exchanged_in(ranks.memory, ranks, wanted, asked_by, begins)
        own = [0] * ranks.count if wanted is None else wanted.counts
        given = [counts[ranks.rank] for counts in asked_by]
        asked = np.empty(sum(given), np.int64)  # NumPy's memory, which no lease can refuse.
        ids = np.empty(0, np.int64) if wanted is None else wanted.ids
        ranks.all_to_all(torch.from_numpy(asked), torch.from_numpy(ids), given, own)
        rows, got = ranks.agreed("a lookup", lambda: (self.gathered(asked), torch.empty(sum(own), self.dim)))[0]
        ranks.all_to_all(got, rows, own, given)
        return got

    def _exchanged_in(self, memory: RankMemory, ranks: Ranks, wanted: Wanted | None, asked_by: list[list[int]],
                      begins: list[int]) -> torch.Tensor | None:
        """Writes the rows that other ranks request beside their ids in shared memory, and returns this rank's rows from there."""
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
        """Returns rows that this rank owns, in new memory or in `into`."""
        rows = torch.empty(len(ids), self.dim) if into is None else torch.from_numpy(into)
        if len(ids):
            self.store._core.gather(ids, rows.numpy())
        return rows

    def owned(self, looked_up: Sequence[LookedUp], share: Callable[[LookedUp], float]) -> Owned:
        """Returns the gradients of rows that this rank owns, from all ranks' lookups in the order of their workers."""
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
        """Writes this rank's gradients to memory that all ranks map, and reads those of its own rows from all."""
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
        del own  # Kept until all ranks have read it.
        return owned

    def _columns(self, packed: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns views of the ids, int64 [n], and of the gradients, float32 [n, dim]."""
        ids = packed[:, :_ID_BYTES].view(torch.int64).squeeze(1)
        return ids, packed[:, _ID_BYTES:_ID_BYTES + 4 * self.dim].view(torch.float32)


def _counted(looked_up: Sequence[LookedUp], ranks: int) -> list[int]:
    """Returns the number of gradients for each owner."""
    return [sum(one.wanted.counts[rank] for one in looked_up) for rank in range(ranks)]


def _packed(looked_up: Sequence[LookedUp], share: Callable[[LookedUp], float], ids: torch.Tensor, grads: torch.Tensor) -> None:
    """Writes all ids and scaled gradients, grouped by owner."""
    at = 0
    for rank in range(len(looked_up[0].wanted.counts) if looked_up else 0):
        for one in looked_up:
            some, into = _part(one.wanted.counts, rank), slice(at, at + one.wanted.counts[rank])
            ids[into] = torch.from_numpy(one.wanted.ids[some])
            torch.mul(one.gradient[some], share(one), out=grads[into])
            at = into.stop


def _part(counts: Sequence[int], owner: int) -> slice:
    """Returns the slice of an owner's ids among those of one rank."""
    begin = sum(counts[:owner])
    return slice(begin, begin + counts[owner])


def _joined(looked_up: Sequence[LookedUp], share: Callable[[LookedUp], float], dim: int) -> tuple[np.ndarray, torch.Tensor]:
    if not looked_up:
        return np.empty(0, np.int64), torch.empty(0, dim)
    return (np.concatenate([one.wanted.ids for one in looked_up]),
            torch.cat([one.gradient * share(one) for one in looked_up]))


def moved(to: EmbeddingStore, before: EmbeddingStore, rank: int, ranks: int) -> None:
    """Copies rows of this rank's shards from the table `before` to `to`, with optimizer states and step counts. Rows that still have their
    initial values are skipped. Errors: CorruptError; OSError.
    """
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
