# SPDX-License-Identifier: Apache-2.0
"""FeatureStore and FeatureWriter: read-only named columns per id, on disk, in a fixed slab.

Threads: reads of one FeatureStore run side by side; a FeatureWriter's calls queue up.
"""
from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from . import _core
from ._arrays import Buffer, Columns, as_bytes, byte_size, contiguous, ids_in, not_pickled, unique_names
from ._core import FeaturePlan
from ._memory import Governor


class FeatureStore:
    """Named columns per id, interleaved on disk, read by batch within a fixed slab.

        items = plimsoll.FeatureStore.open(governor, "items", cache_bytes="512MiB")
        batch = items.read(ids)          # {"image": float32 [n, 512], …}
        x = batch.tensor("image")        # The same bytes as a torch tensor.
    """

    def __init__(self, governor: Governor, store: _core.FeatureStore, directory: str) -> None:
        """For open()."""
        self._governor = governor
        self._core = store
        self.directory = directory
        self._columns: dict[str, tuple[str, tuple[int, ...]]] = store.columns
        self._rows = store.rows
        governor._adopt(self)

    __reduce_ex__ = not_pickled

    @classmethod
    def open(cls, governor: Governor, directory: str | os.PathLike[str], *,
             cache_bytes: int | str = 0, io_threads: int = 4,
             join_gap_bytes: int | str = 0) -> FeatureStore:
        """Opens the store in `directory`.

        join_gap_bytes: records wanted at once that stand so near on disk are read together, and what is
                  between them too: fewer reads, more bytes. For disks that are slow to start a read.

        Units:  cache_bytes is the slab, in bytes or as "512MiB"; 0 is 32 MiB or the floor.
                join_gap_bytes is such a size too.
        Errors: NotFoundError, CorruptError (truncated or altered files, named), BudgetExceeded.
        """
        path = os.fspath(directory)
        core = _core.FeatureStore.open(governor._core, path, byte_size(cache_bytes, "cache_bytes"), io_threads,
                                       byte_size(join_gap_bytes, "join_gap_bytes"))
        return cls(governor, core, path)

    @property
    def rows(self) -> int:
        """Records in the store."""
        return self._rows

    @property
    def columns(self) -> dict[str, tuple[str, tuple[int, ...]]]:
        """Name → (dtype, shape of one record)."""
        return dict(self._columns)

    def read(self, ids: Any, columns: Sequence[str] | None = None) -> Columns:
        """Copies records out, in request order: a dict of NumPy arrays with `.tensor(name)`.

        Shape:  ids is int64 [n], duplicates allowed; each array is [n, shape of its column…].
        Errors: NotFoundError naming the first unknown id or column; BudgetExceeded; CorruptError;
                OSError.
        """
        wanted = ids_in(ids)
        buffers = self._buffers(self._chosen(columns), len(wanted))
        self._core.read(wanted, [self._core.column(name) for name in buffers],
                        [as_bytes(buffer.array) for buffer in buffers.values()])
        return Columns(wanted.copy(), buffers)

    def ids(self, ordinals: Any = None) -> np.ndarray:
        """Ids by ordinal (the position at which a record was appended); all of them when None.

        Shape:  int64 [n]. Errors: ValueError for an ordinal out of range; OSError.
        """
        wanted = (np.arange(self.rows, dtype=np.int64) if ordinals is None
                  else ids_in(ordinals, "ordinals"))
        out = np.empty(len(wanted), np.int64)
        self._core.ids_of(wanted, out)
        return out

    def info(self) -> dict[str, Any]:
        """What the store holds, as plimsoll.info(): rows, columns, bytes, groups, compression, …"""
        return json.loads(_core.describe(self.directory))

    def plan(self) -> FeaturePlan:
        """How the slab is divided, in bytes; the parts add up to total_bytes."""
        return self._core.plan()

    def stats(self) -> dict[str, int | float]:
        """Counters since open: requests, hits, hit_rate, stall_ns, …; bytes_read is what came from
        the disk in so many reads, bytes_delivered what callers were given.
        """
        return self._core.stats()

    def verify(self) -> None:
        """Reads every block and compares checksums. Errors: CorruptError; OSError."""
        _core.feature_verify(self.directory)

    def close(self) -> None:
        """Returns the slab, once loaders that read from this store are closed as well."""
        self._core.close()

    def _chosen(self, columns: Sequence[str] | None) -> list[str]:
        return list(self._columns) if columns is None else unique_names(columns, "columns")

    def _buffers(self, names: list[str], rows: int) -> dict[str, Buffer]:
        buffers = {}
        for name in names:
            self._core.column(name)  # NotFoundError names the columns there are.
            dtype, shape = self._columns[name]
            buffers[name] = Buffer(self._governor, (rows, *shape), dtype)
        return buffers

    def __len__(self) -> int:
        return self.rows

    def __enter__(self) -> FeatureStore:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"<FeatureStore {self.directory}: {self.rows} records of {', '.join(self.columns)}>"


