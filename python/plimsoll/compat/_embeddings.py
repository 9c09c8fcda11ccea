# SPDX-License-Identifier: Apache-2.0
"""TrainableEmbeddingManager: the original's class over a table that keeps its promises.

It has the constructor, methods and statistics of the class it replaces, in both storage modes.
docs/compat.md describes every call, and the intended differences.

Reading order: this file, _rows.py, _table.py (the store), _ids.py, _initial.py, _live.py, _copies.py.

Threads: calls from several threads queue up. A forked child may not use its parent's manager.
Memory:  disk mode: one slab of at most L1 + L2. Memory mode: a slab with the whole table. Both modes
         take one byte per chunk, the results of get_…, and 8 bytes per frozen row.
"""
from __future__ import annotations

import os
import pathlib
import shutil
import tempfile
import threading
import weakref
from collections.abc import Mapping
from typing import Any

import numpy as np

from ..core import _torch_gate
from ..core._arrays import _to_numpy
from ..core._folders import sync_folder
from ..memory._buffers import Buffer
from ..memory._memory import Governor
from . import _copies, _ids, _initial, _reports
from ._files import chunk_files, replace_json, write_chunk
from ._live import LiveRows
from ._neighbours import nearest, similarities, statistics
from ._rows import RECORD, ManagedRows
from ._table import Table, governor_for

_MIB = 1 << 20


def _end(table: Table, temporary: str | None) -> None:
    table.close_quietly()
    if temporary is not None:
        shutil.rmtree(temporary, ignore_errors=True)


class CacheView:
    """The original's MultiTierCache as a view of the slab, for `manager.cache`."""

    def __init__(self, manager: TrainableEmbeddingManager) -> None:
        """Makes the view of `manager`'s slab."""
        self._manager = weakref.ref(manager)

    def _owner(self) -> TrainableEmbeddingManager:
        owner = self._manager()
        if owner is None:
            raise ValueError("cache: its manager is gone")
        return owner

    def get_cache_info(self) -> dict[str, Any]:
        """Returns items and MB of L1 and L2, `stats` {hits, misses, evictions} and `hit_rate`."""
        return self._owner()._cache_info()

    def clear_cache(self) -> None:
        """Empties the cache as clear_chunk_cache() does. No update is lost."""
        self._owner().clear_chunk_cache()

    def adaptive_eviction(self) -> bool:
        """Frees 30 % of the slab under memory pressure. Returns whether it did."""
        return self._owner()._adaptive_eviction()


