# SPDX-License-Identifier: Apache-2.0
"""SampleOrder, Split and Loader: batches in a seeded shuffled order.

Threads: a Loader's calls queue up; its own threads fill the ring and never enter Python.
"""
from __future__ import annotations

import operator
import os
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

from .. import _core
from ..core._arrays import as_bytes, byte_size, ids_in, not_pickled
from ..memory._buffers import Buffer, Columns
from ..memory._memory import Governor
from ._features import FeatureStore


class SampleOrder:
    """A seeded shuffle of an epoch: a keyed permutation of the samples, in O(1) memory."""

    def __init__(self, samples: int, seed: int = 0, epoch: int = 0) -> None:
        """Makes a permutation of 0 … samples−1. Errors: ValueError when samples is negative."""
        self._core = _core.SampleOrder(samples, seed, epoch)

    def at(self, position: Any) -> Any:
        """Returns the sample at a position (an int), or the samples at an array of positions (int64 [n] → int64 [n]).

        Errors: ValueError for a position out of range.
        """
        return self._map(self._core.at, position, "position")

    def position_of(self, sample: Any) -> Any:
        """Returns the position of a sample, or of an array of them: the inverse of at(). Errors: ValueError for a sample out of range."""
        return self._map(self._core.position_of, sample, "sample")

    @staticmethod
    def _map(function: Any, value: Any, name: str) -> Any:
        try:
            scalar = operator.index(value)
        except TypeError:
            many = ids_in(value, name)
            out = np.empty(len(many), np.int64)
            function(many, out)
            return out
        one = np.empty(1, np.int64)
        function(np.array([scalar], np.int64), one)
        return int(one[0])

    def __len__(self) -> int:
        return self._core.samples

    def __iter__(self) -> Iterator[int]:
        for begin in range(0, len(self), 4096):
            end = min(begin + 4096, len(self))
            yield from self.at(np.arange(begin, end, dtype=np.int64)).tolist()


class Split:
    """A split of a store's records into training and held-out ones, by whole groups that a seed chooses."""

    def __init__(self, governor: Governor, store: FeatureStore, held_out_groups: int = 0,
                 seed: int = 0) -> None:
        """Holds out `held_out_groups` groups of records. In a store without groups each record is a group of its own.

        Errors: ValueError when the store has fewer groups; BudgetExceeded.
        """
        self._store = store
        self._core = _core.Split.create(governor._core, store._core, held_out_groups, seed)
        governor._adopt(self)

    @property
    def train_rows(self) -> int:
        """Number of training records."""
        return self._core.train_rows

    @property
    def held_out_rows(self) -> int:
        """Number of held-out records."""
        return self._core.held_out_rows

    @property
    def held_out_groups(self) -> int:
        """Number of held-out groups."""
        return self._core.held_out_groups

    def train_ids(self) -> np.ndarray:
        """Returns the ids of the training records. Shape: int64 [train_rows]."""
        return self._ids(self._core.train_ordinals, self.train_rows)

    def held_out_ids(self) -> np.ndarray:
        """Returns the ids of the held-out records. Shape: int64 [held_out_rows]."""
        return self._ids(self._core.held_out_ordinals, self.held_out_rows)

    def close(self) -> None:
        """Returns the split's memory to the governor. Loaders opened with it go on working."""
        self._core.close()

    def _ids(self, ordinals_at: Any, rows: int) -> np.ndarray:
        ordinals = np.empty(rows, np.int64)
        ordinals_at(np.arange(rows, dtype=np.int64), ordinals)
        return self._store.ids(ordinals)


class LoaderState(NamedTuple):
    """A loader's position. It is enough to resume from there, in this process or another."""

    seed: int
    epoch: int = 0
    position: int = 0
    """Samples of this epoch already handed out."""


class Batch(Columns):
    """One batch: a dict of NumPy arrays [rows, …] with `.ids`, `.groups` and `.tensor(name)`.

    The arrays are copies: a batch may be kept without holding up the loader.
    """

    groups: np.ndarray
    """int64 [rows]: index of each record's group."""
    epoch: int
    position: int
    """Position of the batch's first sample in its epoch."""
    ends_epoch: bool
    state_after: LoaderState
    """The loader's state after this batch: resume from it with the next one."""


