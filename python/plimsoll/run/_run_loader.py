# SPDX-License-Identifier: Apache-2.0
"""RunLoader: batches of any map-style dataset, the same for any number of workers and from any position.

The order of an epoch is SampleOrder(n, seed, epoch), known at once at any position. The random states
of Python, NumPy and torch for an item come from (seed, epoch, index), those for collate_fn from the
batch's first item, in a worker and in this process alike.

Forked workers live for an epoch, and begin with the dataset as it is then: 0.2 s for two of them on one core.
Spawned workers import torch, which takes seconds, and live as long as the loader.

With a device, batches are copied to it one ahead of use (_device_batches.py).

Threads: the thread that trains; workers are processes of torch.utils.data.
Memory:  `prefetch` batches for each worker, in shared memory; without workers one batch.
"""
from __future__ import annotations

import contextlib
import ctypes
import functools
import os
import signal
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import torch

from ..core import _torch_gate
from ..core._arrays import not_pickled
from ..core._random_states import kept_random, mixed, seed_main
from ..data._data import SampleOrder
from ..memory import _workers
from ..ranks._virtual_workers import VirtualWorkers, WorkerBatches
from ._device_batches import DeviceBatches

ITEM, _BATCH = 0, 1  # Purposes of random states; _virtual_workers.py has 2.
_PR_SET_PDEATHSIG = 1
_END = object()


class RunLoader:
    """The batches of plimsoll.Run.loader(), whose docstring explains the arguments."""

    counts_on = False

    def __init__(self, dataset: Any, seed: int, *, cut: VirtualWorkers | None = None, batch_size: int, workers: int = 0,
                 collate_fn: Callable[[list[Any]], Any] | None = None, shuffle: bool = True,
                 drop_last: bool = False, prefetch: int = 2, start_method: str = "fork",
                 device: DeviceBatches | None = None) -> None:
        if not (hasattr(dataset, "__getitem__") and hasattr(dataset, "__len__")):
            raise ValueError(f"loader: {type(dataset).__name__} has no __getitem__ and __len__: a dataset "
                             "that can only be iterated is given to steps() as it is")
        items = len(dataset)
        cut = VirtualWorkers(1) if cut is None else cut
        together = batch_size * cut.count
        batches = items // max(together, 1) if drop_last else -(-items // max(together, 1))
        if batch_size < 1 or workers < 0 or prefetch < 1 or batches < 1:
            raise ValueError(f"loader: batch_size {batch_size} and prefetch {prefetch} must be 1 or more, "
                             f"workers {workers} 0 or more, and the {items} items make {batches} batches")
        if not drop_last and 0 < items % together < cut.count:
            whose = "virtual workers" if cut.told else "ranks"
            raise ValueError(f"loader: {items} items in batches of {batch_size} for each of {cut.count} {whose} leave a last "
                             f"batch of {items % together}, fewer than {whose}: drop_last=True, or another batch_size")
        self.batches = batches
        """The number of batches in an epoch."""
        self.num_workers = workers
        self._device = device
        self._shape = {"items": items, "batch_size": batch_size, "drop_last": drop_last,
                       "shuffle": shuffle}
        self._keys = _Keys(items, together, batches, seed if shuffle else None, cut)
        self._place = 0, 0
        parallel: dict[str, Any] = {}
        if workers:
            parallel = {"prefetch_factor": prefetch, "persistent_workers": start_method != "fork",
                        "multiprocessing_context": start_method,
                        "worker_init_fn": functools.partial(
                            _begin_worker, torch.are_deterministic_algorithms_enabled(),
                            0 if start_method == "forkserver" else os.getpid())}
        fetch = _Fetch(dataset, seed, collate_fn or torch.utils.data.default_collate, cut.told)
        # Its own generator: without one, torch draws the workers' seeds from the main generator.
        kind = _Lasting if parallel.get("persistent_workers") else _Ended
        self._loader: Any = kind(
            fetch, batch_sampler=self._keys, num_workers=workers, collate_fn=_the_only_one,
            generator=torch.Generator(), **parallel)

    __reduce_ex__ = not_pickled

    # ---- Loops other than Run.steps() ----

    def seek(self, epoch: int, batch: int = 0) -> None:
        """Sets the position where the next iterator begins, of this loader or of data_loader()."""
        self._place = self._keys.epoch, self._keys.first = epoch, batch

    def agreed(self, work: Callable[[], Any]) -> Any:
        """Returns work(). Those loops replace this with a call that does it on all ranks or on none."""
        return work()

    def ended_waiting(self, error: Exception) -> bool:
        """Whether an exception from the wait for a batch is no failure, so that iteration just ends. Those loops replace this."""
        return False

    def __iter__(self) -> Iterator[Any]:
        """Yields one epoch from the current position, or from seek(); at its end the position is the next epoch."""
        epoch, batch = self._place
        try:
            batches = self.start(epoch, batch)
            while (one := self.agreed(lambda: next(batches, _END))) is not _END:
                batch += 1
                self._place = epoch, batch
                yield one
        except Exception as error:
            if not self.ended_waiting(error):
                raise
            return
        self._place = epoch + 1, 0

    def state_dict(self) -> dict[str, int]:
        return {"epoch": self._place[0], "batch": self._place[1]}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.seek(state["epoch"], state["batch"])

    def data_loader(self) -> Any:
        """Returns the torch DataLoader inside, for a loop that skips batches itself. Its batches are in host memory."""
        return self._loader

    def shape(self) -> dict[str, Any]:
        """Returns the settings that must be the same when the run is resumed."""
        return self._shape

    def start(self, epoch: int, batch: int, state: Any = None) -> Iterator[Any]:
        """Returns an iterator over the epoch's batches from `batch` on."""
        if self._loader is None:
            raise ValueError("loader: its run was closed")
        self._keys.epoch, self._keys.first = epoch, batch
        batches = iter(self._loader)
        return batches if self._device is None else self._device.through(batches)

    def placed(self, batch: Any) -> Any:
        """Moves a batch to the loader's device, if it has one, and returns it."""
        return batch if self._device is None else self._device.brought(batch)

    def state(self) -> Any:
        return None  # Epoch and batch are enough.

    def pass_over(self, state: Any, left: bool) -> None:
        pass

    def end_workers(self) -> None:
        """Ends the workers at once: memory is short, and their batches are not needed."""
        for batches in self._loader.begun if self._loader is not None else ():
            _workers.end_workers(batches)

    def close(self) -> None:
        """Ends the workers, and releases the slots for a device."""
        self._loader = None
        if self._device is not None:
            self._device.close()

    def __len__(self) -> int:
        return self.batches


