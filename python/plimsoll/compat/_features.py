# SPDX-License-Identifier: Apache-2.0
"""FeatureManager: the original's class over one FeatureStore.

An added chunk is durable at once, in a folder of its own. The next read builds the store from all
chunks, piece by piece. From then on a read costs one look-up by id, whatever the sample's chunk.
The original's chunk_<k>.pt in features_dir are read in the same way, and left in place.

    features.json              the current generation and its chunks; replaced last
    store-<g>/, ids-<g>/       the generation's FeatureStore, and its ids
    staged/chunk_<k>.<n>/      chunks added since

Threads: calls may come from several threads; reads run side by side, adding waits for them.
Memory:  one slab of at most L1 + L2; while building, one piece of a chunk and 24 bytes a sample.
         Prefetching reads into the slab: two pieces at a time, further ones are dropped.
"""
from __future__ import annotations

import contextlib
import difflib
import inspect
import math
import numbers
import os
import pathlib
import re
import shutil
import threading
from collections import deque
from collections.abc import Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import numpy as np

from ..core import _torch_gate
from ..core._arrays import _to_numpy
from ..core._folders import make_folders, replaced
from ..data._features import FeatureStore, FeatureWriter
from ..errors import CorruptError, NotFoundError
from ..memory._memory import Governor
from . import _ids
from ._files import load_safely, map_npy, read_json, replace_bytes, replace_json, replace_npy
from ._table import governor_for

TYPES = ("img_features", "txt_features", "txt_full")
_PIECE = 1024
_AHEAD_MOST = 4096
_STAGED = re.compile(r"chunk_(\d+)\.(\d+)")
_ORIGINAL = re.compile(r"chunk_(\d+)\.pt")
_MIB = 1 << 20


_SETTINGS = ("cache_size_mb", "cache_l1_size_mb", "cache_l2_size_mb", "chunk_size", "compression")
_LOADERS = ("batch_size", "num_workers")  # The original has them in the same dict, for its DataLoader.


def _pairs(config: Any) -> dict[str, Any]:
    """Returns the settings in `config`: a mapping's items, or an object's public attributes, those of its class included."""
    for read in ("_asdict", "model_dump"):  # Named tuples; pydantic models.
        if hasattr(config, read):
            return dict(getattr(config, read)())
    if isinstance(config, Mapping):
        return dict(config)
    of_class = {name: value for kind in reversed(type(config).__mro__) for name, value in vars(kind).items()
                if not hasattr(value, "__get__") or inspect.isdatadescriptor(value)}
    names = [name for name in {**of_class, **getattr(config, "__dict__", {})} if not name.startswith("_")]
    return {name: getattr(config, name) for name in names}


def _settings(config: Any) -> dict[str, Any]:
    """Returns the settings of `config` that are not None. Errors: ValueError naming an unknown key."""
    given = {} if config is None else _pairs(config)
    for name in given:
        if name not in (*_SETTINGS, *_LOADERS):
            near = difflib.get_close_matches(str(name), _SETTINGS, 1)
            raise ValueError(f"config: FeatureManager has no setting {name!r}"
                             + (f"; did you mean {near[0]!r}?" if near else "; it has " + ", ".join(_SETTINGS)))
    return {name: value for name, value in given.items() if name in _SETTINGS and value is not None}


def _slab_mb(given: dict[str, Any]) -> tuple[float, float]:
    """Returns the two parts of the slab's bound, in MiB. Errors: ValueError."""
    sizes = {name: given[name] for name in _SETTINGS[:3] if name in given}
    for name, size in sizes.items():
        real = isinstance(size, numbers.Real) and not isinstance(size, bool)
        if not real or not 0 <= size < math.inf:
            raise ValueError(f"config: {name} is {size!r}, not a number of MiB from 0 on")
    if "cache_size_mb" in sizes:
        if len(sizes) > 1:
            raise ValueError("config: cache_size_mb bounds the whole slab: leave it or cache_l1_size_mb and "
                             "cache_l2_size_mb out")
        return float(sizes["cache_size_mb"]), 0.0
    return float(sizes.get("cache_l1_size_mb", 512)), float(sizes.get("cache_l2_size_mb", 2048))