class TrainableEmbeddingManager(ManagedRows):
    """A table of one trainable row per sample id, on disk or in memory.

        manager = TrainableEmbeddingManager(ids, 64, storage_mode="disk", embeddings_dir="run/e")
        rows = manager.get_embeddings(batch_ids)          # float32 [n, 64], in request order
        manager.update_embeddings(batch_ids, new_rows)
        manager.force_sync_all_chunks()                   # durable once this returns

    Rows are returned as copies: torch tensors once the program has imported torch, else NumPy arrays.
    """

    def __init__(self, sample_ids: Any, embedding_dim: int, device: Any = "cpu",
                 initialization_strategy: str = "normal", storage_mode: str = "memory",
                 embeddings_dir: str | os.PathLike[str] | None = None,
                 chunk_size: int | None = None, feature_manager: Any = None,
                 auto_sync: bool = True, cache_l1_size_mb: float = 256,
                 cache_l2_size_mb: float = 512, enable_l3_cache: bool = True,
                 sync_batch_size: int = 10, *, governor: Governor | None = None, seed: int = 0,
                 factor: float = 1.0, batch_size: int | None = None,
                 verbose: bool = False) -> None:
        """Opens or makes the table in embeddings_dir. The original's chunk files there are imported.

        sample_ids:      distinct 64-bit integers, or distinct strings; any order.
        device:          the device of returned tensors.
        initialization_strategy: zeros; normal (0.01); uniform (±0.01); xavier, kaiming (a row is
                         one output of a layer with embedding_dim inputs); imgtxt, txt, img: a seeded
                         projection of the features, × factor; imgtxt_pca, txt_pca, img_pca: their
                         principal components, scaled to deviation 1, × factor; imgtxt_clusters_K, …:
                         the projection of the nearest of K centres (k-means among 8,192 samples).
        storage_mode:    "disk": at most L1 + L2 of the table are in memory; "memory": the whole
                         table. Both sync to embeddings_dir.
        embeddings_dir:  None: a temporary folder, removed with the manager.
        chunk_size:      number of samples that are read, saved and counted together. None: 4 ×
                         batch_size, or 1000 without batch_size; at most all samples.
        feature_manager: source of features. If it has the same samples, its chunks are used.
        auto_sync:       commits after every sync_batch_size updates and when the manager is closed.
        cache_l1_size_mb, cache_l2_size_mb: their sum bounds the slab, in MiB.
        enable_l3_cache: has no effect: cold rows are always in the table on disk. The original
                         dropped them without it.
        governor:        leases the slab; None: the process's governor, or a new one.
        seed:            seed of the strategy. A first row depends on (seed, id) alone, not on order.
        verbose:         prints the start-up block.

        Errors: ValueError (an argument; the table there has other samples, dim, strategy or seed);
                BudgetExceeded (the slab is refused, or too small to work); CorruptError; OSError.
        """
        _check_arguments(embedding_dim, initialization_strategy, storage_mode, chunk_size,
                         cache_l1_size_mb, cache_l2_size_mb, sync_batch_size, seed, batch_size)
        self._lock = threading.RLock()
        self._torch = _torch_gate.torch_if_imported()
        self.device = device
        self._moved = str(device) not in ("cpu", "None")
        if self._moved and self._torch is None:
            raise ValueError(f"device: {device!r} needs torch; import torch first")
        self.embedding_dim = int(embedding_dim)
        self.initialization_strategy = initialization_strategy
        self.storage_mode = storage_mode
        self.feature_manager = feature_manager
        self.auto_sync = bool(auto_sync)
        self.cache_l1_size_mb, self.cache_l2_size_mb = cache_l1_size_mb, cache_l2_size_mb
        self.enable_l3_cache = bool(enable_l3_cache)
        self.sync_batch_size = int(sync_batch_size)
        self.seed, self.factor, self.batch_size = int(seed), float(factor), batch_size
        self._governor = governor_for(governor)
        self._frozen: np.ndarray | None = None
        self._all_frozen = False
        self._live: LiveRows | None = None
        ids, names = _ids.parse(sample_ids)
        temporary = None
        if embeddings_dir is None:
            # Two levels down, so that templates (two levels up) are inside as well.
            temporary = tempfile.mkdtemp(prefix="plimsoll-")
            embeddings_dir = pathlib.Path(temporary) / "run" / "embeddings"
        self.embeddings_dir = pathlib.Path(embeddings_dir)
        self._temporary = temporary
        try:
            self._open(ids, names, chunk_size or (1000 if batch_size is None else 4 * batch_size))
        except BaseException:
            if hasattr(self, "_table"):
                self._table.commit_at_exit = False
                self._table.close_quietly()
            if temporary is not None:
                shutil.rmtree(temporary, ignore_errors=True)
            raise
        self._table.commit_at_exit = self.auto_sync and temporary is None
        self._finalizer = weakref.finalize(self, _end, self._table, temporary)
        self.cache = CacheView(self)
        if verbose:
            print(_reports.startup_block(self))

    @classmethod
    def from_preset(cls, name: str, sample_ids: Any, embedding_dim: int,
                    **changes: Any) -> TrainableEmbeddingManager:
        """Opens a manager with the settings of a preset (PRESETS) and `changes`. Errors: as the constructor."""
        return cls(sample_ids, embedding_dim, **_reports.preset(name, **changes))

    # ---- Reading ----------------------------------------------------------------------------

    def get_embeddings(self, sample_ids: Any) -> Any:
        """Returns copies of the rows of `sample_ids`, in request order. Duplicates are allowed.

        Shape:  float32 [n, embedding_dim].
        Errors: KeyError naming the first unknown id; BudgetExceeded; CorruptError; OSError.
        """
        if type(sample_ids) is list:
            with self._here():
                buffer = self._gather_listed(sample_ids)
                if buffer is not None:
                    return self._out(buffer)
        ids = self._parse(sample_ids)
        with self._here():
            return self._out(self._gather(ids))

    def get_embedding_by_index(self, idx: int) -> Any:
        """Returns the row at position `idx` of sample_ids. Shape: float32 [dim]. Errors: IndexError."""
        if not -self.rows <= idx < self.rows:
            raise IndexError(f"idx: {idx}, but there are {self.rows} samples")
        idx %= self.rows
        with self._here():
            return self._out(self._gather(self._ids.slice(idx, idx + 1)))[0]

    def get_all_embeddings(self) -> tuple[list[Any], Any]:
        """Returns (sample_ids, all rows in that order). Errors: BudgetExceeded when the rows do not fit."""
        with self._here():
            buffer = self._buffer(self.rows)
            for begin, _, rows in self._pieces():
                buffer.array[begin:begin + len(rows)] = rows
            return self.sample_ids, self._out(buffer)

    @property
    def sample_ids(self) -> list[Any]:
        """The sample ids, in the order given."""
        return self._ids.given(range(self.rows))

    @property
    def template_dir(self) -> pathlib.Path:
        """The folder of templates: embeddings_dir/../../template_embeddings."""
        return self.embeddings_dir.absolute().parent.parent / "template_embeddings"

    def __len__(self) -> int:
        return self.rows

    # ---- Writing ----------------------------------------------------------------------------

    def update_embeddings(self, sample_ids: Any, embeddings: Any) -> None:
        """Sets the rows of `sample_ids` to copies of `embeddings`. Frozen rows do not change.

        For a duplicate id the last row counts. With auto_sync every sync_batch_size-th call commits.

        Shape:  float [n, embedding_dim], on any device.
        Errors: KeyError naming the first unknown id, before any row is changed; ValueError;
                CorruptError; OSError.
        """
        if type(sample_ids) is list and self._update_listed(sample_ids, embeddings):
            return
        ids = self._parse(sample_ids)
        rows = self._rows_in(embeddings, len(ids))
        with self._here():
            self._update(ids, rows)

    # ---- Chunks -----------------------------------------------------------------------------

    def get_embeddings_by_chunk(self, chunk_id: int) -> tuple[list[Any], Any]:
        """Returns (sample ids, rows) of one chunk. Shape: float32 [n, dim]. Errors: IndexError."""
        with self._here():
            ids = self._chunk_ids(chunk_id)
            return self._given(ids), self._out(self._gather(ids))

    def update_embeddings_by_chunk(self, chunk_id: int, sample_ids: Any, embeddings: Any) -> None:
        """Sets rows of one chunk, as update_embeddings() does. The chunk's other rows do not change.

        Errors: as update_embeddings(); ValueError for an id that is not in the chunk.
        """
        ids = self._parse(sample_ids)
        rows = self._rows_in(embeddings, len(ids))
        with self._here():
            foreign = np.flatnonzero(~np.isin(ids, self._chunk_ids(chunk_id)))
            if len(foreign):
                self._ids.positions(ids)
                one = self._given(ids[foreign[:1]])[0]
                raise ValueError(f"sample_ids: {one!r} is not in chunk {chunk_id}")
            self._update(ids, rows)

    def get_chunk_embeddings(self, chunk_id: int) -> dict[Any, Any]:
        """Returns one chunk as {sample id: float32 [dim]}. Errors: IndexError."""
        ids, rows = self.get_embeddings_by_chunk(chunk_id)
        return dict(zip(ids, rows, strict=True))

    def update_chunk_embeddings(self, chunk_id: int, embeddings: Any) -> None:
        """Sets rows of one chunk. embeddings: {sample id: row}, or all rows of the chunk in its order.

        Errors: as update_embeddings_by_chunk().
        """
        if isinstance(embeddings, Mapping):
            if embeddings:
                rows = np.stack([np.asarray(_to_numpy(row, "embeddings"), np.float32)
                                 for row in embeddings.values()])
                self.update_embeddings_by_chunk(chunk_id, list(embeddings), rows)
            return
        with self._here():
            ids = self._chunk_ids(chunk_id)
            self._update(ids, self._rows_in(embeddings, len(ids)))

    # ---- Syncing and memory -----------------------------------------------------------------

    def sync_dirty_chunks_to_disk(self) -> None:
        """Commits all updates so far. Does nothing when nothing changed.

        Errors: OSError. Every later call then raises it again; the last sync stays on disk.
        """
        with self._here():
            self._sync()

    def force_sync_all_chunks(self) -> None:
        """Commits all updates so far, with auto_sync on or off. The same as sync_dirty_chunks_to_disk()."""
        self.sync_dirty_chunks_to_disk()

    def enable_auto_sync(self, enabled: bool = True) -> None:
        """Sets whether updates commit by themselves. Without it rows are durable only after
        force_sync_all_chunks(); memory use is the same."""
        with self._here():
            self.auto_sync = bool(enabled)
            self._table.commit_at_exit = self.auto_sync and self._temporary is None

    def clear_chunk_cache(self) -> None:
        """Syncs, then empties the slab. A slab that was shrunk under pressure has its full size again."""
        with self._here():
            self._sync()
            self._table.reopen(self._slab_wanted())

    def _adaptive_eviction(self) -> bool:
        with self._here():
            report = self._governor.step_boundary()
            if not report.pressure and _reports.system_memory()[0] <= _reports.PRESSURE_PERCENT:
                return False
            smaller = max(self._table.floor_bytes, int(self._table.slab_bytes * 0.7))
            if smaller >= self._table.slab_bytes:
                return False
            self._sync()
            self._table.reopen(smaller)
            return True

    def optimize_cache_settings(self, batch_size: int) -> None:
        """Sets sync_batch_size to max(5, min(batch_size // 4, 20)). Under memory pressure it also frees
        30 % of the slab; the percentages of get_cache_performance() are then of the smaller slab."""
        with self._here():
            self.sync_batch_size = max(5, min(batch_size // 4, 20))
            self._adaptive_eviction()

    def close(self) -> None:
        """Returns the slab, after a sync with auto_sync on. A second close does nothing."""
        with self._lock:
            if not self._finalizer.alive:
                return
            self._table.check_process()
            try:
                if self._table.commit_at_exit:
                    self._sync()
                self._table.close()
            finally:
                self._finalizer.detach()
                self._live = None
                if self._temporary is not None:
                    shutil.rmtree(self._temporary, ignore_errors=True)

    def __enter__(self) -> TrainableEmbeddingManager:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # ---- Statistics -------------------------------------------------------------------------

    @property
    def slab_bytes(self) -> int:
        """Bytes leased for rows, index and buffers."""
        return self._table.slab_bytes

    @property
    def whole_table_bytes(self) -> int:
        """The approximate bytes of a slab with all rows."""
        return self._table.whole_bytes()

    @property
    def pending_updates_count(self) -> int:
        """Number of update calls since the last sync."""
        return self._table.unsynced

    def get_cache_performance(self) -> dict[str, Any]:
        """Returns cache_hit_rate, total_requests, disk_load_ratio, sync_operations, l1_usage_percent,
        l2_usage_percent.

        Units: a request is a row; a hit is a requested row that was in memory; disk_load_ratio is
               pages read from disk per requested row. L1 fills before L2.
        """
        with self._here():
            stats, info = self._table.stats(), self._cache_info()
        requests = stats["requests"]
        return {"cache_hit_rate": info["hit_rate"], "total_requests": requests,
                "disk_load_ratio": stats["pages_read"] / requests if requests else 0.0,
                "sync_operations": stats["commits"],
                "l1_usage_percent": _percent(info["l1_size_mb"], info["l1_max_mb"]),
                "l2_usage_percent": _percent(info["l2_size_mb"], info["l2_max_mb"])}

    def _cache_info(self) -> dict[str, Any]:
        with self._here():
            stats = self._table.stats()
        resident = stats["resident_bytes"] / _MIB
        l1 = min(resident, self.cache_l1_size_mb)
        items = min(stats["resident_pages"] * self._table.rows_per_page, self.rows)
        in_l1 = round(items * l1 / resident) if resident else 0
        hits, requests = stats["hits"], stats["requests"]
        return {"l1_items": in_l1, "l1_size_mb": l1, "l1_max_mb": self.cache_l1_size_mb,
                "l2_items": items - in_l1, "l2_size_mb": resident - l1,
                "l2_max_mb": self.cache_l2_size_mb, "l3_enabled": self.enable_l3_cache,
                "stats": {"hits": hits, "misses": requests - hits,
                          "evictions": stats["evictions_clean"] + stats["evictions_dirty"]},
                "hit_rate": hits / requests if requests else 1.0}

    def get_disk_usage_info(self) -> dict[str, Any]:
        """Returns embeddings_dir, total_size_mb, num_chunks, chunk_details {id: {file, size_mb,
        sample_count}}, storage_mode, auto_sync, sync_batch_size, cache_info, performance_stats
        {cache_hits, cache_misses, disk_loads, sync_operations}, dirty_chunks_count,
        pending_updates_count.

        Units: MiB on disk; disk_loads are pages.
        """
        with self._here():
            self._absorb()
            stats, info = self._table.stats(), self._cache_info()
            file = str(self.embeddings_dir / "table" / "rows.dat")
            row_mb = self._table.page_bytes / self._table.rows_per_page / _MIB
            counts = (np.bincount(self._chunk_of, minlength=self.num_chunks)
                      if self._chunk_of is not None else
                      np.diff(np.minimum(np.arange(self.num_chunks + 1) * self.chunk_size,
                                         self.rows)))
            details = {chunk: {"file": file, "size_mb": count * row_mb, "sample_count": count}
                       for chunk, count in enumerate(counts.tolist())}
            return {
                "embeddings_dir": str(self.embeddings_dir),
                "total_size_mb": _disk_bytes(self.embeddings_dir) / _MIB,
                "num_chunks": self.num_chunks, "chunk_details": details,
                "storage_mode": self.storage_mode, "auto_sync": self.auto_sync,
                "sync_batch_size": self.sync_batch_size, "cache_info": info,
                "performance_stats": {
                    "cache_hits": stats["hits"], "cache_misses": stats["requests"] - stats["hits"],
                    "disk_loads": stats["pages_read"], "sync_operations": stats["commits"]},
                "dirty_chunks_count": int(np.count_nonzero(self._dirty)),
                "pending_updates_count": self._table.unsynced}

    def print_startup(self) -> None:
        """Prints the manager's settings."""
        print(_reports.startup_block(self))

    def print_performance(self, epoch: int, every: int = 5) -> None:
        """Prints cache, disk, memory and advice, in every `every`-th epoch."""
        if epoch % every == 0:
            print(_reports.performance_block(self, epoch))

    def advice(self) -> list[str]:
        """Returns sentences on which settings to change. Empty where no change is known to help."""
        return _reports.advice(self)

    # ---- Copies -----------------------------------------------------------------------------

    def save_embeddings_to_new_folder(self, directory: str | os.PathLike[str]) -> str:
        """Syncs, then writes embeddings_chunk_<k>.pt for every chunk to `directory`. Returns the folder.

        The files hold the rows that get_embeddings() returns. The manager keeps its embeddings_dir.

        Errors: ImportError without torch; OSError.
        """
        folder = pathlib.Path(directory)
        with self._here():
            self._sync()
            folder.mkdir(parents=True, exist_ok=True)
            for stale in chunk_files(folder)[self.num_chunks:]:
                stale.unlink()
            for chunk in range(self.num_chunks):
                ids = self._chunk_ids(chunk)
                rows = np.empty((len(ids), self.embedding_dim), np.float32)
                with self._table.uncounted():
                    self._table.gather(ids, rows)
                write_chunk(folder / f"embeddings_chunk_{chunk}.pt", self._given(ids), rows)
            sync_folder(folder)
        return str(folder)

    def save_final_embeddings(self, directory: str | os.PathLike[str]) -> str:
        """Writes chunk files as save_embeddings_to_new_folder() does."""
        return self.save_embeddings_to_new_folder(directory)

    def _fingerprint(self) -> dict[str, Any]:
        return {name: self._record[name] for name in ("ids", "dim", "strategy", "seed", "factor")}

    def _write_copy(self, folder: pathlib.Path, kind: str, **more: Any) -> None:
        with self._here():
            self._sync()
            _copies.write_copy(folder, {**self._fingerprint(), "kind": kind, **more}, self.rows,
                               self.embedding_dim, ((ids, rows) for _, ids, rows in self._pieces()))

    # Replaces every row; the manager is as before if the copy is damaged, for that is seen first.
    def _read_copy(self, folder: pathlib.Path, names: tuple[str, ...]) -> dict[str, Any]:
        record = _copies.read_record(folder)
        _copies.compare_record(folder, record, self._fingerprint(), names)
        with self._here():
            self._absorb()
            for ids, rows in _copies.read_copy(folder, record):
                self._store_rows(ids, rows)
            self._table.unsynced += 1
            self._sync()
        return record

    def store_imgtxt_template(self) -> str:
        """Writes all rows, with their fingerprint, to template_dir/imgtxt. Returns the folder."""
        folder = self.template_dir / "imgtxt"
        self._write_copy(folder, "template")
        return str(folder)

    def load_imgtxt_template(self) -> None:
        """Sets all rows from template_dir/imgtxt, and syncs.

        Errors: NotFoundError; ValueError when the template's samples, dim, strategy, seed or factor
                differ from the manager's; CorruptError.
        """
        self._read_copy(self.template_dir / "imgtxt", ("ids", "dim", "strategy", "seed", "factor"))

    def load_phase_1_template(self, path: str | os.PathLike[str]) -> None:
        """Sets all rows from a template, a checkpoint or a folder of chunk files, and syncs.

        Errors: NotFoundError; ValueError for other samples or another dim; CorruptError.
        """
        folder = pathlib.Path(path)
        files = chunk_files(folder)
        if files and not (folder / "copy.json").exists():
            with self._here():
                self._absorb()
                self._table.unsynced += 1
                self._import(files)
                self._sync()
            return
        self._read_copy(folder, ("ids", "dim"))

    def create_checkpoint(self, path: str | os.PathLike[str]) -> str:
        """Writes all rows, the frozen ids and the sync settings to the folder `path`. Returns the folder."""
        folder = pathlib.Path(path)
        frozen = self._frozen
        self._write_copy(folder, "checkpoint", sync_batch_size=self.sync_batch_size,
                         auto_sync=self.auto_sync, all_frozen=self._all_frozen,
                         frozen=None if frozen is None else frozen.tolist())
        return str(folder)

    def load_checkpoint(self, path: str | os.PathLike[str]) -> None:
        """Sets rows, frozen ids and sync settings from a checkpoint, and syncs.

        Errors: as load_imgtxt_template(); ValueError when `path` is no checkpoint.
        """
        folder = pathlib.Path(path)
        if (kind := _copies.read_record(folder)["kind"]) != "checkpoint":
            raise ValueError(f"{folder}: it is a {kind}; use load_phase_1_template()")
        with self._here():
            self._all_frozen, self._frozen = False, None  # The rows are the checkpoint's, all.
            record = self._read_copy(folder, ("ids", "dim", "strategy", "seed", "factor"))
            self._all_frozen = record["all_frozen"]
            self._frozen = (None if record["frozen"] is None
                            else np.array(record["frozen"], np.int64))
            self.sync_batch_size = record["sync_batch_size"]
            self.enable_auto_sync(record["auto_sync"])

    def initialize_embeddings_imgtxt(self, factor: float | None = None) -> None:
        """Sets all rows to the projected difference of image and text features, and syncs.

        Errors: ValueError without feature_manager; KeyError for a sample without features.
        """
        self._initialize("imgtxt", factor)

    def initialize_embeddings_txt(self, factor: float | None = None) -> None:
        """Sets all rows to the projected text features, as initialize_embeddings_imgtxt() does."""
        self._initialize("txt", factor)

    def initialize_embeddings_img(self, factor: float | None = None) -> None:
        """Sets all rows to the projected image features, as initialize_embeddings_imgtxt() does."""
        self._initialize("img", factor)

    def _initialize(self, strategy: str, factor: float | None) -> None:
        with self._here():
            self._absorb()
            factor = self.factor if factor is None else float(factor)
            self._from_features(strategy, factor)
            self._table.unsynced += 1
            self._sync()
            self._record.update(strategy=strategy, factor=factor)
            replace_json(self.embeddings_dir / RECORD, self._record)
            self.initialization_strategy, self.factor = strategy, factor

    # ---- Freezing and optimizers ------------------------------------------------------------

    def freeze_embeddings(self, sample_ids: Any = None) -> None:
        """Protects rows from updates, optimizers and loading. sample_ids: None for all rows.

        Memory: 8 bytes per id.
        Errors: KeyError for an unknown id.
        """
        with self._here():
            self._absorb()
            if sample_ids is None:
                self._all_frozen = True
                return
            ids = self._parse(sample_ids)
            self._ids.positions(ids)
            self._frozen = np.union1d(self._frozen if self._frozen is not None else [], ids).astype(
                np.int64) if len(ids) else self._frozen

    def unfreeze_embeddings(self, sample_ids: Any = None) -> None:
        """Undoes freeze_embeddings(), for these ids or for all. Errors: KeyError; ValueError."""
        with self._here():
            self._absorb()
            if sample_ids is None:
                self._all_frozen, self._frozen = False, None
                return
            if self._all_frozen:
                raise ValueError("sample_ids: every row is frozen; call unfreeze_embeddings() first")
            ids = self._parse(sample_ids)
            self._ids.positions(ids)
            if self._frozen is not None:
                left = np.setdiff1d(self._frozen, ids)
                self._frozen = left if len(left) else None

    def get_optimizer_params(self) -> list[Any]:
        """Returns [one torch Parameter with all rows], for torch.optim. Every call returns the same one.

        get_embeddings() returns the Parameter's values, and syncs write them to the table. Frozen
        rows are set back. The whole table is in memory until release_optimizer_params().

        Shape:  float32 [samples, dim], in the order of sample_ids.
        Errors: BudgetExceeded when the table does not fit; ImportError without torch.
        """
        with self._here():
            if self._live is None:
                buffer = self._buffer(self.rows)
                for begin, _, rows in self._pieces():
                    buffer.array[begin:begin + len(rows)] = rows
                self._live = LiveRows(buffer, self._ids)
            return [self._live.parameter]

    def release_optimizer_params(self) -> None:
        """Writes the Parameter's values to the table and frees its memory."""
        with self._here():
            self._absorb()
            self._live = None

    # ---- Analysis ---------------------------------------------------------------------------

    def get_similarity_matrix(self, sample_ids: Any = None) -> Any:
        """Computes the cosine of every two rows. sample_ids: None for all. Shape: float32 [n, n].

        Errors: BudgetExceeded when the matrix does not fit; KeyError.
        """
        with self._here():
            rows = (self._gather(self._parse(sample_ids)).array if sample_ids is not None else
                    np.concatenate([rows for _, _, rows in self._pieces()]))
            buffer = Buffer(self._governor, (len(rows), len(rows)), "float32")
            similarities(rows, buffer.array)
            return self._out(buffer)

    def get_nearest_neighbors(self, sample_id: Any, k: int = 5) -> list[tuple[Any, float]]:
        """Returns (sample id, cosine) of the k samples nearest to `sample_id`, best first.

        Equal cosines are ordered by position. The table is streamed: memory does not grow with it.
        Errors: KeyError; ValueError for k < 1.
        """
        if k < 1:
            raise ValueError(f"k: {k} is less than 1")
        with self._here():
            ids = self._parse([sample_id])
            found = nearest(self._gather(ids).array[0], int(ids[0]), k, self._pieces())
            return [(self._ids.given([position])[0], value) for position, value in found]

    def get_embedding_statistics(self) -> dict[str, float]:
        """Returns num_embeddings, embedding_dim; mean, std, min, max over all values; mean_norm,
        std_norm, min_norm, max_norm over rows. Memory does not grow with the table."""
        with self._here():
            return statistics(self.rows, self.embedding_dim, self._pieces())

    def __repr__(self) -> str:
        return (f"<TrainableEmbeddingManager {self.embeddings_dir}: {self.rows} x "
                f"{self.embedding_dim}, {self.storage_mode}>")


def _percent(part: float, whole: float) -> float:
    return 100.0 * part / whole if whole else 0.0


def _disk_bytes(folder: pathlib.Path) -> int:
    return sum(path.stat().st_blocks * 512 for path in folder.rglob("*") if path.is_file())


def _check_arguments(dim: int, strategy: str, mode: str, chunk_size: int | None, l1: float,
                     l2: float, sync: int, seed: int, batch_size: int | None) -> None:
    if dim < 1:
        raise ValueError(f"embedding_dim: {dim} is less than 1")
    if not _initial.is_known(strategy):
        raise ValueError(f"initialization_strategy: {strategy!r} is none of "
                         f"{', '.join(_initial.STRATEGIES)}, {_initial.CLUSTERS_WORDS}")
    if mode not in ("memory", "disk"):
        raise ValueError(f"storage_mode: {mode!r} is neither 'memory' nor 'disk'")
    for name, value in (("chunk_size", chunk_size), ("batch_size", batch_size)):
        if value is not None and value < 1:
            raise ValueError(f"{name}: {value} is less than 1")
    if l1 < 0 or l2 < 0:
        raise ValueError(f"cache_l1_size_mb, cache_l2_size_mb: {l1} and {l2}; one is negative")
    if sync < 1:
        raise ValueError(f"sync_batch_size: {sync}; 1 syncs after every update, a larger number "
                         "less often")
    if not 0 <= seed < 1 << 64:
        raise ValueError(f"seed: {seed} is not in [0, 2**64)")
