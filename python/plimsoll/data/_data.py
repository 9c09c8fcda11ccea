# SPDX-License-Identifier: Apache-2.0
"""SampleOrder, Split and Loader: batches in a seeded shuffled order.

Threads: a Loader's calls run one at a time; its own threads fill the ring and never enter Python. With a device, its calls are for
         the thread that computes, and one more thread copies.
"""
from __future__ import annotations

import contextlib
import operator
import os
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import numpy as np

from .. import _core
from ..core._arrays import as_bytes, byte_size, ids_in, not_pickled
from ..core._devices import numbered
from ..errors import BudgetExceeded
from ..memory._buffers import Buffer, Columns
from ..memory._memory import Governor, refused_by_device
from ..memory._pinned import HostSlots, Like, NotPinned, Sent, bytes_of
from ._features import FeatureStore

if TYPE_CHECKING:
    import torch


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

    def train_ids(self, ranks: Any = None) -> np.ndarray:
        """Returns the ids of the training records, or of those at some ranks. Shape: int64 [n], or [train_rows].

        Errors: ValueError for a rank out of range.
        """
        return self._ids(self._core.train_ordinals, self.train_rows, ranks)

    def held_out_ids(self, ranks: Any = None) -> np.ndarray:
        """Returns the ids of the held-out records, or of those at some ranks. Shape: int64 [n], or [held_out_rows].

        Records of one group are next to each other. Errors: ValueError for a rank out of range.
        """
        return self._ids(self._core.held_out_ordinals, self.held_out_rows, ranks)

    def groups_of(self, ids: Any) -> np.ndarray:
        """Returns the index of each record's group. Shape: int64 [n] → int64 [n]. Errors: ValueError for an unknown id."""
        ordinals = self._store.find(ids)
        out = np.empty(len(ordinals), np.int64)
        self._core.groups_of(ordinals, out)
        return out

    def close(self) -> None:
        """Returns the split's memory to the governor. Loaders opened with it go on working."""
        self._core.close()

    def _ids(self, ordinals_at: Any, rows: int, ranks: Any) -> np.ndarray:
        wanted = np.arange(rows, dtype=np.int64) if ranks is None else ids_in(ranks, "ranks")
        ordinals = np.empty(len(wanted), np.int64)
        ordinals_at(wanted, ordinals)
        return self._store.ids(ordinals)


class LoaderState(NamedTuple):
    """A loader's position. It is enough to resume from there, in this process or another."""

    seed: int
    epoch: int = 0
    position: int = 0
    """The number of samples of this epoch already returned."""


class Batch(Columns):
    """One batch: a dict of NumPy arrays [rows, …] with `.ids`, `.groups` and `.tensor(name)`.

    The arrays are copies: keeping a batch does not hold up the loader. If the loader has a device, the dict has tensors there.
    """

    groups: np.ndarray
    """The index of each record's group, int64 [rows]."""
    epoch: int
    position: int
    """The position of the batch's first sample in its epoch."""
    ends_epoch: bool
    state_after: LoaderState
    """The loader's state after this batch; seek(state_after) resumes with the next one."""