class _Chunk:
    """A chunk's samples and features in one source: `piece(begin, end)` reads a range of them."""

    def __init__(self, number: int, ids: np.ndarray, names: list[str] | None,
                 columns: dict[str, np.ndarray]) -> None:
        self.number, self.ids, self.names, self.columns = number, ids, names, columns

    def shape(self) -> dict[str, tuple[str, tuple[int, ...]]]:
        return {name: (str(one.dtype), one.shape[1:]) for name, one in self.columns.items()}

    def pieces(self) -> Iterator[tuple[np.ndarray, dict[str, np.ndarray]]]:
        for begin in range(0, len(self.ids), _PIECE):
            yield self.ids[begin:begin + _PIECE], {
                name: np.ascontiguousarray(one[begin:begin + _PIECE])
                for name, one in self.columns.items()}


class FeatureManager:
    """A store of image and text features by sample id, added in chunks and read in any order.

        features = FeatureManager("run/features")
        features.add_features_chunk(0, images, texts, None, ids)
        batch = features.get_features(batch_ids, ["img_features", "txt_features"])
    """

    def __init__(self, features_dir: str | os.PathLike[str], chunk_size: int | None = None,
                 config: Any = None, preload_index: bool = False, *,
                 governor: Governor | None = None) -> None:
        """Opens the features in features_dir, which may be empty.

        chunk_size:    most samples of a chunk. None: the config's, else 10,000.
        config:        a mapping or an object with these settings: cache_size_mb, the bound of the slab in MiB; or
                       cache_l1_size_mb (512) and cache_l2_size_mb (2048), whose sum is the bound; chunk_size;
                       compression: None, "none" or "lz4", for the next time that the store is built from chunks.
                       batch_size and num_workers are accepted and not used: they are the DataLoader's.
        preload_index: builds and opens the store now, not at the first read.
        governor:      leases the slab; None: the process's governor, or a new one.

        Errors: ValueError (an argument; an unknown key of the config); CorruptError; OSError.
        """
        given = _settings(config)
        chunk_size = given.get("chunk_size", 10000) if chunk_size is None else chunk_size
        if chunk_size < 1:
            raise ValueError(f"chunk_size: {chunk_size} is less than 1")
        self.compression = str(given.get("compression", "none"))
        if self.compression not in ("none", "lz4"):
            raise ValueError(f"compression: {self.compression!r} is neither 'none' nor 'lz4'")
        self.features_dir = pathlib.Path(features_dir)
        self.chunk_size = chunk_size
        self.cache_l1_size_mb, self.cache_l2_size_mb = _slab_mb(given)
        self._torch = _torch_gate.torch_if_imported()
        self._governor = governor_for(governor)
        self._lock = threading.RLock()
        self._idle = threading.Condition()
        self._readers = 0
        self._store: FeatureStore | None = None
        self._ids: _ids.IdMap | None = None
        self._spans: dict[int, tuple[int, int]] = {}  # Chunk → its ordinals [begin, end).
        self._recent: deque[str] = deque(maxlen=16)
        self._last_end = -1
        self._ahead: ThreadPoolExecutor | None = None
        self._under_way: set[Future[None]] = set()
        self._pid = os.getpid()
        make_folders(self.features_dir)
        self._stale = bool(self._staged() or self._record() is None and self._originals())
        self._governor._adopt(self)
        if preload_index:
            self.load_features()

    # ---- Adding -----------------------------------------------------------------------------

    def add_features_chunk(self, chunk_id: int, img_features: Any, txt_features: Any,
                           txt_full: Any, sample_ids: Any) -> None:
        """Adds or replaces one chunk durably. Any of the three features may be None.

        Shape:  sample_ids [n]; each feature [n, …], float, the same shape in every chunk.
        Errors: ValueError (lengths, NaN or infinity, more samples than chunk_size); OSError. A
                sample in two chunks raises ValueError at the first read.
        """
        ids, names = _ids.parse(sample_ids)
        if not 0 < len(ids) <= self.chunk_size:
            raise ValueError(f"sample_ids: {len(ids)} samples, but chunk_size is "
                             f"{self.chunk_size}")
        if chunk_id < 0:
            raise ValueError(f"chunk_id: {chunk_id} is negative")
        columns = {name: _column(value, name, len(ids)) for name, value in
                   zip(TYPES, (img_features, txt_features, txt_full), strict=True)
                   if value is not None}
        if not columns:
            raise ValueError("img_features, txt_features, txt_full: all are None")
        with self._here():
            known = self._staged().get(chunk_id)
            number = 0 if known is None else int(known.name.rsplit(".", 1)[1]) + 1
            folder = self.features_dir / "staged" / f"chunk_{chunk_id}.{number}"
            make_folders(folder.parent)
            with replaced(folder) as partial:
                partial.mkdir()
                replace_npy(partial / "ids.npy", ids)
                if names is not None:
                    replace_bytes(partial / "names.txt", "\0".join(names).encode())
                for name, array in columns.items():
                    replace_npy(partial / f"{name}.npy", array)
            if known is not None:
                shutil.rmtree(known)
            self._stale = True

    def _staged(self) -> dict[int, pathlib.Path]:
        """Returns the newest staged folder of each chunk."""
        found: dict[int, tuple[int, pathlib.Path]] = {}
        for path in (self.features_dir / "staged").glob("chunk_*"):
            if match := _STAGED.fullmatch(path.name):
                chunk, number = int(match[1]), int(match[2])
                if chunk not in found or number > found[chunk][0]:
                    found[chunk] = (number, path)
        return {chunk: path for chunk, (_, path) in found.items()}

    def _originals(self) -> dict[int, pathlib.Path]:
        return {int(match[1]): path for path in self.features_dir.glob("chunk_*.pt")
                if (match := _ORIGINAL.fullmatch(path.name))}

    def _record(self) -> dict[str, Any] | None:
        return read_json(self.features_dir / "features.json")

    # ---- Building and opening ---------------------------------------------------------------

    def load_features(self) -> int:
        """Builds the store from new chunks and opens it. Returns its number of samples.

        Errors: ValueError (no features at all; a sample in two chunks; chunks of other shapes);
                CorruptError; BudgetExceeded; OSError.
        """
        with self._here():
            if self._stale or self._store is None:
                with self._idle:
                    while self._readers:
                        self._idle.wait()
                    if self._stale:
                        self._build()
                    elif self._store is None:
                        self._open()
            return 0 if self._ids is None else self._ids.rows

    def _open(self) -> None:
        record = self._record()
        if record is None:
            raise ValueError(f"{self.features_dir}: there are no features; add_features_chunk()")
        folder = self.features_dir / f"store-{record['generation']}"
        on_disk = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
        allowed = int((self.cache_l1_size_mb + self.cache_l2_size_mb) * _MIB)
        self._store = FeatureStore.open(self._governor, folder,
                                        cache_bytes=min(allowed, on_disk + on_disk // 8 + 32 * _MIB))
        self._ids = _ids.IdMap(self.features_dir / f"ids-{record['generation']}",
                               record["rows"], record["named"])
        self._spans, begin = {}, 0
        for chunk, count in record["chunks"]:
            self._spans[chunk] = (begin, begin + count)
            begin += count

    def _build(self) -> None:
        record = self._record()
        if record is not None and self._store is None:
            self._open()
        staged = self._staged()
        originals = self._originals() if record is None else {}
        numbers = sorted({*self._spans, *staged, *originals})
        generation = 1 if record is None else record["generation"] + 1
        folder = self.features_dir / f"store-{generation}"
        ids_folder = self.features_dir / f"ids-{generation}"
        for stale in (folder, ids_folder):
            shutil.rmtree(stale, ignore_errors=True)
        all_ids: list[np.ndarray] = []
        all_names: list[str] | None = None
        shape: dict[str, tuple[str, tuple[int, ...]]] | None = None
        writer: FeatureWriter | None = None
        counts = []
        try:
            for number in numbers:
                chunk = self._source(number, staged, originals)
                if writer is None:
                    shape = chunk.shape()
                    all_names = None if chunk.names is None else []
                    writer = FeatureWriter(self._governor, folder, shape,
                                           compression=self.compression)
                if chunk.shape() != shape:
                    raise ValueError(f"chunk {number} holds {chunk.shape()}, but others {shape}")
                if (chunk.names is None) != (all_names is None):
                    raise ValueError(f"chunk {number}: strings and integers are mixed as ids")
                for ids, columns in chunk.pieces():
                    writer.append(ids, columns)
                all_ids.append(np.array(chunk.ids))
                if all_names is not None:
                    all_names += chunk.names or []
                counts.append([number, len(chunk.ids)])
            if writer is None:
                raise ValueError(f"{self.features_dir}: there are no features")
            ids_folder.mkdir()
            ids_map = _ids.IdMap.make(ids_folder, np.concatenate(all_ids), all_names)
            writer.finish()
        except BaseException:
            if writer is not None:
                writer.close()
            shutil.rmtree(ids_folder, ignore_errors=True)
            raise
        replace_json(self.features_dir / "features.json", {
            "format": 1, "generation": generation, "rows": ids_map.rows,
            "named": all_names is not None, "chunks": counts, "ids": ids_map.fingerprint()})
        if self._store is not None:
            self._store.close()
            self._store = None
        self._stale = False
        for stale in (*staged.values(), self.features_dir / f"store-{generation - 1}",
                      self.features_dir / f"ids-{generation - 1}"):
            shutil.rmtree(stale, ignore_errors=True)
        self._open()

    def _source(self, number: int, staged: dict[int, pathlib.Path],
                originals: dict[int, pathlib.Path]) -> _Chunk:
        if number in staged:
            folder = staged[number]
            names_file = folder / "names.txt"
            names = names_file.read_text("utf-8").split("\0") if names_file.exists() else None
            return _Chunk(number, map_npy(folder / "ids.npy"), names, {
                name: map_npy(folder / f"{name}.npy") for name in TYPES
                if (folder / f"{name}.npy").exists()})
        if number in originals:
            return _original(number, originals[number])
        return _StoredChunk(self, number)

    # ---- Reading ----------------------------------------------------------------------------

    @contextlib.contextmanager
    def _reading(self) -> Iterator[tuple[FeatureStore, _ids.IdMap]]:
        """Yields (store, ids), and keeps the store open inside the `with` block."""
        while True:
            self.load_features()
            with self._idle:
                if not self._stale and self._store is not None and self._ids is not None:
                    self._readers += 1
                    store, ids = self._store, self._ids
                    break
        try:
            yield store, ids
        finally:
            with self._idle:
                self._readers -= 1
                self._idle.notify_all()

    def _here(self) -> threading.RLock:
        if os.getpid() != self._pid:
            raise RuntimeError("this FeatureManager belongs to the process that opened it: open "
                               "one here, or read in threads, which share its memory")
        return self._lock

    def _results(self, store: FeatureStore, ids: np.ndarray, types: list[str]) -> dict[str, Any]:
        columns = store.read(ids, types)
        if self._torch is None:
            return dict(columns)
        return {name: columns.tensor(name) for name in columns}

    def _types(self, store: FeatureStore, types: Any) -> list[str]:
        return list(store.columns) if types is None else (
            [types] if isinstance(types, str) else list(types))

    def get_features(self, sample_ids: Any, feature_types: Any = None,
                     async_prefetch: bool = False) -> dict[str, Any]:
        """Returns copies of the features of `sample_ids`, in request order. Duplicates are allowed.

        feature_types:  names among img_features, txt_features, txt_full; None: all.
        async_prefetch: reads the samples that are likely next into the slab, after a sequential request.

        Shape:  {name: [n, …]}.
        Errors: KeyError naming the first unknown sample or feature; BudgetExceeded; CorruptError;
                OSError.
        """
        ids, names = _ids.parse(sample_ids)
        with self._reading() as (store, known):
            if len(ids) and (names is not None) != known.named:
                raise ValueError("sample_ids: these features' ids are "
                                 f"{'strings' if known.named else 'integers'}")
            positions = known.positions(ids)
            out = self._results(store, ids, self._types(store, feature_types))
            self._learn(positions)
        if async_prefetch:
            self._read_ahead()
        return out

    def get_features_by_chunk(self, chunk_id: int, feature_types: Any = None) -> dict[str, Any]:
        """Returns one chunk's features and its "sample_ids", in the order they were added.

        Errors: NotFoundError for a chunk that does not exist.
        """
        with self._reading() as (store, known):
            begin, end = self._span(chunk_id)
            out = self._results(store, known.slice(begin, end), self._types(store, feature_types))
            return {"sample_ids": known.given(range(begin, end)), **out}

    def get_chunk(self, chunk_id: int) -> dict[str, Any]:
        """Returns one chunk as {sample_ids, features {name: [n, …]}, chunk_id, metadata}. Errors: NotFoundError."""
        found = self.get_features_by_chunk(chunk_id)
        sample_ids = found.pop("sample_ids")
        return {"sample_ids": sample_ids, "features": found, "chunk_id": chunk_id,
                "metadata": {"num_samples": len(sample_ids), "feature_types": list(found)}}

    def get_num_chunks(self) -> int:
        """Returns the number of chunks."""
        with self._here():
            record = self._record()
            built = {} if record is None else dict(record["chunks"])
            return len({*built, *self._staged(), *(self._originals() if record is None else {})})

    def chunk_ids(self, chunk_id: int) -> np.ndarray:
        """Returns the 64-bit ids of a chunk. chunk_id: position among the chunks' sorted numbers. Errors: NotFoundError."""
        with self._reading() as (_, known):
            numbers = sorted(self._spans)
            if not 0 <= chunk_id < len(numbers):
                raise NotFoundError(f"{self.features_dir}: there is no chunk {chunk_id}")
            return known.slice(*self._spans[numbers[chunk_id]])

    def fingerprint(self) -> str | None:
        """Returns the fingerprint of the set of samples. None without samples."""
        if self.get_num_chunks() == 0:
            return None
        with self._reading() as (_, known):
            return known.fingerprint()

    def _span(self, chunk_id: int) -> tuple[int, int]:
        if chunk_id not in self._spans:
            raise NotFoundError(f"{self.features_dir}: there is no chunk {chunk_id}; there are "
                                f"{len(self._spans)}")
        return self._spans[chunk_id]

    # ---- Reading ahead ----------------------------------------------------------------------

    def _learn(self, positions: np.ndarray) -> None:
        if len(positions) == 0:
            return
        low, high = int(positions.min()), int(positions.max())
        near = abs(low - self._last_end) <= len(positions)
        dense = high - low < 4 * len(positions)
        self._recent.append("sequential" if near and dense else "clustered" if dense else "random")
        self._last_end = high + 1

    def access_pattern(self) -> str:
        """Returns the most frequent kind of the last sixteen requests: "sequential", "clustered" or "random"."""
        seen = list(self._recent)
        return max(("random", "clustered", "sequential"), key=seen.count) if seen else "random"

    def _read_ahead(self) -> None:
        """Prefetches as many samples as the last request had, from its end, where requests are sequential."""
        with self._here():
            if self._ids is None or self.access_pattern() != "sequential":
                return
            begin = self._last_end
            end = min(begin + _AHEAD_MOST, self._ids.rows)
            if begin < end:
                self.prefetch(self._ids.given(range(begin, end)))

    def prefetch(self, sample_ids: Any) -> bool:
        """Starts a thread that reads `sample_ids` into the slab. Returns False, and does nothing, while two reads are
        under way. It never raises an error of reading."""
        ids, _ = _ids.parse(sample_ids)
        with self._here():
            self._under_way = {one for one in self._under_way if not one.done()}
            if len(self._under_way) >= 2:
                return False
            if self._ahead is None:
                self._ahead = ThreadPoolExecutor(2, thread_name_prefix="plimsoll-features")
            self._under_way.add(self._ahead.submit(self._warm, ids[:_AHEAD_MOST]))
            return True

    def _warm(self, ids: np.ndarray) -> None:
        with contextlib.suppress(Exception), self._reading() as (store, _):
            first = next(iter(store.columns))  # A sample's features lie together on disk.
            for begin in range(0, len(ids), _PIECE):
                store.read(ids[begin:begin + _PIECE], [first])

    # ---- The rest ---------------------------------------------------------------------------

    def get_cache_performance(self) -> dict[str, Any]:
        """Returns cache_hit_rate, total_requests (samples), disk_load_ratio (blocks read per sample), access_pattern."""
        with self._reading() as (store, _):
            stats = store.stats()
        requests = stats["requests"]
        return {"cache_hit_rate": stats["hit_rate"], "total_requests": requests,
                "disk_load_ratio": stats["blocks_read"] / requests if requests else 0.0,
                "access_pattern": self.access_pattern()}

    def debug_print(self) -> None:
        """Prints the folder, the number of samples, the features' shapes and the cache's statistics."""
        print(f"FeatureManager {self.features_dir}: {self.get_num_chunks()} chunks")
        if self.get_num_chunks() == 0:
            return
        with self._reading() as (store, known):
            print(f"  samples: {known.rows:,}")
            for name, (dtype, shape) in store.columns.items():
                print(f"  {name}: {dtype}{list(shape)}")
        cache = self.get_cache_performance()
        print(f"  cache hit rate: {cache['cache_hit_rate']:.1%} of {cache['total_requests']:,} "
              f"requests, {cache['access_pattern']}")

    def close(self) -> None:
        """Ends reading ahead and returns the slab. Added chunks are on disk already."""
        if os.getpid() != self._pid:
            return
        if self._ahead is not None:
            self._ahead.shutdown(wait=True, cancel_futures=True)
            self._ahead = None
        with self._lock, self._idle:
            while self._readers:
                self._idle.wait()
            if self._store is not None:
                self._store.close()
                self._store = None

    def __enter__(self) -> FeatureManager:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"<FeatureManager {self.features_dir}>"


class _StoredChunk(_Chunk):
    """A chunk of the current generation, to be copied into the next."""

    def __init__(self, manager: FeatureManager, number: int) -> None:
        begin, end = manager._span(number)
        assert manager._ids is not None and manager._store is not None
        known, self._store = manager._ids, manager._store
        names = known.given(range(begin, end)) if known.named else None
        super().__init__(number, known.slice(begin, end), names, {})

    def shape(self) -> dict[str, tuple[str, tuple[int, ...]]]:
        return self._store.columns

    def pieces(self) -> Iterator[tuple[np.ndarray, dict[str, np.ndarray]]]:
        for begin in range(0, len(self.ids), _PIECE):
            ids = self.ids[begin:begin + _PIECE]
            yield ids, dict(self._store.read(ids))


def _column(value: Any, name: str, count: int) -> np.ndarray:
    """Returns a feature as an array of floats. Errors: ValueError naming the feature."""
    if hasattr(value, "detach"):
        value = value.detach().cpu()
        if str(value.dtype) == "torch.bfloat16":
            value = value.float()
    array = np.asarray(_to_numpy(value, name))
    if array.dtype.kind != "f":
        raise ValueError(f"{name}: {array.dtype} where floats are needed")
    if array.ndim < 1 or len(array) != count:
        raise ValueError(f"{name}: shape {array.shape}, but there are {count} sample_ids")
    if not np.isfinite(array).all():
        raise ValueError(f"{name}: NaN or infinity in sample "
                         f"{int(np.argmin(np.isfinite(array.reshape(count, -1)).all(axis=1)))}")
    return np.ascontiguousarray(array)


def _original(number: int, path: pathlib.Path) -> _Chunk:
    """Reads a chunk file of the original: {sample_ids, features, chunk_id, metadata}."""
    held = load_safely(path)
    try:
        ids, names = _ids.parse(held["sample_ids"])
        columns = {name: _column(value, name, len(ids))
                   for name, value in held["features"].items() if value is not None}
    except (KeyError, TypeError, AttributeError, ValueError) as error:
        raise CorruptError(f"{path}: not a chunk of features ({error})") from None
    return _Chunk(number, ids, names, columns)
