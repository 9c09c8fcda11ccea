# SPDX-License-Identifier: Apache-2.0
"""FeatureStore and FeatureWriter: read-only named columns per id, on disk, read through a slab of fixed size.

Threads: reads of one FeatureStore run in parallel; a FeatureWriter's calls run one at a time.
"""
from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from .. import _core
from .._core import FeaturePlan
from ..core._arrays import _NUMPY_NAME, as_bytes, byte_size, contiguous, ids_in, not_pickled, unique_names
from ..memory._buffers import Buffer, Columns
from ..memory._memory import Governor


class FeatureStore:
    """A store of records on disk: named columns per id, read in batches through a slab of fixed size.

        items = plimsoll.FeatureStore.open(governor, "items", cache_bytes="512MiB")
        batch = items.read(ids)          # {"image": float32 [n, 512], …}
        x = batch.tensor("image")        # The same bytes as a torch tensor.
    """

    def __init__(self, governor: Governor, store: _core.FeatureStore, directory: str) -> None:
        """Takes what open() made; call open() instead."""
        self._governor = governor
        self._core = store
        self.directory = directory
        self._columns: dict[str, tuple[str, tuple[int, ...]]] = store.columns
        self._ragged = store.ragged
        self._rows = store.rows
        governor._adopt(self)

    __reduce_ex__ = not_pickled

    @classmethod
    def open(cls, governor: Governor, directory: str | os.PathLike[str], *,
             cache_bytes: int | str = 0, io_threads: int = 4,
             join_gap_bytes: int | str = 0, parts: int = 0) -> FeatureStore:
        """Opens the store in `directory`. Records added later (FeatureWriter.extend) are visible after it is opened again.

        join_gap_bytes: records of one batch that are at most this far apart on disk are read in one go, with the bytes
                  between them: fewer reads, more bytes. It helps on disks that are slow to start a read.
        parts:    reads only the first `parts` parts, as the store was before it was extended; 0: all.

        Units:  cache_bytes is the size of the slab, in bytes or as "512MiB"; 0 is 32 MiB, or the least that works.
                join_gap_bytes is a size, too.
        Errors: NotFoundError, CorruptError (truncated or altered files, named), BudgetExceeded.
        """
        path = os.fspath(directory)
        core = _core.FeatureStore.open(governor._core, path, byte_size(cache_bytes, "cache_bytes"), io_threads,
                                       byte_size(join_gap_bytes, "join_gap_bytes"), parts)
        return cls(governor, core, path)

    @property
    def rows(self) -> int:
        """Number of records in the store."""
        return self._rows

    @property
    def parts(self) -> int:
        """The number of parts read: 1, plus one for each extension of the store before it was opened."""
        return self._core.parts

    @property
    def columns(self) -> dict[str, tuple[str, tuple[int, ...]]]:
        """Column name → (dtype, shape). The shape is that of one record, or of one element if the column is ragged."""
        return dict(self._columns)

    @property
    def ragged(self) -> dict[str, int]:
        """Ragged columns: name → the most elements that a record may have."""
        return dict(self._ragged)

    def read(self, ids: Any, columns: Sequence[str] | None = None) -> Columns:
        """Returns copies of the records, in request order: a dict of NumPy arrays with `.tensor(name)`.

        Shape:  ids is int64 [n], duplicates allowed; each array is [n, shape of its column…]. A ragged column's array is
                [elements of all records, shape of one…], with `.offsets[name]`, int64 [n + 1]. It has at most n times
                the column's longest record, and its memory is leased.
        Errors: NotFoundError naming the first unknown id or column; BudgetExceeded; CorruptError;
                OSError.
        """
        wanted = ids_in(ids)
        names = self._chosen(columns)
        if not any(name in self._ragged for name in names):
            buffers = self._buffers(names, len(wanted))
            self._core.read(wanted, [self._core.column(name) for name in buffers],
                            [as_bytes(buffer.array) for buffer in buffers.values()])
            return Columns(wanted.copy(), buffers)
        ordinals = np.empty(len(wanted), np.int64)
        self._core.ordinals_of(wanted, ordinals)
        offsets = {name: self._offsets(name, ordinals) for name in names if name in self._ragged}
        buffers = self._buffers(names, len(wanted), {name: int(one[-1]) for name, one in offsets.items()})
        self._core.read_ordinals(ordinals, [self._core.column(name) for name in buffers],
                                 [as_bytes(buffer.array) for buffer in buffers.values()])
        return Columns(wanted.copy(), buffers, offsets)

    def lengths(self, ids: Any, column: str) -> np.ndarray:
        """Returns the number of elements that each record has in a ragged column, in request order. Reads no record.

        Shape:  ids int64 [n] → int64 [n]. Errors: NotFoundError; ValueError for a column of fixed shape; OSError.
        """
        wanted = ids_in(ids)
        ordinals = np.empty(len(wanted), np.int64)
        self._core.ordinals_of(wanted, ordinals)
        return np.diff(self._offsets(column, ordinals))

    def find(self, ids: Any) -> np.ndarray:
        """Returns the ordinal of each id, or −1 where the store lacks it.

        Shape:  ids int64 [n] → int64 [n]. Errors: CorruptError; OSError.
        """
        wanted = ids_in(ids)
        out = np.empty(len(wanted), np.int64)
        self._core.find(wanted, out)
        return out

    def ids(self, ordinals: Any = None) -> np.ndarray:
        """Returns the ids at these ordinals (a record's ordinal is its position when appended); all ids when None.

        Shape:  int64 [n]. Errors: ValueError for an ordinal out of range; OSError.
        """
        wanted = (np.arange(self.rows, dtype=np.int64) if ordinals is None
                  else ids_in(ordinals, "ordinals"))
        out = np.empty(len(wanted), np.int64)
        self._core.ids_of(wanted, out)
        return out

    def info(self) -> dict[str, Any]:
        """Describes the store as plimsoll.info() does: rows, columns, bytes, groups, parts, compression, …"""
        return json.loads(self._core.describe(self.directory))

    def plan(self) -> FeaturePlan:
        """Returns the division of the slab in bytes; the shares add up to total_bytes."""
        return self._core.plan()

    def stats(self) -> dict[str, int | float]:
        """Returns the counters since open(): requests, hits, hit_rate, stall_ns, …

        bytes_read counts the bytes read from the disk, bytes_delivered those returned to callers.
        """
        return self._core.stats()

    def verify(self) -> None:
        """Reads every block and compares checksums. Errors: CorruptError; OSError."""
        _core.feature_verify(self.directory)

    def close(self) -> None:
        """Frees the slab, once the loaders that read from this store are closed as well."""
        self._core.close()

    def _chosen(self, columns: Sequence[str] | None) -> list[str]:
        return list(self._columns) if columns is None else unique_names(columns, "columns")

    def _buffers(self, names: list[str], rows: int, elements: Mapping[str, int] = {}) -> dict[str, Buffer]:
        buffers = {}
        for name in names:
            self._core.column(name)  # Raises NotFoundError, which names the store's columns.
            dtype, shape = self._columns[name]
            buffers[name] = Buffer(self._governor, (elements.get(name, rows), *shape), dtype)
        return buffers

    def _offsets(self, name: str, ordinals: np.ndarray) -> np.ndarray:
        """Returns the offset of each record's first element in the joined array, and the end: int64 [n + 1]."""
        offsets = np.zeros(len(ordinals) + 1, np.int64)
        self._core.lengths(ordinals, self._core.column(name), offsets[1:])
        return np.cumsum(offsets, out=offsets)

    def __len__(self) -> int:
        return self.rows

    def __enter__(self) -> FeatureStore:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"<FeatureStore {self.directory}: {self.rows} records of {', '.join(self.columns)}>"


