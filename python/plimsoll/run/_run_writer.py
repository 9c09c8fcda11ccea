# SPDX-License-Identifier: Apache-2.0
"""Writer: one commit on its way to disk while training goes on.

What is committed is first copied where it fits beside the most that tensors have taken so far; a thread
serialises the copy, writes it, syncs and publishes. The loop waits for the copy, not for the disk.

Threads: one, for as long as a commit is written; the rest is for the thread that trains.
Memory:  the storages of one commit, leased; no copy is made where it does not fit.
"""
from __future__ import annotations

import contextlib
import mmap
import threading
import time
import traceback
from collections.abc import Callable
from typing import Any

from ..errors import BudgetExceeded
from ..memory._memory import Governor, Lease
from ..training._checkpoint import copied

_SPARE = 1 << 20  # Bytes for what is not a tensor, and for writing.
_ALIGNED = 64  # Bytes: storages begin there, as torch's own do.


class Image:
    """A copy of what is committed, its tensors in memory that was leased. Forked children do not get it."""

    def __init__(self, content: dict[str, Any], room: int, lease: Lease) -> None:
        """room: bytes, of room_for()."""
        import torch

        self._pages = mmap.mmap(-1, max(1, room), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        self._lease = lease
        self._pages.madvise(mmap.MADV_DONTFORK)
        with contextlib.suppress(OSError):  # Of a kernel without huge pages.
            self._pages.madvise(mmap.MADV_HUGEPAGE)
        used, storages = 0, {}

        def storage_of(tensor: torch.Tensor) -> torch.UntypedStorage:
            nonlocal used
            source = tensor.untyped_storage()
            if source._cdata not in storages:
                size = source.nbytes()
                copy = torch.frombuffer(self._pages, dtype=torch.uint8, count=size, offset=used)
                copy.copy_(torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(source))
                storages[source._cdata] = copy.untyped_storage()
                used += aligned(size)
            return storages[source._cdata]

        def copy_of(tensor: torch.Tensor) -> torch.Tensor:
            if not tensor.untyped_storage().nbytes():
                return tensor
            copy = torch.empty(0, dtype=tensor.dtype)
            copy.set_(storage_of(tensor), tensor.storage_offset(), tensor.size(), tensor.stride())
            return copy.requires_grad_(tensor.requires_grad)

        with torch.no_grad():
            self.content: dict[str, Any] = copied(content, copy_of)
        """The content for torch.save(), with tensors on the host; until close()."""

    @classmethod
    def of(cls, content: dict[str, Any], governor: Governor) -> Image | None:
        """None where there is no room for it, or it holds tensors of a kind that has no plain bytes."""
        room = room_for(content)
        ledger = governor.ledger()
        tensors = ledger.pools["tensors"]
        in_a_step = max(0, tensors.peak_bytes - max(tensors.leased_bytes, tensors.floor_bytes))
        if room is None or room + _SPARE > ledger.free_bytes - in_a_step:
            return None
        try:
            lease = governor.reserve(room + _SPARE)
        except BudgetExceeded:
            return None
        try:
            return cls(content, room, lease)
        except OSError:
            lease.close()
            return None
        except BaseException:
            lease.close()
            raise

    def close(self) -> None:
        self.content = {}
        self._pages.close()
        self._lease.close()


def aligned(size: int) -> int:
    return -(-size // _ALIGNED) * _ALIGNED


def room_for(content: Any) -> int | None:
    """Bytes of the storages, each once; None: one of them cannot be copied as bytes."""
    import torch

    storages: dict[int, int] = {}

    def plain(value: Any) -> bool:
        if isinstance(value, torch.Tensor):
            if (type(value) not in (torch.Tensor, torch.nn.Parameter) or value.layout != torch.strided
                    or value.is_quantized or value.is_conj() or value.is_neg()):
                return False
            storage = value.untyped_storage()
            storages[storage._cdata] = aligned(storage.nbytes())
        elif isinstance(value, dict):
            return all(plain(inner) for inner in value.values())
        elif isinstance(value, (list, tuple)):
            return all(plain(inner) for inner in value)
        return True

    return sum(storages.values()) if plain(content) else None


class Writer:
    """Writes one commit in a thread, and holds its outcome."""

    def __init__(self, image: Image, step: int, began: float, work: Callable[[], int]) -> None:
        """began: when the loop began to wait, by time.monotonic(). work: writes and publishes; gives the
        bytes of the file. Nothing is written before start(), nor is the image closed."""
        self.step, self._began = step, began
        self.size, self.seconds = 0, 0.0
        """Bytes of the file, and until it was published; of one that is done."""
        self.stall_seconds = time.monotonic() - began
        """Seconds that the loop has waited."""
        self.error: BaseException | None = None
        """Why it was not published; of one that is done."""
        self._image = image
        self._left = [work]  # Of the thread that takes it, which closes the image as well.
        self._done = False
        self._writing = threading.Lock()  # Thread.join() that is interrupted takes the thread for ended.
        self._writing.acquire()

    def start(self) -> None:
        """Begins to write. What interrupts it, such as a stop of the watcher, may leave the thread there or not: wait()
        has the commit written in any case."""
        threading.Thread(target=self._run, name="plimsoll-commit").start()

    def _run(self) -> None:
        try:
            work = self._left.pop()
        except IndexError:  # It began before start() was interrupted.
            return
        try:
            self.size = work()
        except BaseException as error:  # Raised where the loop looks.
            traceback.clear_frames(error.__traceback__)  # They have the copy's tensors.
            self.error = error
        finally:
            self._image.close()
            self.seconds = time.monotonic() - self._began
            self._done = True
            self._writing.release()

    @property
    def done(self) -> bool:
        return self._done

    def wait(self) -> None:
        """Until it is done: Ctrl-C and a stop of the watcher come through then. Errors: `error`."""
        interrupted: BaseException | None = None
        while not self._done:
            try:
                if self._left:
                    self.start()
                self._writing.acquire()
            except BaseException as error:
                interrupted = error
                if isinstance(error, RuntimeError):  # There may be no thread to be had.
                    self._run()
        if self.error is not None:
            raise self.error
        if interrupted is not None:
            raise interrupted
