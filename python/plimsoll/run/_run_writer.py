# SPDX-License-Identifier: Apache-2.0
"""Writer: writes one commit to disk in a thread while training continues.

The content is first copied, if it fits beside the most memory that tensors have taken so far. A thread
serialises the copy, writes it, syncs and publishes. The loop waits for the copy, not for the disk.

Threads: one, for as long as a commit is written; the rest is for the thread that trains.
Memory:  the storages of one commit, leased; without room, no copy is made.
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

_SPARE = 1 << 20  # Bytes for values other than tensors, and for writing.
_ALIGNED = 64  # Alignment of storages in bytes, the same as torch's.


class Image:
    """A copy of a commit's content, with tensors in leased memory. Forked processes do not inherit it."""

    def __init__(self, content: dict[str, Any], room: int, lease: Lease) -> None:
        """Copies the content. room: bytes, from room_for()."""
        import torch

        self._pages = mmap.mmap(-1, max(1, room), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        self._lease = lease
        self._pages.madvise(mmap.MADV_DONTFORK)
        with contextlib.suppress(OSError):  # A kernel without huge pages.
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
        """The content for torch.save(), with tensors on the host; valid until close()."""

    @classmethod
    def of(cls, content: dict[str, Any], governor: Governor) -> Image | None:
        """Makes a copy of the content; None without room for it, or if a tensor has no plain bytes."""
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
    """Returns the bytes of all storages, each counted once; None: one of them cannot be copied as bytes."""
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
        """Takes the copy. began: when the loop began to wait, by time.monotonic(). work: writes and publishes; returns the
        bytes of the file. Nothing is written before start(), nor is the image closed.
        """
        self.step, self._began = step, began
        self.size, self.seconds = 0, 0.0
        """Seconds until it was published, and in `size` the bytes of the file; set when `done`."""
        self.stall_seconds = time.monotonic() - began
        """Seconds that the loop waited for the copy."""
        self.error: BaseException | None = None
        """The error that kept it from being published; set when `done`."""
        self._image = image
        self._left = [work]  # The thread that takes it also closes the image.
        self._done = False
        self._writing = threading.Lock()  # Not Thread.join(): interrupted, it takes the thread for ended.
        self._writing.acquire()

    def start(self) -> None:
        """Begins to write. If a stop of the watcher interrupts it, the thread may or may not have started: wait()
        completes the commit in any case.
        """
        threading.Thread(target=self._run, name="plimsoll-commit").start()

    def _run(self) -> None:
        try:
            work = self._left.pop()
        except IndexError:  # Another thread has it: start() was interrupted after that began.
            return
        try:
            self.size = work()
        except BaseException as error:  # Raised by wait(), in the loop.
            traceback.clear_frames(error.__traceback__)  # The frames keep the copy's tensors alive.
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
        """Waits until the commit is written. Ctrl-C and a stop of the watcher are raised after that. Errors: `error`."""
        interrupted: BaseException | None = None
        while not self._done:
            try:
                if self._left:
                    self.start()
                self._writing.acquire()
            except BaseException as error:
                interrupted = error
                if isinstance(error, RuntimeError):  # No thread could be started: write here.
                    self._run()
        if self.error is not None:
            raise self.error
        if interrupted is not None:
            raise interrupted
