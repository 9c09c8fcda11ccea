# SPDX-License-Identifier: Apache-2.0
"""Writer: one commit on its way to disk while training goes on.

What is committed is first copied, as the bytes of its file, where they fit beside the most that tensors
have taken so far; a thread writes them, syncs and publishes. The loop waits for the copy, not for the disk.

Threads: one, for as long as a commit is written; the rest is for the thread that trains.
Memory:  the file of one commit, leased; no copy is made where it does not fit.
"""
from __future__ import annotations

import contextlib
import mmap
import threading
import time
from collections.abc import Callable
from typing import IO, Any

from ._memory import Governor, Lease
from .errors import BudgetExceeded

_SPARE = 1 << 20  # Bytes for what is not a tensor.
_RECORD = 1 << 10  # Bytes that a file has for each storage beside its content.


class Image:
    """The bytes of a checkpoint's file. Forked children do not get them."""

    def __init__(self, room: int, lease: Lease) -> None:
        self._pages = mmap.mmap(-1, room, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        self._lease = lease
        self._pages.madvise(mmap.MADV_DONTFORK)
        with contextlib.suppress(OSError):  # Of a kernel without huge pages.
            self._pages.madvise(mmap.MADV_HUGEPAGE)

    @classmethod
    def of(cls, content: dict[str, Any], governor: Governor) -> Image | None:
        """Of what torch.save() takes; None where there is no room for it."""
        import torch

        room = _room_for(content)
        ledger = governor.ledger()
        tensors = ledger.pools["tensors"]
        in_a_step = max(0, tensors.peak_bytes - max(tensors.leased_bytes, tensors.floor_bytes))
        if room > ledger.free_bytes - in_a_step:
            return None
        try:
            lease = governor.reserve(room)
        except BudgetExceeded:
            return None
        try:
            image = cls(room, lease)
        except OSError:
            lease.close()
            return None
        try:
            torch.save(content, image._pages)
        except RuntimeError:  # More than was thought; the file itself is written instead.
            image.close()
            return None
        lease.shrink(image._pages.tell())
        return image

    def write_to(self, file: IO[bytes]) -> None:
        with memoryview(self._pages) as view:
            file.write(view[:self._pages.tell()])

    def close(self) -> None:
        self._pages.close()
        self._lease.close()


def _room_for(content: Any) -> int:
    import torch

    storages: dict[int, int] = {}

    def visit(value: Any) -> None:
        if isinstance(value, torch.Tensor):
            storage = value.untyped_storage()
            storages[storage._cdata] = storage.nbytes()
        elif isinstance(value, dict):
            for inner in value.values():
                visit(inner)
        elif isinstance(value, (list, tuple)):
            for inner in value:
                visit(inner)

    visit(content)
    return _SPARE + sum(size + _RECORD for size in storages.values())


class Writer:
    """Of one commit: its thread, and what became of it."""

    def __init__(self, image: Image, step: int, began: float, work: Callable[[], int]) -> None:
        """began: when the loop began to wait, by time.monotonic(). work: writes and publishes; gives the
        bytes of the file."""
        self.step, self._began = step, began
        self.size, self.seconds = 0, 0.0
        """Bytes of the file, and until it was published; of one that is done."""
        self.stall_seconds = time.monotonic() - began
        """That the loop has waited."""
        self.error: BaseException | None = None
        """Why it was not published; of one that is done."""
        self._image, self._work = image, work
        self._thread = threading.Thread(target=self._run, name="plimsoll-commit")
        self._thread.start()

    def _run(self) -> None:
        try:
            self.size = self._work()
        except BaseException as error:  # Raised where the loop looks.
            self.error = error
        finally:
            self._image.close()
            self.seconds = time.monotonic() - self._began

    @property
    def done(self) -> bool:
        return not self._thread.is_alive()

    def wait(self) -> None:
        """Until it is done: Ctrl-C and a stop of the watcher come through then. Errors: `error`."""
        interrupted: BaseException | None = None
        while not self.done:
            try:
                self._thread.join()
            except BaseException as error:
                interrupted = error
        if self.error is not None:
            raise self.error
        if interrupted is not None:
            raise interrupted