class FeatureWriter:
    """Builds a FeatureStore, streaming. The store appears, complete and synced, at finish().

        with plimsoll.FeatureWriter(governor, "items", {"image": ("float32", (512,))}) as writer:
            for ids, images in chunks:
                writer.append(ids, image=images)

    Leaving the block normally calls finish(); leaving it by an exception removes what was written.
    """

    def __init__(self, governor: Governor, directory: str | os.PathLike[str],
                 columns: Mapping[str, tuple[str, Sequence[int]]], *, grouped: bool = False,
                 allow_non_finite: bool = False, compression: str = "none") -> None:
        """Starts a store in `directory`, which must not exist or be empty.

        columns:          name → (dtype, shape of one record); at most 64 names `[a-z][a-z0-9_]*`.
        grouped:          append() is given group ids; a group's records are consecutive.
        allow_non_finite: accepts NaN and infinity.
        compression:      "lz4" compresses each block of records that shrinks by an eighth; "none".

        Errors: ValueError; BudgetExceeded; OSError.
        """
        self._columns = {name: (dtype, tuple(int(n) for n in shape))
                         for name, (dtype, shape) in columns.items()}
        self._grouped = grouped
        self._core = _core.FeatureWriter.create(
            governor._core, os.fspath(directory), list(self._columns),
            [dtype for dtype, _ in self._columns.values()],
            [list(shape) for _, shape in self._columns.values()], grouped, allow_non_finite,
            compression)
        governor._adopt(self)

    __reduce_ex__ = not_pickled

    def append(self, ids: Any, columns: Mapping[str, Any] | None = None, *, groups: Any = None,
               **named: Any) -> None:
        """Appends records; columns by keyword or in one mapping.

        Shape:  ids is int64 [n]; each column [n, its shape…] of its dtype; groups is int64 [n].
        Errors: ValueError naming the record, id and column (dtype, shape, NaN or infinity); OSError
                (disk full). After an error every later call repeats it.
        """
        given = {**(columns or {}), **named}
        missing = [name for name in self._columns if name not in given]
        unknown = [name for name in given if name not in self._columns]
        if missing or unknown:
            raise ValueError(f"columns: missing {missing}, unknown {unknown}; "
                             f"the store has {list(self._columns)}")
        if self._grouped != (groups is not None):
            raise ValueError("groups: give them with every append() exactly when grouped=True")
        wanted = ids_in(ids)
        arrays = [as_bytes(contiguous(given[name], name, dtype, (len(wanted), *shape)))
                  for name, (dtype, shape) in self._columns.items()]
        group_ids = None if groups is None else ids_in(groups, "groups")
        self._core.append(wanted, arrays, group_ids)

    def finish(self) -> None:
        """Writes the index, syncs, and lets the store appear.

        Errors: ValueError for a duplicate id or a group that returns, naming it; OSError.
        """
        self._core.finish()
        self._core.close()

    @property
    def rows(self) -> int:
        """Records appended so far."""
        return self._core.rows

    def close(self) -> None:
        """Ends the writer; without finish() it removes what it wrote."""
        self._core.close()

    def __enter__(self) -> FeatureWriter:
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        if kind is None:
            self.finish()
        else:
            self.close()
