# SPDX-License-Identifier: Apache-2.0
"""Folders and the names in them, durable.

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
    """A name beside `path` for a file or a folder to be written to; then it takes the place of `path`.

        with replaced(path) as partial:
            partial.write_text("all of it")

    Whoever opens the file `path` finds what was there or all that is new, after a power cut too. A folder that was
    there is away for a moment. Where the block raises, what it wrote goes and `path` stays; what a kill left is
    removed by the next.

    beside:  the name, of one writer at a time; "": that of `path` with ".partial" behind it.
    durable: False leaves it to the kernel when the disk gets it.
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
    """A file, a link or a folder; nothing where none is there."""
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
    """Makes a folder and those above it that are missing, each durable before the next."""
    folder = folder.absolute()
    there = next(above for above in (folder, *folder.parents) if above.is_dir())
    for depth in range(len(there.parts), len(folder.parts)):
        made = pathlib.Path(*folder.parts[:depth + 1])
        made.mkdir(exist_ok=True)
        sync_folder(made.parent)