class FeatureWriter:
    """A writer of a new FeatureStore, or of more records for one. They appear at finish(), complete and synced.

        with plimsoll.FeatureWriter(governor, "items", {"image": ("float32", (512,))}) as writer:
            for ids, images in chunks:
                writer.append(ids, image=images)
        with plimsoll.FeatureWriter.extend(governor, "items") as writer:
            writer.append(new_ids, image=new_images)

    Leaving the block normally calls finish(). Leaving it by an exception removes the records written so far.
    """

    def __init__(self, governor: Governor, directory: str | os.PathLike[str],
                 columns: Mapping[str, tuple[str, Sequence[int]]], *, ragged: Mapping[str, int] | None = None,
                 grouped: bool = False, allow_non_finite: bool = False, compression: str = "none") -> None:
        """Starts a store in `directory`, which must be empty or not exist.

        columns:          name → (dtype, shape of one record); at most 64 names `[a-z][a-z0-9_]*`.
        ragged:           columns whose records vary in their number of elements: name → the most that one record has.
                          Their shape in `columns` is that of one element.
        grouped:          append() takes group ids; a group's records are consecutive.
        allow_non_finite: accepts NaN and infinity.
        compression:      "lz4" compresses each block of records that shrinks by an eighth; "none".

        Errors: ValueError; BudgetExceeded; OSError.
        """
        self._columns = {name: (dtype, tuple(int(n) for n in shape))
                         for name, (dtype, shape) in columns.items()}
        self._ragged = dict(ragged or {})
        unknown = [name for name in self._ragged if name not in self._columns]
        if unknown or any(most < 1 for most in self._ragged.values()):
            raise ValueError(f"ragged: {self._ragged} must give columns of {list(self._columns)} a longest record of 1 "
                             "element or more")
        self._grouped = grouped
        self._core = _core.FeatureWriter.create(
            governor._core, os.fspath(directory), list(self._columns),
            [dtype for dtype, _ in self._columns.values()],
            [list(shape) for _, shape in self._columns.values()],
            [self._ragged.get(name, 0) for name in self._columns], grouped, allow_non_finite, compression)
        governor._adopt(self)

    __reduce_ex__ = not_pickled

    @classmethod
    def extend(cls, governor: Governor, directory: str | os.PathLike[str], *,
               allow_non_finite: bool = False) -> FeatureWriter:
        """Adds records to the store in `directory`, without rewriting any of it.

        The new records become one part; a store has at most 64, and `plimsoll store compact` joins them into one.
        Columns, grouping and compression are the store's. A group cannot continue from one part into the next. Stores
        that are open do not see the new records. Ids that the store already has are refused.

        Errors: NotFoundError; CorruptError; ValueError (another process adds to it, or it has 64 parts);
                BudgetExceeded; OSError.
        """
        writer = cls.__new__(cls)
        writer._core = _core.FeatureWriter.extend(governor._core, os.fspath(directory), allow_non_finite)
        writer._columns = writer._core.columns
        writer._ragged = writer._core.ragged
        writer._grouped = writer._core.grouped
        governor._adopt(writer)
        return writer

    def append(self, ids: Any, columns: Mapping[str, Any] | None = None, *, groups: Any = None,
               **named: Any) -> None:
        """Appends records. Columns are given by keyword or in one mapping.

        Shape:  ids is int64 [n]; each column [n, its shape…] of its dtype; groups is int64 [n]. A ragged column is a
                list of n arrays [its elements, its shape…], or a tuple (elements of all records, offsets int64
                [n + 1]) such as read() gives.
        Errors: ValueError naming the record, id and column (dtype, shape, NaN or infinity), or an id that the store
                already has; OSError (disk full). After an error every later call raises it again.
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
        arrays, lengths = [], []
        for name, (dtype, shape) in self._columns.items():
            if name in self._ragged:
                elements, of_records = _jagged(given[name], name, dtype, shape, len(wanted))
                lengths.append(of_records)
            else:
                elements = contiguous(given[name], name, dtype, (len(wanted), *shape))
            arrays.append(as_bytes(elements))
        group_ids = None if groups is None else ids_in(groups, "groups")
        self._core.append(wanted, arrays, group_ids, lengths)

    def finish(self) -> None:
        """Writes the index, syncs, and makes the store visible.

        Errors: ValueError naming a duplicate id, or a group whose records are not consecutive; OSError.
        """
        self._core.finish()
        self._core.close()

    @property
    def columns(self) -> dict[str, tuple[str, tuple[int, ...]]]:
        """Name → (dtype, shape of one record)."""
        return dict(self._columns)

    @property
    def grouped(self) -> bool:
        """Whether append() takes group ids."""
        return self._grouped

    @property
    def rows(self) -> int:
        """Number of records that this writer has appended so far."""
        return self._core.rows

    def close(self) -> None:
        """Ends the writer. Without finish() it removes the records it wrote."""
        self._core.close()

    def __enter__(self) -> FeatureWriter:
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        if kind is None:
            self.finish()
        else:
            self.close()


def _jagged(value: Any, name: str, dtype: str, shape: tuple[int, ...], records: int) -> tuple[np.ndarray, np.ndarray]:
    """Returns (the elements of all records, the number that each has). Errors: ValueError naming the column."""
    if isinstance(value, tuple) and len(value) == 2:
        elements = contiguous(value[0], name, dtype, (None, *shape))
        offsets = contiguous(value[1], f"{name}: offsets", "int64", (records + 1,))
        if offsets[0] != 0 or offsets[-1] != len(elements):
            raise ValueError(f"{name}: offsets go from {offsets[0]} to {offsets[-1]} where there are {len(elements)} "
                             "elements")
        return elements, np.diff(offsets)
    if not isinstance(value, list) or len(value) != records:
        raise ValueError(f"{name}: {records} records want a list of {records} arrays, or a tuple of elements and offsets")
    each = [contiguous(one, f"{name}[{i}]", dtype, (None, *shape)) for i, one in enumerate(value)]
    lengths = np.array([len(one) for one in each], np.int64)
    return (np.concatenate(each) if each else np.empty((0, *shape), np.dtype(_NUMPY_NAME.get(dtype, dtype)))), lengths
