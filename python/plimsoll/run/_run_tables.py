# SPDX-License-Identifier: Apache-2.0
"""Where the tables of a run are whose rows are dealt to ranks, and how another number of ranks gets them.

    embeddings/NAME                  of one process
    embeddings-4-0/rank-2/NAME       of rank 2 of 4, which began with them
    embeddings-2-120/rank-1/NAME     of rank 1 of 2, made of those that the commit of step 120 names

A commit names the folder. Tables of another number of ranks are made beside those, each renamed when it is whole; the first commit that
names the new folder is followed by the end of the old one. So a crash at any moment leaves one of them whole, and what was
made is not made again.

Threads: the thread that trains.
Memory:  while a table is made, its slab and that of one it is made of; some thousand ids at a time.
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
    """Folders of the tables in one life. step: that of the commit to go on from, −1: none. named: the commit's folder, of `before` ranks."""

    def __init__(self, root: pathlib.Path, rank: int, ranks: int, step: int, named: str, before: int) -> None:
        self._root, self._rank, self._ranks, self._step = root, rank, ranks, step
        self._before, self._old = before, named
        new = "embeddings" if ranks == 1 else f"embeddings-{ranks}-0"
        self.name = new if step < 0 else named if before == ranks else f"embeddings-{ranks}-{step}"
        """The folder that the next commit names."""

    def path(self, name: str) -> pathlib.Path:
        """This rank's table."""
        return self._path(self.name, self._rank, name)

    @contextlib.contextmanager
    def which(self, rows: int, path: str | os.PathLike[str], ids: Callable[[], Any] | None = None) -> Iterator[dict[str, Any]]:
        """Which rows EmbeddingStore.open() makes the table at `path` of: of the ids from 0 to rows − 1 those of this rank, in their order.
        ids: makes those of a table of one process.

        Nothing where that is there already: it was made so, and a commit's tables are compared by what was said of them. Meanwhile the
        ids are in a file without a name in the run's folder. Errors: OSError.
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
            yield {"ids": np.memmap(file, np.int64, "r")} if file.tell() else {"rows_max": 1}  # None.

    def move(self, name: str, made: Callable[[str], EmbeddingStore], read: Callable[[str], EmbeddingStore]) -> None:
        """Makes this rank's table of those that the commit names, where it is not there yet.

        made: a new table at a path; read: one at a path as it was committed. Errors: CorruptError; OSError; BudgetExceeded.
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
        """Ends folders that no commit names, and that are not being made."""
        keep = {self.name} if self._step < 0 else {self.name, self._old}
        for one in self._root.glob("embeddings*"):
            if one.name not in keep and one.is_dir():
                shutil.rmtree(one)

    def committed(self) -> None:
        """After a commit that named `name`, by the rank that writes."""
        self._old = self.name
        self.clear()

    def _path(self, folder: str, rank: int, name: str) -> pathlib.Path:
        whole = self._root / folder
        return whole / name if folder == "embeddings" else whole / f"rank-{rank}" / name
