# SPDX-License-Identifier: Apache-2.0
"""Sources of batches for Run.steps(), each of which can start at a position in an epoch.

    RunLoader, a list, plimsoll.Loader    the position is a number
    TokenBatches, or an object with its place and seek()   the position is three numbers, the epoch first
    an object with state_dict()           the position is its state; items of a StatefulDataLoader with workers
                                          have random states as in a RunLoader
    any other iterable                    the epoch is read again up to the position, with a warning

Virtual workers take one batch each, in their order (Dealt): a step reads as many, on every rank.

Threads: the thread that trains.   Memory: none beyond the wrapped data.
"""
from __future__ import annotations

import hashlib
import itertools
import operator
import warnings
from collections.abc import Iterator, Sequence
from typing import Any, Protocol

import torch

from ..core._random_states import RandomStates, mixed, seed_main
from ..data._data import Loader, LoaderState
from ..ranks._virtual_workers import VirtualWorkers, WorkerBatches
from ._run_loader import ITEM, RunLoader


class Source(Protocol):
    @property
    def batches(self) -> int | None:
        """The number of batches in an epoch; None: unknown."""
    num_workers: int
    counts_on: bool
    """Whether an epoch depends on earlier ones, so that state() is needed at a loop's end, too."""

    def shape(self) -> dict[str, Any]:
        """Returns the settings that must be the same when the run is resumed."""
    def start(self, epoch: int, batch: int, state: Any) -> Iterator[Any]:
        """Returns an iterator over the epoch's batches from `batch` on. state: from state() at that position; None: the beginning."""
    def state(self) -> Any:
        """Returns the values that start() needs beside the number of batches, as plain values. Called between two batches."""
    def pass_over(self, state: Any, left: bool) -> None:
        """Restores the state after a loop that has ended. state: from state() then. left: before the end of its epoch. Only if counts_on."""


def source_of(data: Any, seed: int) -> Source:
    """Returns the source for `data`. Errors: ValueError for an object that is not iterable."""
    if isinstance(data, RunLoader):
        return data
    if isinstance(data, Loader):
        return _FeatureBatches(data, seed)
    if isinstance(data, Sequence):
        return _Listed(data)
    if not hasattr(data, "__iter__"):
        raise ValueError(f"steps: {type(data).__name__} is no iterable of batches; run.loader(dataset, "
                         "batch_size=…) makes one of a dataset")
    if getattr(data, "use_stateful_dataloader", True) is False:
        raise ValueError(f"steps: a {type(data).__name__} that accelerate prepared has no position: give run.loader("
                         "dataset, batch_size=…) as it is")
    if hasattr(data, "place") and hasattr(data, "seek"):
        return Sought(data)
    if hasattr(data, "state_dict") and hasattr(data, "load_state_dict"):
        return _Stateful(data, seed)
    return _ReadAgain(data)


