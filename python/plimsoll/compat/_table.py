# SPDX-License-Identifier: Apache-2.0
"""Table: the rows behind a TrainableEmbeddingManager, and its counters.

An any-order EmbeddingStore. It is closed and opened again when its slab changes size; the counters
go on. The manager's own reads (copies, statistics) are not counted as requests.

Threads: the manager's lock.
Memory:  the store's slab.
"""
from __future__ import annotations

import json
import math
import os
import pathlib
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import numpy as np

from .. import _core
from ..errors import BudgetExceeded
from ..memory._memory import Governor

_COUNTED = ("requests", "hits", "pages_read", "evictions_clean", "evictions_dirty", "commits",
            "syncs", "bytes_read", "bytes_written")
BATCH_ROWS = 1024  # Larger requests are served in pieces of this; small, so that the floor is low.
WHOLE_TABLE = 1 << 46


def governor_for(given: Governor | None) -> Governor:
    """Returns `given`, else the process's governor, else a new one with 80 % of the machine's free memory."""
    if given is not None:
        return given
    return Governor.current() or Governor()


def native_init(strategy: str, dim: int, seed: int) -> _core.RowInit:
    """Returns the table's initial values. Strategies from features start with zeros and are written afterwards."""
    kinds = _core.RowInitKind
    kind, scale = {
        "normal": (kinds.NORMAL, 0.01),
        "uniform": (kinds.UNIFORM, 0.01),
        # A row is taken as the weights of a layer with `dim` inputs and one output.
        "xavier": (kinds.UNIFORM, math.sqrt(6.0 / (dim + 1))),
        "kaiming": (kinds.UNIFORM, math.sqrt(6.0 / dim)),
    }.get(strategy, (kinds.ZEROS, 0.0))
    return _core.RowInit(kind, scale, seed if scale else 0)


class Table:
    """The rows behind a manager, and their counters. Units: `bytes_wanted` is the most the slab may take; WHOLE_TABLE is all."""

    def __init__(self, governor: Governor, directory: pathlib.Path, dim: int, init: _core.RowInit,
                 ids: np.ndarray | None, rows: int, bytes_wanted: int, advice: str) -> None:
        self._governor = governor
        self._directory = directory
        self._dim = dim
        self._init = init
        self._advice = advice
        self._rows = rows
        self._base = dict.fromkeys(_COUNTED, 0)
        self._ours = dict.fromkeys(("requests", "hits", "pages_read"), 0)
        self.unsynced = 0
        self.commit_at_exit = False
        self._pid = os.getpid()
        self._open(bytes_wanted, ids)
        governor._adopt(self)

    def _open(self, bytes_wanted: int, ids: np.ndarray | None) -> None:
        # Fresh AdamW keeps no optimizer state: a record is the row and its checksum.
        optimizer = _core.RowOptimizerOptions(_core.RowOptimizer.ADAMW_FRESH, 1e-3, 0.9, 0.999,
                                              1e-8, 0.0)
        options = _core.EmbeddingStoreOptions(
            str(self._directory), self._dim, optimizer, self._init, bytes_wanted,
            self._rows if ids is None else 0, ids, -1, BATCH_ROWS, 4, 1)
        try:
            self._core = _core.EmbeddingStore.open(self._governor._core, options)
        except BudgetExceeded as refusal:
            raise BudgetExceeded(f"{refusal}: {self._advice}", refusal.tag,
                                 refusal.requested_bytes, refusal.available_bytes,
                                 refusal.limit_bytes, refusal.held_bytes, self._advice) from None
        self.gather, self.update, self._commit = (
            self._core.gather, self._core.update, self._core.commit)
        self.gather_listed, self.update_listed = (
            self._core.gather_listed, self._core.update_listed)
        self._step = self._core.last_commit
        plan = self._core.slab_plan()
        self.slab_bytes = plan.total_bytes
        self._shrinks = 0
        self.floor_bytes = plan.floor_bytes
        shape = json.loads(_core.describe(str(self._directory)))
        self.page_bytes, self.rows_per_page = shape["page_bytes"], shape["rows_per_page"]

    def warm(self, ids_at: Callable[[int, int], np.ndarray], bytes_most: int) -> None:
        """Reads all pages into memory, uncounted, where the slab holds the whole table and that is at most
        `bytes_most`. One row per page is requested."""
        per_page = self.rows_per_page
        pages = -(-self._rows // per_page)
        if pages > self._core.stats()["frames"] or pages * self.page_bytes > bytes_most:
            return
        rows = np.empty((BATCH_ROWS, self._dim), np.float32)
        step = BATCH_ROWS * per_page
        with self.uncounted():
            for begin in range(0, self._rows, step):
                ids = np.ascontiguousarray(
                    ids_at(begin, min(begin + step, self._rows))[::per_page])
                self.gather(ids, rows[:len(ids)])

    def evicted(self) -> bool:
        """Whether the governor has shrunk the slab under pressure since the last call. A shrink is reported once."""
        before, self._shrinks = self._shrinks, int(self._core.stats()["shrinks"])
        return self._shrinks > before

    def whole_bytes(self) -> int:
        """Returns the approximate bytes of a slab with all pages."""
        pages = -(-self._rows // self.rows_per_page)
        return self.floor_bytes + pages * (self.page_bytes + 64)

    def commit(self) -> None:
        """Makes everything so far durable. Errors: OSError."""
        self._commit(self._step + 1)
        self._step += 1
        self.unsynced = 0

    def reopen(self, bytes_wanted: int) -> None:
        """Commits, and opens the table with a slab of `bytes_wanted`. Cached rows are read again when asked for."""
        if self.unsynced:
            self.commit()
        self._remember()
        self._core.close()
        try:
            self._open(bytes_wanted, None)
        except BudgetExceeded:  # Somebody took the bytes in between: what certainly works.
            self._open(self.floor_bytes, None)

    def _remember(self) -> None:
        now = self._core.stats()
        for name in _COUNTED:
            self._base[name] += int(now[name])

    @contextmanager
    def uncounted(self) -> Iterator[None]:
        """Leaves requests inside the `with` block out of the counters."""
        before = self._core.stats()
        try:
            yield
        finally:
            after = self._core.stats()
            for name in self._ours:
                self._ours[name] += int(after[name] - before[name])

    def stats(self) -> dict[str, int]:
        """Returns the counters of callers' requests since the manager was made; resident_bytes; dirty_bytes."""
        now = self._core.stats()
        total = {name: int(now[name]) + self._base[name] - self._ours.get(name, 0)
                 for name in _COUNTED}
        total["resident_bytes"] = int(now["resident_pages"]) * self.page_bytes
        total["resident_pages"] = int(now["resident_pages"])
        total["dirty_bytes"] = int(now["dirty_bytes"])
        return total

    def check_process(self) -> None:
        """Checks that this is the process that opened the table. Errors: RuntimeError in a forked child."""
        if os.getpid() != self._pid:
            raise RuntimeError("this manager belongs to the process that opened it: read rows "
                               "there, or in threads, which share its memory")

    def close(self) -> None:
        """Commits unsynced updates where commit_at_exit is set, then returns the slab."""
        if os.getpid() != self._pid:
            return
        try:
            if self.unsynced and self.commit_at_exit:
                self.commit()
        finally:
            self._core.close()

    def close_quietly(self) -> None:
        """Closes the table; an exception becomes a warning. For a finalizer, which has no caller."""
        try:
            self.close()
        except Exception as error:
            if self.unsynced:
                warnings.warn(f"{self._directory}: {self.unsynced} updates were not synced: "
                              f"{error}", RuntimeWarning, stacklevel=1)