class Loader:
    """Reads batches of features in a seeded shuffled order, ahead of use, into a ring bounded in bytes.

        loader = plimsoll.Loader.open(governor, "items", batch_rows=512, seed=7)
        for epoch in range(3):
            for batch in loader.epoch(epoch):
                x = batch.tensor("image")

    Batches do not depend on the number of threads. Plain iteration yields the rest of the current epoch;
    iterating again yields the next one.
    """

    def __init__(self, store: FeatureStore, loader: _core.Loader, columns: list[str],
                 state: LoaderState, owns_store: bool) -> None:
        """Called by open()."""
        self._store = store
        self._core = loader
        self._columns = columns
        self._state = state
        self._owns_store = owns_store
        store._governor._adopt(self)

    __reduce_ex__ = not_pickled

    @classmethod
    def open(cls, governor: Governor, data: FeatureStore | str | os.PathLike[str], *,
             batch_rows: int, queue_bytes: int | str = 0, seed: int = 0, loader_threads: int = 2,
             columns: Sequence[str] | None = None, drop_last: bool = False,
             split: Split | None = None, state: LoaderState | None = None,
             cache_bytes: int | str = 0, sweep_batches: int = 1) -> Loader:
        """Opens a loader over a FeatureStore, or over the store in a directory.

        queue_bytes: size of the ring, in bytes or as "256MiB"; 0 is four batches. At least two must fit.
        drop_last: leaves out an epoch's last, partial batch.
        split:     the loader reads only its training records.
        state:     where to start; see the property of that name.
        cache_bytes: size of the store's slab, when `data` is a directory.
        sweep_batches: number of coming batches that one pass over the store's file reads: more mean fewer
                   reads, and the same batches. The store's slab must hold two such windows.

        Errors: ValueError; NotFoundError (data, column); BudgetExceeded naming the bytes needed.
        """
        queue_size = byte_size(queue_bytes, "queue_bytes")
        owns_store = not isinstance(data, FeatureStore)
        store = data if isinstance(data, FeatureStore) else FeatureStore.open(governor, data, cache_bytes=cache_bytes)
        try:
            names = store._chosen(columns)
            start = LoaderState(seed) if state is None else LoaderState(*state)
            core_split = (_core.Split.create(governor._core, store._core, 0, 0) if split is None
                          else split._core)
            loader = _core.Loader.open(governor._core, store._core, core_split, names, batch_rows,
                                       queue_size, loader_threads, drop_last, sweep_batches, *start)
        except BaseException:
            if owns_store:
                store.close()
            raise
        return cls(store, loader, names, start, owns_store)

    @property
    def state(self) -> LoaderState:
        """The loader's position: after the batch handed out last."""
        return self._state

    def state_dict(self) -> dict[str, int]:
        """Returns `state` as a dict, for plimsoll.save_checkpoint() and anything else that calls state_dict()."""
        return self._state._asdict()

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Goes to a state that state_dict() returned. Errors: as seek()."""
        self.seek(LoaderState(**state))

    def seek(self, state: LoaderState | tuple[int, int, int]) -> None:
        """Goes to a state. Errors: ValueError for a position outside the epoch."""
        state = LoaderState(*state)
        self._core.seek(*state)
        self._state = state

    def next(self) -> Batch:
        """Returns the next batch; epochs follow one another without end. Errors: those of FeatureStore.read()."""
        head = self._core.next()
        rows = head["rows"]
        buffers: dict[str, Buffer] = self._store._buffers(self._columns, rows)
        ids, groups = np.empty(rows, np.int64), np.empty(rows, np.int64)
        self._core.copy(ids, groups, [as_bytes(buffer.array) for buffer in buffers.values()])
        batch = Batch(ids, buffers)
        batch.groups = groups
        batch.epoch, batch.position = head["epoch"], head["position"]
        batch.ends_epoch = head["ends_epoch"]
        batch.state_after = self._state = LoaderState(*head["state_after"])
        return batch

    def epoch(self, epoch: int) -> Iterator[Batch]:
        """Yields every batch of one epoch, from its beginning."""
        self.seek(LoaderState(self._state.seed, epoch, 0))
        yield from self

    def __iter__(self) -> Iterator[Batch]:
        """Yields the remaining batches of the current epoch."""
        while self.batches_per_epoch > 0:
            batch = self.next()
            yield batch
            if batch.ends_epoch:
                return

    def upcoming_ids(self) -> np.ndarray:
        """Returns the ids of the next batch, for EmbeddingStore.prefetch(). Shape: int64 [rows]."""
        return np.array(self._core.upcoming_ids(), np.int64)

    @property
    def batches_per_epoch(self) -> int:
        """Number of batches in one epoch."""
        return self._core.batches_per_epoch

    @property
    def slot_bytes(self) -> int:
        """Bytes that one batch takes in the ring."""
        return self._core.slot_bytes

    @property
    def slots(self) -> int:
        """Number of batches that fit in the ring."""
        return self._core.slots

    @property
    def stall_ns(self) -> int:
        """Nanoseconds that next() has waited for batches so far."""
        return self._core.stall_ns

    def close(self) -> None:
        """Ends the loader's threads and frees the ring. Closes the store, too, if open() opened it."""
        self._core.close()
        if self._owns_store:
            self._store.close()

    def __len__(self) -> int:
        return self.batches_per_epoch

    def __enter__(self) -> Loader:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