class _OnDevice:
    """A column on a device; it takes the place of a Buffer."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.array = self.tensor = tensor


class _Coming:
    """A batch that the core has read, and next() has not returned yet."""

    def __init__(self, head: dict[str, Any]) -> None:
        self.head = head
        self.ids, self.groups = (np.empty(head["rows"], np.int64) for _ in range(2))
        self.sent: Sent | None = None
        self.buffers: dict[str, Buffer] | None = None  # In host memory, if the batch was not sent.
        self.error: Exception | None = None


def _likes(store: FeatureStore, names: Sequence[str], rows: int) -> list[Like]:
    import torch

    return [Like.dense((rows, *shape), getattr(torch, dtype)) for dtype, shape in map(store._columns.__getitem__, names)]


def _slots_on(device: Any, store: FeatureStore, names: Sequence[str], batch_rows: int) -> HostSlots | None:
    """Returns slots for the largest batch; None for the CPU. Errors: ValueError; BudgetExceeded."""
    where = numbered(device, "device")
    if where is None:
        return None
    slots = HostSlots(store._governor, where)
    with contextlib.suppress(NotPinned):  # Without slots, each batch is copied when it is needed.
        slots.admit(bytes_of(_likes(store, names, batch_rows)))
    return slots


class Loader:
    """Reads batches of features in a seeded shuffled order, ahead of use, into a ring of bounded bytes.

        loader = plimsoll.Loader.open(governor, "items", batch_rows=512, seed=7)
        for epoch in range(3):
            for batch in loader.epoch(epoch):
                x = batch.tensor("image")

    Batches do not depend on the number of threads. Plain iteration yields the rest of the current epoch;
    iterating again yields the next one.
    """

    def __init__(self, store: FeatureStore, loader: _core.Loader, columns: list[str],
                 state: LoaderState, owns_store: bool, slots: HostSlots | None = None) -> None:
        """Takes what open() made; call open() instead."""
        self._slots = slots
        self._coming: _Coming | None = None  # With a device: the next batch, which is being copied there.
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
             cache_bytes: int | str = 0, sweep_batches: int = 1, device: str | torch.device | None = None) -> Loader:
        """Opens a loader over a FeatureStore, or over the store in a directory.

        queue_bytes: size of the ring, in bytes or as "256MiB"; 0 is four batches. At least two must fit.
        drop_last: leaves out an epoch's last, partial batch.
        split:     reads only its training records.
        state:     the position at which to start; see the property of that name.
        cache_bytes: size of the store's slab, when `data` is a directory.
        sweep_batches: number of coming batches that one pass over the store's file reads. More mean fewer
                   reads, and the same batches. The store's slab must hold two such windows.
        device:    a device of torch, such as "cuda", on which a batch's columns are tensors. The next batch is copied there during the
                   computation, from pinned memory for two batches, leased as "pinned". None: NumPy arrays in host memory.

        Errors: ValueError; NotFoundError (data, column); BudgetExceeded naming the bytes needed; ImportError without torch.
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
            slots = None if device is None else _slots_on(device, store, names, batch_rows)
        except BaseException:
            if owns_store:
                store.close()
            raise
        return cls(store, loader, names, start, owns_store, slots)

    @property
    def state(self) -> LoaderState:
        """The loader's position, after the last batch returned."""
        return self._state

    def state_dict(self) -> dict[str, int]:
        """Returns `state` as a dict, for plimsoll.save_checkpoint() and anything else that calls state_dict()."""
        return self._state._asdict()

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Moves to a state that state_dict() returned. Errors: those of seek()."""
        self.seek(LoaderState(**state))

    def seek(self, state: LoaderState | tuple[int, int, int]) -> None:
        """Moves to a state. Errors: ValueError for a position outside the epoch."""
        state = LoaderState(*state)
        if self._coming is not None and state == self._state:
            return  # The pending batch is the next one.
        self._drop()
        self._core.seek(*state)
        self._state = state

    def next(self) -> Batch:
        """Returns the next batch. Epochs follow one another without end.

        Errors: those of FeatureStore.read(); with a device, BudgetExceeded or torch.OutOfMemoryError where it has no room.
        """
        if self._slots is None:
            coming = _Coming(self._core.next())
            return self._batch(coming, self._read(coming))
        coming, self._coming = self._coming or self._begin(), None
        buffers = self._arrived(coming)
        self._coming = self._begin()
        return self._batch(coming, buffers)

    def _read(self, coming: _Coming) -> dict[str, Buffer]:
        """Returns the batch's columns in host memory. Errors: BudgetExceeded."""
        if coming.buffers is None:
            buffers = self._store._buffers(self._columns, coming.head["rows"])
            self._core.copy(coming.ids, coming.groups, [as_bytes(buffer.array) for buffer in buffers.values()])
            coming.buffers = buffers
        return coming.buffers

    def _begin(self) -> _Coming:
        """Takes the next batch, and begins to copy it to the device if both sides have room. An error is kept until next() asks for the batch."""
        import torch

        assert self._slots is not None
        try:
            coming = _Coming(self._core.next())
        except Exception as error:
            coming = _Coming({"rows": 0})
            coming.error = error
            return coming

        def fill(slots: list[torch.Tensor]) -> None:
            self._core.copy(coming.ids, coming.groups, [slot.reshape(-1).view(torch.uint8).numpy() for slot in slots])

        with contextlib.suppress(BudgetExceeded, NotPinned, torch.OutOfMemoryError):
            coming.sent = self._slots.send(_likes(self._store, self._columns, coming.head["rows"]), fill)
        return coming

    def _arrived(self, coming: _Coming) -> dict[str, Buffer]:
        import torch

        assert self._slots is not None
        if coming.error is not None:
            raise coming.error
        try:
            tensors = ([buffer.tensor.to(self._slots.device) for buffer in self._read(coming).values()] if coming.sent is None
                       else coming.sent.arrive())
        except torch.OutOfMemoryError as error:
            raise refused_by_device(self._store._governor, "Loader: the device has no room for a batch", error) from None
        return {name: cast(Buffer, _OnDevice(tensor)) for name, tensor in zip(self._columns, tensors, strict=True)}

    def _drop(self) -> None:
        """Discards the batch that is being copied."""
        coming, self._coming = self._coming, None
        if coming is not None and coming.sent is not None:
            coming.sent.drop()

    def _batch(self, coming: _Coming, buffers: dict[str, Buffer]) -> Batch:
        head = coming.head
        batch = Batch(coming.ids, buffers)
        batch.groups = coming.groups
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
        if self._coming is not None and self._coming.error is None:
            if self._coming.sent is not None:
                self._coming.sent.begun()
            else:
                self._read(self._coming)
            return self._coming.ids.copy()
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
        self._drop()
        if self._slots is not None:
            self._slots.close()
        self._core.close()
        if self._owns_store:
            self._store.close()

    def __len__(self) -> int:
        return self.batches_per_epoch

    def __enter__(self) -> Loader:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
