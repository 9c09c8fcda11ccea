# SPDX-License-Identifier: Apache-2.0
"""Folders of tables whose rows are divided among ranks, and their conversion for another number of ranks.

    embeddings/NAME                  of one process
    embeddings-4-0/rank-2/NAME       of rank 2 of 4, which began the run
    embeddings-2-120/rank-1/NAME     of rank 1 of 2, made from the tables that the commit of step 120 names

A commit names the folder. Tables for another number of ranks are made beside the old ones, each renamed when it is complete. After the
first commit that names the new folder, the old one is deleted. So a crash at any moment leaves one folder complete, and
tables already made are not made again.

Threads: the thread that trains.
Memory:  while a table is made, its slab and that of one source table; some thousand ids at a time.
"""
from __future__ import annotations

import contextlib
import os
import pathlib
import shutil
import tempfile
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from ..core._folders import sync_folder
from ..rows._embedding import EmbeddingStore, is_table
from ..rows._rank_rows import moved, overlap, owners_of

_AT_ONCE = 1 << 16  # Ids.


class TableFolders:
    """Folders of the tables. step: that of the commit to resume from, −1: none. named: the commit's folder, for `before` ranks."""

    def __init__(self, root: pathlib.Path, rank: int, ranks: int, step: int, named: str, before: int) -> None:
        self._root, self._rank, self._ranks, self._step = root, rank, ranks, step
        self._before, self._old = before, named
        new = "embeddings" if ranks == 1 else f"embeddings-{ranks}-0"
        self.name = new if step < 0 else named if before == ranks else f"embeddings-{ranks}-{step}"
        """The folder that the next commit names."""

    def path(self, name: str) -> pathlib.Path:
        """Returns the path of this rank's table."""
        return self._path(self.name, self._rank, name)

    @contextlib.contextmanager
    def which(self, rows: int, path: str | os.PathLike[str], ids: Callable[[], Any] | None = None) -> Iterator[dict[str, Any]]:
        """Yields the arguments of EmbeddingStore.open() that choose this rank's rows, among ids from 0 to rows − 1, for the table at `path`.
        ids: makes the ids of a table of one process.

        Yields {} if the table exists: it was made so, and the commit's record of it is compared elsewhere. During the block the
        ids are in an unnamed file in the run's folder. Errors: OSError.
        """
        if self._ranks == 1:
            yield {"rows": rows} if ids is None or self._step >= 0 else {"ids": ids()}
            return
        if is_table(path):
            yield {}
            return
        with tempfile.TemporaryFile(dir=self._root) as file:
            for begin in range(0, rows, _AT_ONCE):
                some = np.arange(begin, min(begin + _AT_ONCE, rows), dtype=np.int64)
                file.write(memoryview(some[owners_of(some, self._ranks) == self._rank]))
            file.flush()
            yield {"ids": np.memmap(file, np.int64, "r")} if file.tell() else {"rows_max": 1}  # This rank has no rows.

    def move(self, name: str, made: Callable[[str], EmbeddingStore], read: Callable[[str], EmbeddingStore]) -> None:
        """Makes this rank's table from the tables that the commit names, unless it exists.

        made: makes a new table at a path; read: opens the committed one at a path. Errors: CorruptError; OSError; BudgetExceeded.
        """
        path = self.path(name)
        if self.name == self._old or self._step < 0 or path.exists():
            return
        partial = path.with_name(path.name + ".partial")
        shutil.rmtree(partial, ignore_errors=True)
        partial.parent.mkdir(parents=True, exist_ok=True)
        with made(os.fspath(partial)) as table:
            for rank in range(self._before):
                if overlap(self._rank, self._ranks, rank, self._before):
                    with read(os.fspath(self._path(self._old, rank, name))) as old:
                        moved(table, old, self._rank, self._ranks)
            table.commit(self._step)
        os.rename(partial, path)
        sync_folder(path.parent)

    def clear(self) -> None:
        """Deletes folders that neither the commit nor the current number of ranks uses."""
        keep = {self.name} if self._step < 0 else {self.name, self._old}
        for one in self._root.glob("embeddings*"):
            if one.name not in keep and one.is_dir():
                shutil.rmtree(one)

    def committed(self) -> None:
        """Deletes the old folder, after a commit that named `name`; called by the rank that writes."""
        self._old = self.name
        self.clear()

    def _path(self, folder: str, rank: int, name: str) -> pathlib.Path:
        whole = self._root / folder
        return whole / name if folder == "embeddings" else whole / f"rank-{rank}" / name
