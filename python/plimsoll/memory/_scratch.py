# SPDX-License-Identifier: Apache-2.0
"""Folders for temporary state: on a disk, as files on a tmpfs would be memory.

Threads: any.
"""
from __future__ import annotations

import os
import pathlib
import tempfile
from collections.abc import Callable

from .. import _core
from ._memory import Governor

_folder_of_run: Callable[[], pathlib.Path | None] = lambda: None  # noqa: E731


def find_run_by(folder: Callable[[], pathlib.Path | None]) -> None:
    """Sets the function that returns the folder of the run open in this process, or None."""
    global _folder_of_run
    _folder_of_run = folder


def folder_of_run() -> pathlib.Path | None:
    """Returns the folder of the run that is open in this process; None: no run is open."""
    return _folder_of_run()


def scratch_folder(asked: str | os.PathLike[str] | None, option: str) -> str:
    """Returns the folder `asked`, made if missing. For None, returns the first of these that is on a disk and writable: the
    governor's `directory`, the system's folder for temporary files, /var/tmp.

    Errors: ValueError naming `option`, when `asked` is in memory, or no folder qualifies.
    """
    if asked is not None:
        folder = os.fspath(asked)
        if kind := _core.in_memory_file_system(folder):
            raise ValueError(f"{option}: {folder} is on a {kind}, which is memory itself: name a folder "
                             "on a disk, such as the run's")
        os.makedirs(folder, exist_ok=True)
        return folder
    governor = Governor.current()
    candidates = [governor.directory] if governor is not None else ["."]
    candidates += [tempfile.gettempdir(), "/var/tmp"]
    for folder in candidates:
        if (os.path.isdir(folder) and os.access(folder, os.W_OK)
                and not _core.in_memory_file_system(folder)):
            return folder
    raise ValueError(f"{option}: none of {', '.join(candidates)} is a folder on a disk that may be "
                     "written: name one, such as the run's")
