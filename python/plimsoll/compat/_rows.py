# SPDX-License-Identifier: Apache-2.0
"""ManagedRows: the private base of TrainableEmbeddingManager: opening, ids, rows in and out, syncing.

Threads: every method but _parse and _rows_in wants the manager's lock.
Memory:  see _embeddings.py.
"""
from __future__ import annotations

import pathlib
import threading
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import numpy as np

from ..core._arrays import _to_numpy
from ..core._folders import make_folders
from ..errors import NotFoundError
from ..memory._buffers import Buffer
from ..memory._memory import Governor
from . import _copies, _ids, _initial, _reports
from ._files import chunk_files, read_chunk, read_json, replace_json
from ._table import BATCH_ROWS, WHOLE_TABLE, Table, native_init

if TYPE_CHECKING:
    from ._live import LiveRows

RECORD = "compat.json"
_PIECE = 4096
_MIB = 1 << 20
_WARM_BYTES = 64 * _MIB  # A table up to this, if the slab holds it, is in memory from the start.


class ManagedRows:
    """The private base of TrainableEmbeddingManager, whose constructor sets these attributes."""

    embeddings_dir: pathlib.Path
    embedding_dim: int
    initialization_strategy: str
    storage_mode: str
    feature_manager: Any
    chunk_size: int
    auto_sync: bool
    sync_batch_size: int
    cache_l1_size_mb: float
    cache_l2_size_mb: float
    seed: int
    factor: float
    device: Any
    rows: int
    _governor: Governor
    _lock: threading.RLock
    _torch: Any
    _moved: bool
    _table: Table
    _live: LiveRows | None
    _frozen: np.ndarray | None
    _all_frozen: bool
    _chunk_of: np.ndarray | None  # By position, where chunks are the features' chunks.
    _dirty: np.ndarray  # By chunk: whether rows of it are not synced.
    _record: dict[str, Any]

    # ---- Opening ----------------------------------------------------------------------------

    def _open(self, ids: np.ndarray, names: list[str] | None, chunk_size: int) -> None:
        folder = self.embeddings_dir
        make_folders(folder)
        ascending = ids if np.all(ids[:-1] < ids[1:]) else np.sort(ids)
        wanted = {"ids": _ids.fingerprint([ascending], names is not None),
                  "dim": self.embedding_dim, "strategy": self.initialization_strategy,
                  "seed": self.seed, "factor": self.factor}
        there = read_json(folder / RECORD)
        made = there is None
        if there is None:
            self._ids = _ids.IdMap.make(folder, ids, names)
            self._record = {**wanted, "format": 1, "rows": len(ids), "named": names is not None,
                            "table_strategy": self.initialization_strategy, "ready": False}
            replace_json(folder / RECORD, self._record)
        else:
            _copies.compare_record(folder, there, wanted, tuple(wanted))
            self._record = there
            self._ids = _ids.IdMap(folder, len(ids), names is not None)
            if not self._ids.same_order(ids):
                self._ids = _ids.IdMap.make(folder, ids, names)
        self.rows = self._ids.rows
        dense = self._ids.dense and not (folder / "table").exists()
        init = native_init(self._record["table_strategy"], self.embedding_dim, self.seed)
        self._table = Table(self._governor, folder / "table", self.embedding_dim, init,
                            None if dense or not made else ids, self.rows, self._slab_wanted(),
                            "raise cache_l1_size_mb + cache_l2_size_mb"
                            if self.storage_mode == "disk" else
                            "use storage_mode='disk', or raise the governor's limit")
        self.chunk_size = min(chunk_size, self.rows)
        self._set_chunks()
        if not self._record["ready"]:
            self._first_rows()
            self._dirty[:] = False
        self._table.warm(self._ids.slice,
                         WHOLE_TABLE if self.storage_mode == "memory" else _WARM_BYTES)

    def _slab_wanted(self) -> int:
        if self.storage_mode == "memory":
            return WHOLE_TABLE
        return int((self.cache_l1_size_mb + self.cache_l2_size_mb) * _MIB)

    # Rows of a new table, all of them durable before it counts as ready: a crash begins again.
    def _first_rows(self) -> None:
        files = chunk_files(self.embeddings_dir)
        if files:
            self._import(files)
        elif _initial.needs_features(self.initialization_strategy):
            self._from_features(self.initialization_strategy, self.factor)
        if files or _initial.needs_features(self.initialization_strategy):
            self._table.commit()  # Other rows are computed when they are first asked for.
        self._record["ready"] = True
        replace_json(self.embeddings_dir / RECORD, self._record)

    # Takes over the original's chunk files: everything is checked before a row changes.
    def _import(self, files: list[pathlib.Path]) -> None:
        seen = np.zeros((self.rows + 7) // 8, np.uint8)
        for _, _, positions in self._chunk_rows(files):
            np.bitwise_or.at(seen, positions >> 3, (1 << (positions & 7)).astype(np.uint8))
        for begin in range(0, self.rows, _PIECE):
            at = np.arange(begin, min(begin + _PIECE, self.rows))
            absent = np.flatnonzero((seen[at >> 3] >> (at & 7)) & 1 == 0)
            if len(absent):
                one = self._ids.given(at[absent[:1]])[0]
                raise ValueError(f"{files[0].parent}: no chunk file holds sample {one!r}, "
                                 "which is in sample_ids")
        for ids, values, _ in self._chunk_rows(files):
            self._store_rows(ids, values)

    def _chunk_rows(self, files: list[pathlib.Path]) -> Iterator[tuple[Any, Any, Any]]:
        for path in files:
            given, values = read_chunk(path, self.embedding_dim)
            try:
                ids = self._parse(given)
                yield ids, values, self._ids.positions(ids)
            except (NotFoundError, ValueError) as error:
                raise ValueError(f"{path}: {error}; it belongs to other sample_ids") from None

    def _from_features(self, strategy: str, factor: float) -> None:
        if self.feature_manager is None:
            raise ValueError(f"initialization_strategy: {strategy!r} needs feature_manager")

        def blocks() -> Iterator[np.ndarray]:
            for piece in self._ids.ascending():
                for at in range(0, len(piece), _initial.BLOCK):
                    yield piece[at:at + _initial.BLOCK]

        def read(ids: np.ndarray, names: list[str]) -> dict[str, Any]:
            wanted = self._ids.given(self._ids.positions(ids)) if self._ids.named else ids
            return self.feature_manager.get_features(wanted, names)

        for ids, values in _initial.from_features(strategy, self.embedding_dim, self.seed, factor,
                                                  blocks, read):
            self._store_rows(ids, values)

    def _set_chunks(self) -> None:
        features = self.feature_manager
        self._chunk_of = None
        self.num_chunks = -(-self.rows // self.chunk_size)
        if features is not None and hasattr(features, "fingerprint") and (
                features.fingerprint() == self._record["ids"]):
            self.num_chunks = features.get_num_chunks()
            self._chunk_of = np.empty(self.rows, np.uint32)
            for chunk in range(self.num_chunks):
                self._chunk_of[self._ids.positions(features.chunk_ids(chunk))] = chunk
        self._dirty = np.zeros(self.num_chunks, bool)

    # ---- Arguments and results --------------------------------------------------------------

    def _parse(self, sample_ids: Any) -> np.ndarray:
        ids, names = _ids.parse(sample_ids)
        if (names is not None) != self._ids.named and len(ids):
            kind = "strings" if self._ids.named else "integers"
            raise ValueError(f"sample_ids: this manager's ids are {kind}")
        return ids

    def _rows_in(self, embeddings: Any, count: int) -> np.ndarray:
        if hasattr(embeddings, "detach"):
            embeddings = embeddings.detach()
            if embeddings.device.type != "cpu":
                embeddings = embeddings.cpu()
            if embeddings.dtype != self._torch.float32 and embeddings.is_floating_point():
                embeddings = embeddings.float()
            embeddings = embeddings.numpy()
        elif not isinstance(embeddings, np.ndarray):
            embeddings = (np.asarray(embeddings, np.float32) if isinstance(embeddings, (list, tuple))
                          else _to_numpy(embeddings, "embeddings"))
        if embeddings.dtype != np.float32:
            if embeddings.dtype.kind != "f":
                raise ValueError(f"embeddings: {embeddings.dtype} where floats are needed")
            embeddings = embeddings.astype(np.float32)
        if embeddings.shape != (count, self.embedding_dim):
            raise ValueError(f"embeddings: shape {tuple(embeddings.shape)} where "
                             f"({count}, {self.embedding_dim}) is needed")
        return embeddings if embeddings.flags.c_contiguous else np.ascontiguousarray(embeddings)

    def _buffer(self, rows: int) -> Buffer:
        return Buffer(self._governor, (rows, self.embedding_dim), "float32")

    def _out(self, buffer: Buffer) -> Any:
        if self._torch is None:
            return buffer.array
        return buffer.tensor.to(self.device) if self._moved else buffer.tensor

    def _here(self) -> threading.RLock:
        self._table.check_process()
        if self._table.evicted():
            _reports.say_eviction()
        return self._lock

    def _unknown(self, error: NotFoundError, ids: np.ndarray) -> NotFoundError:
        """Returns the table's error with the names the caller asked for; the table knows only their hashes."""
        try:
            self._ids.positions(ids)
        except NotFoundError as named:
            return named
        return error

    # ---- Rows out ---------------------------------------------------------------------------

    def _gather(self, ids: np.ndarray) -> Buffer:
        buffer = self._buffer(len(ids))
        try:
            self._table.gather(ids, buffer.array)
        except NotFoundError as error:
            raise self._unknown(error, ids) from None
        if self._live is not None:
            self._live.overlay(ids, buffer.array, self._is_frozen(ids))
        return buffer

    # The same for a list of ints, with no array in between; None when it is something else.
    def _gather_listed(self, ids: list[Any]) -> Buffer | None:
        if self._ids.named or self._live is not None:
            return None
        buffer = self._buffer(len(ids))
        return (buffer if self._table.gather_listed(ids, buffer.address,
                                                    len(ids) * self.embedding_dim) else None)

    # Every row, as (position, ids, rows), in pieces that the caller may keep.
    def _pieces(self) -> Iterator[tuple[int, np.ndarray, np.ndarray]]:
        self._absorb()
        for begin in range(0, self.rows, _PIECE):
            ids = self._ids.slice(begin, min(begin + _PIECE, self.rows))
            rows = np.empty((len(ids), self.embedding_dim), np.float32)
            with self._table.uncounted():
                self._table.gather(ids, rows)
            yield begin, ids, rows

    # ---- Rows in ----------------------------------------------------------------------------

    def _update(self, ids: np.ndarray, rows: np.ndarray) -> None:
        self._store_rows(ids, rows, counted=True)
        self._updated()

    # The same for a list of ints and a plain tensor, and nothing frozen or kept elsewhere as well;
    # False, and nothing done, when it is something else.
    def _update_listed(self, ids: list[Any], rows: Any) -> bool:
        torch = self._torch
        if (torch is None or type(rows) is not torch.Tensor or rows.dtype is not torch.float32
                or not rows.is_cpu or rows.layout is not torch.strided or rows.is_neg()
                or not rows.is_contiguous() or rows.shape != (len(ids), self.embedding_dim)
                or len(ids) > BATCH_ROWS or not self._ids.dense or self._chunk_of is not None
                or self._ids.named):
            return False
        with self._here():
            if self._live is not None or self._all_frozen or self._frozen is not None:
                return False
            if not self._table.update_listed(ids, rows.data_ptr(), rows.numel(), self._dirty,
                                             self.chunk_size):
                return False
            self._updated()
        return True

    def _updated(self) -> None:
        self._table.unsynced += 1
        if self.auto_sync and self._table.unsynced >= self.sync_batch_size:
            self._sync()

    # Writes what is not frozen and notes which chunks it belongs to. The table looks every id up
    # before it changes a row, when they are one batch; otherwise the map of ids does.
    def _store_rows(self, ids: np.ndarray, rows: np.ndarray, counted: bool = False) -> None:
        if len(ids) > BATCH_ROWS or self._all_frozen or self._frozen is not None:
            self._ids.positions(ids)
            if self._all_frozen:
                return
            if self._frozen is not None:
                free = ~self._is_frozen(ids)
                ids, rows = ids[free], np.ascontiguousarray(rows[free])
        if counted:
            try:
                self._table.update(ids, rows)
            except NotFoundError as error:
                raise self._unknown(error, ids) from None
        else:
            with self._table.uncounted():
                self._table.update(ids, rows)
        positions = ids if self._ids.dense else self._ids.positions(ids)
        if self._live is not None:
            self._live.put(positions, rows)
        if self._chunk_of is not None:
            self._dirty[self._chunk_of[positions]] = True
        else:
            self._dirty[positions // self.chunk_size] = True

    def _is_frozen(self, ids: np.ndarray) -> np.ndarray:
        if self._all_frozen or self._frozen is None:
            return np.full(len(ids), self._all_frozen)
        places = np.minimum(np.searchsorted(self._frozen, ids), len(self._frozen) - 1)
        return self._frozen[places] == ids

    # ---- Chunks -----------------------------------------------------------------------------

    def _chunk_ids(self, chunk_id: int) -> np.ndarray:
        if not 0 <= chunk_id < self.num_chunks:
            raise IndexError(f"chunk: {chunk_id}, but there are {self.num_chunks}")
        if self._chunk_of is not None:
            return self.feature_manager.chunk_ids(chunk_id)
        begin = chunk_id * self.chunk_size
        return self._ids.slice(begin, min(begin + self.chunk_size, self.rows))

    def _given(self, ids: np.ndarray) -> list[Any]:
        return self._ids.given(self._ids.positions(ids)) if self._ids.named else ids.tolist()

    # ---- Syncing ----------------------------------------------------------------------------

    def _sync(self) -> None:
        self._absorb()
        if self._table.unsynced:
            self._table.commit()
            self._dirty[:] = False

    # Brings what an optimizer did to the Parameter into the table.
    def _absorb(self) -> None:
        live, self._live = self._live, None
        if live is None:
            return
        try:
            changed = False
            for begin, ids, rows in self._pieces():
                new = live.rows[begin:begin + len(rows)]
                different = (new.view(np.uint32) != rows.view(np.uint32)).any(axis=1)
                held = different & self._is_frozen(ids)
                new[held] = rows[held]
                different &= ~held
                if different.any():
                    changed = True
                    self._store_rows(ids[different], np.ascontiguousarray(new[different]))
            self._table.unsynced += changed
        finally:
            self._live = live
