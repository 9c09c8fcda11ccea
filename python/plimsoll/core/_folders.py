# SPDX-License-Identifier: Apache-2.0
"""Files and folders that appear whole or not at all, and stay after a power cut.

Threads: pure functions.
"""
from __future__ import annotations

import contextlib
import os
import pathlib
import shutil
from collections.abc import Iterator

from ._room import with_room


def sync_folder(folder: pathlib.Path) -> None:
    """Makes names created, renamed or removed in `folder` durable. Errors: OSError."""
    _sync(folder)


@contextlib.contextmanager
def replaced(path: pathlib.Path, beside: str = "", *, durable: bool = True) -> Iterator[pathlib.Path]:
    """Yields a path beside `path` to write a file or folder to. After the block, that takes the place of `path`.

        with replaced(path) as partial:
            partial.write_text("all of it")

    A reader of the file `path` finds the old content or the whole new one, after a power cut too. An old folder is
    missing for a moment. If the block raises, its output is removed and `path` stays. The next call removes what a
    kill left.

    beside:  the other name, used by one writer at a time; "": that of `path` with ".partial" added.
    durable: False leaves it to the kernel when the data reaches the disk.
    Errors:  OSError.
    """
    partial = path.with_name(beside or path.name + ".partial")
    _remove(partial)
    try:
        yield partial
        if durable:
            for one in (partial, *partial.rglob("*")):
                _sync(one)
        if path.is_dir():
            _remove(path)
        with_room(path, lambda: os.replace(partial, path))
    except BaseException:
        with contextlib.suppress(OSError):
            _remove(partial)
        raise
    if durable:
        sync_folder(path.parent)


def _remove(path: pathlib.Path) -> None:
    """Removes a file, a link or a folder, if it exists."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def _sync(path: pathlib.Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def make_folders(folder: pathlib.Path) -> None:
    """Makes the folder and its missing parents, each durable before the next."""
    folder = folder.absolute()
    there = next(above for above in (folder, *folder.parents) if above.is_dir())
    for depth in range(len(there.parts), len(folder.parts)):
        made = pathlib.Path(*folder.parts[:depth + 1])
        made.mkdir(exist_ok=True)
        sync_folder(made.parent)
