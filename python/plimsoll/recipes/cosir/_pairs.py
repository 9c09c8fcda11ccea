# SPDX-License-Identifier: Apache-2.0
"""The data of a run: image-text pairs of a feature store, those that are held out, and batches of the others in a seeded order.

Threads: the calling one; a Loader's own.   Memory: the features' slab and the loader's ring, as the options say, or shares of what is free.
"""
from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch

from ...data._data import Batch, Loader, LoaderState, SampleOrder, Split
from ...data._features import FeatureStore
from ._random import Purpose, seed_for

if TYPE_CHECKING:
    from ...memory._memory import Governor
    from ...rows._embedding import EmbeddingStore
    from . import Options

COLUMNS = ("image", "text")
_HELD_OUT_PAIRS = 5000
_AT_ONCE = 1 << 16  # Ids.
_CACHE_SHARE, _CACHE_LEAST, _MIB = 8, 8 << 20, 1 << 20
_REAL = ("float32", "float16", "bfloat16", "float64")


class Held(NamedTuple):
    """Pairs by id. Those of one group, an image with several texts, stand next to each other."""

    ids: np.ndarray
    groups: np.ndarray


class Pairs:
    """The pairs of a feature store, on a device. Its batches are (image, text, ids, groups, epoch), for Run.steps()."""

    def __init__(self, governor: Governor, options: Options, device: str) -> None:
        """Opens the store and splits it. Errors: ValueError for data that is no set of pairs; those of FeatureStore.open()."""
        self._governor, self._options, self.device = governor, options, device
        self.order_seed = seed_for(options.seed, Purpose.ORDER)
        cache = options.cache_bytes or max(_CACHE_LEAST, min(governor.ledger().free_bytes // _CACHE_SHARE, _size_of(options.data) + _MIB))
        self.features = FeatureStore.open(governor, options.data, cache_bytes=cache, io_threads=options.io_threads)
        info = self.features.info()
        self.fingerprint = str(info.get("fingerprint", info["rows"]))
        if self.features.rows < 2:
            raise ValueError(f"{options.data}: {self.features.rows} pairs; training compares at least two; choose another --data")
        self.widths = tuple(_width(options.data, self.features.columns, name) for name in COLUMNS)
        self.split = Split(governor, self.features, _held_out_groups(options.holdout, info), seed_for(options.seed, Purpose.SPLIT))
        self.rows = self.split.train_rows
        self.ids = None if info["dense_ids"] and not self.split.held_out_rows else self._train_ids
        """Makes the ids of the training pairs, in their order; None where they count from 0."""
        self.begins_epoch = self.ends_epoch = False
        """The place in its epoch of the batch that was given last."""
        self._loader: Loader | None = None
        self._table: EmbeddingStore | None = None

    # ---- Batches ----

    def begin(self, batch_size: int, table: EmbeddingStore | None = None) -> None:
        """Opens the loader. table: that of the pairs' conditions, which are read ahead. Errors: those of Loader.open()."""
        options = self._options
        self._table = table
        self._loader = Loader.open(
            self._governor, self.features, batch_rows=batch_size, queue_bytes=options.queue_bytes, seed=self.order_seed,
            loader_threads=options.loader_threads, columns=COLUMNS, drop_last=options.drop_last, split=self.split,
            device=None if self.device == "cpu" else self.device)

    @property
    def loader(self) -> Loader:
        """The loader that begin() opened."""
        assert self._loader is not None
        return self._loader

    @property
    def place(self) -> tuple[int, int, int]:
        """The place after the last batch: epoch, position; 0."""
        return self.loader.state.epoch, self.loader.state.position, 0

    def seek(self, place: tuple[int, int, int]) -> None:
        """Goes to a place."""
        self.loader.seek(LoaderState(self.order_seed, place[0], place[1]))

    def __len__(self) -> int:
        return len(self.loader)

    def __iter__(self) -> Iterator[tuple[Any, ...]]:
        for batch in self.loader:
            if self._table is not None:
                self._table.begin_epoch(batch.epoch)
                self._table.prefetch(self.loader.upcoming_ids())
            self.begins_epoch, self.ends_epoch = batch.position == 0, batch.ends_epoch
            yield self._tensors(batch)

    def _tensors(self, batch: Batch) -> tuple[Any, ...]:
        image, text = (batch.tensor(name).float() for name in COLUMNS)
        return (image, text, torch.from_numpy(batch.ids).to(self.device), torch.from_numpy(batch.groups).to(self.device), batch.epoch)

    def first(self, rows: int) -> tuple[Any, ...]:
        """Returns a batch of the first `rows` training pairs, as large as any of so many rows."""
        ids = self.split.train_ids(np.arange(rows))
        groups = torch.from_numpy(self.split.groups_of(ids)).to(self.device)
        return (*self.read(ids), torch.from_numpy(ids).to(self.device), groups, 0)

    # ---- Pairs by id ----

    def read(self, ids: np.ndarray, columns: tuple[str, ...] = COLUMNS) -> list[torch.Tensor]:
        """Reads columns of pairs as float32."""
        found = self.features.read(ids, columns)
        return [found.tensor(name).float().to(self.device) for name in columns]

    def held_out(self, most: int) -> Held:
        """Returns held-out pairs, at most so many."""
        ids = self.split.held_out_ids(np.arange(min(most, self.split.held_out_rows)))
        return Held(ids, self.split.groups_of(ids))

    def sampled(self, count: int) -> np.ndarray:
        """Returns the ids of training pairs that lie evenly spaced, at most `count`."""
        count = min(count, self.rows)
        ranks = np.arange(count)
        return self.split.train_ids(ranks if count == self.rows else (ranks.astype(float) * float(self.rows) / float(count)).astype(np.int64))

    def shuffled(self, begin: int, end: int) -> np.ndarray:
        """Returns the ids at these positions of the first epoch's order."""
        return self.split.train_ids(SampleOrder(self.rows, self.order_seed, 0).at(np.arange(begin, end)))

    def _train_ids(self) -> np.ndarray:
        with tempfile.TemporaryFile(dir=self._options.out) as file:  # Some at a time, as there may be more than fit into memory.
            for begin in range(0, self.rows, _AT_ONCE):
                file.write(self.split.train_ids(np.arange(begin, min(begin + _AT_ONCE, self.rows))).tobytes())
            file.flush()
            return np.memmap(file, np.int64, "r")

    def close(self) -> None:
        """Closes loader, split and store."""
        if self._loader is not None:
            self._loader.close()
        self.split.close()
        self.features.close()


def _held_out_groups(asked: int, info: dict[str, Any]) -> int:
    """Returns how many groups are held out: `asked`, or 5,000 pairs' worth, at most a fifth."""
    groups, rows = int(info.get("groups") or info["rows"]), int(info["rows"])
    return asked if asked >= 0 else min(-(-_HELD_OUT_PAIRS * groups // max(rows, 1)), groups // 5)


def _width(data: str, columns: dict[str, tuple[str, tuple[int, ...]]], name: str) -> int:
    if name not in columns:
        raise ValueError(f"{data}: no column {name!r}; write it with plimsoll import cosir")
    dtype, shape = columns[name]
    if dtype not in _REAL or len(shape) != 1:
        raise ValueError(f"{data}: column {name!r} is {dtype} with {len(shape)} dimensions; cosir wants one vector of floats per pair; "
                         "write it with plimsoll import cosir")
    return shape[0]


def _size_of(folder: str) -> int:
    with contextlib.suppress(FileNotFoundError), os.scandir(folder) as files:
        return sum(one.stat().st_size for one in files if one.is_file())
    return 0