class Dealt:
    """Deals the batches of another source to this process's virtual workers, as WorkerBatches."""

    def __init__(self, source: Source, workers: VirtualWorkers) -> None:
        self._source, self._workers = source, workers
        self.num_workers, self.counts_on = source.num_workers, source.counts_on
        self.batches = None if source.batches is None else -(-source.batches // workers.count)

    def shape(self) -> dict[str, Any]:
        return self._source.shape()

    def start(self, epoch: int, batch: int, state: Any) -> Iterator[WorkerBatches]:
        return self._dealt(self._source.start(epoch, batch * self._workers.count, state))  # Starts now: that may draw random numbers.

    def _dealt(self, batches: Iterator[Any]) -> Iterator[WorkerBatches]:
        workers = self._workers
        mine = range(workers.first, workers.first + workers.own)
        while True:
            own, spare, taken = [], None, 0
            for one in itertools.islice(batches, workers.count):
                spare = one if taken == 0 else spare
                if taken in mine:
                    own.append(one)
                taken += 1
            if not taken:
                return
            dealt = WorkerBatches([*own, *[spare] * (workers.own - len(own))])
            dealt.absent = workers.own - len(own)
            yield dealt
            if taken < workers.count:
                return  # An endless source would begin the next epoch if asked again.

    def state(self) -> Any:
        return self._source.state()

    def pass_over(self, state: Any, left: bool) -> None:
        self._source.pass_over(state, left)


class _Any:
    counts_on = False

    def __init__(self, data: Any) -> None:
        self._data = data
        self.num_workers = int(getattr(data, "num_workers", 0))
        try:
            self.batches: int | None = len(data)
        except TypeError:
            self.batches = None

    def shape(self) -> dict[str, Any]:
        return {"batches": self.batches}

    def state(self) -> Any:
        return None

    def pass_over(self, state: Any, left: bool) -> None:
        pass


class _Listed(_Any):
    def start(self, epoch: int, batch: int, state: Any) -> Iterator[Any]:
        return (self._data[k] for k in range(batch, len(self._data)))


class _FeatureBatches(_Any):
    def __init__(self, data: Loader, seed: int) -> None:
        super().__init__(data)
        self._seed = seed

    def start(self, epoch: int, batch: int, state: Any) -> Iterator[Any]:
        self._data.seek(LoaderState(**state) if state else LoaderState(self._seed, epoch, 0))
        return iter(self._data)

    def state(self) -> Any:
        return self._data.state_dict()


class Sought(_Any):
    def start(self, epoch: int, batch: int, state: Any) -> Iterator[Any]:
        self._data.seek(tuple(state or (epoch, 0, 0)))
        return iter(self._data)

    def state(self) -> Any:
        return list(self._data.place)


class _Stateful(_Any):
    counts_on = True  # A sampler draws an order for each epoch from its own generator.

    def __init__(self, data: Any, seed: int) -> None:
        super().__init__(data)
        self._items = items_of(data, seed) if self.num_workers else None

    def start(self, epoch: int, batch: int, state: Any) -> Iterator[Any]:
        if self._items is not None:
            self._items.epoch = epoch
        if state is not None:
            self._data.load_state_dict(state)
        batches = iter(self._data)
        if self.batches is None or batch < self.batches:
            return batches
        for _ in batches:  # All batches were done before the end was seen; some loaders then begin the next epoch: undo that.
            self._data.load_state_dict(state)
            break
        return iter(())

    def pass_over(self, state: Any, left: bool) -> None:
        self._data.load_state_dict(state)
        if left:
            iter(self._data)
        else:
            self._data.state_dict()  # Forces a lazy load now, together with the random numbers that it draws.

    def state(self) -> Any:
        return self._data.state_dict()


def items_of(data: Any, seed: int) -> SeededItems | None:
    """Makes the workers of `data` set the same random states for each item as run.loader() does: a state_dict() has no states of
    workers. Returns None, with a RuntimeWarning, where that is impossible.
    """
    data = getattr(data, "base_dataloader", data)  # The loader inside accelerate's.
    dataset = getattr(data, "dataset", None)
    if isinstance(dataset, SeededItems):  # Wrapped by an earlier loop or run.
        if dataset.seed == seed:
            return dataset
        dataset = dataset.dataset
    can = isinstance(data, torch.utils.data.DataLoader) and hasattr(dataset, "__getitem__") and not isinstance(
        dataset, torch.utils.data.IterableDataset)
    if not can:
        warnings.warn(f"steps: {type(data).__name__} has workers, and what these draw is no part of its state_dict(): random "
                      "augmentation in them is not the same after a resumption, so the same bits are not promised. run.loader("
                      "dataset, workers=…) has them of any map-style dataset, and num_workers=0 of this one", RuntimeWarning,
                      stacklevel=5)
        return None
    items = SeededItems(dataset, seed)
    object.__setattr__(data, "dataset", items)  # torch forbids setting it, as existing iterators keep the old one.
    return items


class SeededItems:
    """A map-style dataset whose items see random states from (seed, epoch, index) in a worker. Otherwise it behaves like `dataset`."""

    def __init__(self, dataset: Any, seed: int) -> None:
        self.dataset, self.seed = dataset, seed
        self._epoch = torch.zeros((), dtype=torch.int64).share_memory_()  # Workers may live longer than an epoch.
        if hasattr(dataset, "__getitems__"):
            self.__getitems__ = self._several

    @property
    def epoch(self) -> int:
        return int(self._epoch)

    @epoch.setter
    def epoch(self, epoch: int) -> None:
        self._epoch.fill_(epoch)

    def __getitem__(self, index: Any) -> Any:
        self._begin(index)
        return self.dataset[index]

    def _several(self, indices: list[Any]) -> Any:
        self._begin(indices[0])
        return self.dataset.__getitems__(indices)

    def _begin(self, index: Any) -> None:
        if torch.utils.data.get_worker_info() is not None:
            seed_main(mixed(self.seed, self.epoch, place_of(index), ITEM))

    def __len__(self) -> int:
        return len(self.dataset)

    def __getattr__(self, name: str) -> Any:
        if name in ("dataset", "__getstate__", "__setstate__"):  # Asked for during unpickling.
            raise AttributeError(name)
        return getattr(self.dataset, name)


def place_of(index: Any) -> int:
    """Returns a number for a sampler's index: the index itself, or a hash of its text."""
    try:
        return int(operator.index(index))
    except TypeError:
        return int.from_bytes(hashlib.blake2b(repr(index).encode(), digest_size=7).digest(), "little")


class _ReadAgain(_Any):
    """Reads an epoch again from its beginning, with the random states of that time; the same batches are expected."""

    def __init__(self, data: Any) -> None:
        super().__init__(data)
        self._began: dict[str, Any] | None = None
        warnings.warn(
            f"steps: {type(data).__name__} has no position (state_dict() and load_state_dict()). A "
            "resumption reads the epoch again up to its place, with the random states that the epoch "
            "began with: it takes that long, and the bits are the same only if the same batches come. "
            "run.loader(dataset) and a StatefulDataLoader begin at the place", RuntimeWarning,
            stacklevel=4)

    def start(self, epoch: int, batch: int, state: Any) -> Iterator[Any]:
        if state is not None:
            RandomStates.from_plain(state).put_back()
        self._began = RandomStates().to_plain()
        batches = iter(self._data)
        for _ in range(batch):
            next(batches, None)
        return batches

    def state(self) -> Any:
        return self._began