class _Ended(torch.utils.data.DataLoader):
    """A DataLoader that knows its iterators, so that their workers can be ended."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        self.begun: weakref.WeakSet[Any] = weakref.WeakSet()
        super().__init__(*arguments, **options)

    def _get_iterator(self) -> Any:
        made = super()._get_iterator()
        self.begun.add(made)
        return made


class _Lasting(_Ended):
    """A DataLoader whose workers outlive an epoch. Torch has one iterator for them, which each new loop takes from the one before."""

    loops = 0

    def __iter__(self) -> Any:
        self.loops += 1
        keys: Any = self.batch_sampler
        return self._batches(super().__iter__(), self.loops, len(keys) - keys.first)

    def _batches(self, batches: Any, loop: int, count: int) -> Iterator[Any]:
        """Yields the batches of a loop. Errors: ValueError if another loop has begun before this one ended."""
        for _ in range(count):
            if loop != self.loops:
                raise ValueError("loader: another loop has begun with this loader, whose spawned workers serve one at a "
                                 'time: give it a loader of its own, or use start_method="fork"')
            yield next(batches)


class _Keys:
    """A sampler of batches of one key each, from `first` on: (epoch, lists of item indices, one per virtual worker of this process)."""

    def __init__(self, items: int, batch_size: int, batches: int, seed: int | None, cut: VirtualWorkers) -> None:
        """Takes the sizes. batch_size: items for all virtual workers together, of which this process has some."""
        self._items, self._batch_size, self._batches, self._seed = items, batch_size, batches, seed
        self._cut = cut
        self.epoch = self.first = 0

    def __iter__(self) -> Iterator[list[tuple[int, list[list[int]]]]]:
        epoch = self.epoch
        order = None if self._seed is None else SampleOrder(self._items, self._seed, epoch)
        for batch in range(self.first, self._batches):
            begin = batch * self._batch_size
            rows = min(self._batch_size, self._items - begin)
            places = [np.arange(*edges, dtype=np.int64) for edges in self._cut.cut(begin, rows)]
            yield [(epoch, [(some if order is None else order.at(some)).tolist() for some in places])]

    def __len__(self) -> int:
        return self._batches


class _Fetch:
    """A dataset of batches, copied to workers. together: a key gives WorkerBatches; otherwise its only batch."""

    def __init__(self, dataset: Any, seed: int, collate: Callable[[list[Any]], Any], together: bool) -> None:
        self._dataset, self._seed, self._collate, self._together = dataset, seed, collate, together

    def __getitem__(self, key: tuple[int, list[list[int]]]) -> Any:
        epoch, some = key
        with contextlib.nullcontext() if torch.utils.data.get_worker_info() is not None else _as_in_a_worker():
            batches = [self._batch(epoch, indices) for indices in some]
        return WorkerBatches(batches) if self._together else batches[0]

    def _batch(self, epoch: int, indices: Sequence[int]) -> Any:
        items = []
        for index in indices:
            seed_main(mixed(self._seed, epoch, index, ITEM))
            items.append(self._dataset[index])
        seed_main(mixed(self._seed, epoch, indices[0], _BATCH))
        return self._collate(items)


@contextlib.contextmanager
def _as_in_a_worker() -> Iterator[None]:
    """Limits torch to one thread inside the block, as in a worker: sums then round the same. Random states are restored."""
    threads = torch.get_num_threads()
    if threads != 1:
        torch.set_num_threads(1)
    try:
        with kept_random():
            yield
    finally:
        if threads != 1:
            torch.set_num_threads(threads)


def _begin_worker(deterministic: bool, parent: int, _: int) -> None:
    # Ctrl-C reaches every process of a terminal; the training process ends the workers. If it is killed, they
    # end at once, not after torch's five seconds, in which the next start would run beside them.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if parent and os.getppid() != parent:  # The parent was killed before prctl(); torch's own check would watch pid 1.
        os._exit(1)
    if deterministic and not torch.are_deterministic_algorithms_enabled():  # A spawned worker; a forked one inherits it.
        _torch_gate.load().make_deterministic(1)


def _the_only_one(batches: list[Any]) -> Any:
    return batches[0]
