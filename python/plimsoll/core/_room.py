# SPDX-License-Identifier: Apache-2.0
"""Files and names that a commit makes. In a run, they wait for room while the disk is full (os/room.h).

Threads: any; a RoomFile has one owner.   Memory: none.
"""
from __future__ import annotations

import errno
import io
import os
from collections.abc import Callable
from typing import Any, TypeVar

from .. import _core

_NAME = 4096  # Bytes that a new name may take on the disk.

Made = TypeVar("Made")


def is_full(error: OSError) -> bool:
    """Whether the error says that the disk is full."""
    return error.errno in (errno.ENOSPC, errno.EDQUOT)


def with_room(path: str | os.PathLike[str], work: Callable[[], Made], size: int = _NAME) -> Made:
    """Returns work(), which makes `path` or writes `size` bytes of it. While the disk is full, waits and calls it again.

    Errors: those of `work`; OSError for a full disk outside a run, or in a run that is asked to stop.
    """
    need = None
    try:
        while True:
            try:
                return work()
            except OSError as error:
                need = need or _core.RoomNeed(os.fspath(path))
                if not is_full(error) or not need.wait(size):
                    raise
    finally:
        if need is not None:
            need.close()


class RoomFile(io.FileIO):
    """A new file whose writes wait while the disk is full."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        with_room(path, lambda: super(RoomFile, self).__init__(path, "x"))
        self._path = path

    def write(self, data: Any) -> int:
        return int(with_room(self._path, lambda: super(RoomFile, self).write(data), memoryview(data).nbytes))
