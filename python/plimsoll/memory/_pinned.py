# SPDX-License-Identifier: Apache-2.0
"""Pinned (page-locked) host memory, which a device reads and writes directly, and copies on a stream beside the computation.

The memory is mapped here and registered with the device's driver, in whole pages and exactly as large as asked. Torch's own pool
rounds up to a power of two. Two orderings hold for every copy to a device. The copy waits for the work that the compute stream had
when the target was allocated, as pending kernels may still use that memory. And the compute stream waits for the copy before the
target is used, or freed unused.

Reading order: pinned(), CopyStream, Pinned, HostSlots, FromDevice.

Threads: HostSlots has one that writes slots and begins copies; all else is for the thread that computes.
Memory:  the slots, leased from the host's ledger as "pinned"; targets belong to the device's allocator.
"""
from __future__ import annotations

import concurrent.futures
import contextlib
import ctypes
import functools
import mmap
import os
import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from .._core import format_bytes

if TYPE_CHECKING:
    import torch

    from ._memory import Governor

_ALIGNED = 256  # Bytes, as devices align their tensors.
_PORTABLE = 1  # cudaHostRegisterPortable: for all devices of the process.


class NotPinned(RuntimeError):
    """The error of a device's driver that registers no more host memory."""


def mapped(size: int) -> mmap.mmap:
    """Returns private memory of `size` bytes, not inherited by forked processes, in huge pages where the kernel has them."""
    memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    memory.madvise(mmap.MADV_DONTFORK)
    with contextlib.suppress(OSError):  # A kernel without huge pages.
        memory.madvise(mmap.MADV_HUGEPAGE)
    return memory


def pinned(size: int, device: torch.device) -> np.ndarray:
    """Returns uint8 [size] of host memory that the device reads directly. It lives as long as an array or tensor over it.

    Errors: NotPinned, with the driver's number.
    """
    import torch

    runtime: Any = getattr(torch.get_device_module(device), "cudart", None)
    if runtime is None:  # Not a CUDA device: torch pins.
        try:
            return torch.empty(size, dtype=torch.uint8, pin_memory=True).numpy()
        except RuntimeError as error:
            raise NotPinned(f"{format_bytes(size)} of host memory could not be pinned for {device}: {str(error).splitlines()[0]}") from None
    array = np.frombuffer(mapped(size), dtype=np.uint8)
    status = int(runtime().cudaHostRegister(array.ctypes.data, size, _PORTABLE))
    if status != 0:
        raise NotPinned(f"{format_bytes(size)} of host memory could not be registered with {device}: cudaHostRegister gives {status}")
    # The array's finalizers run before its memory is unmapped; those of the mapping run too late.
    _when_it_goes(array, functools.partial(runtime().cudaHostUnregister, array.ctypes.data))
    return array


def driver_of(device: torch.device | None) -> tuple[int, int, int]:
    """Returns (register, unregister, flags): addresses of the C functions (data, size, flags) and (data) that register host memory with
    the device, and their flags. Both functions return 0 for success. Addresses are 0 for the CPU and for unknown devices; copies then
    go through the driver's own memory.
    """
    add, remove = DRIVERS[device.type]() if device is not None and device.type in DRIVERS else (0, 0)
    return add, remove, _PORTABLE


def _cuda_driver() -> tuple[int, int]:
    """Returns the addresses of cudaHostRegister and cudaHostUnregister in the CUDA runtime that torch has loaded; 0 for none."""
    with open("/proc/self/maps", encoding="utf-8", errors="surrogateescape") as maps:
        runtimes = {line.split(maxsplit=5)[5].rstrip("\n") for line in maps if "/libcudart" in line}
    if not runtimes:
        return 0, 0
    library = ctypes.CDLL(min(runtimes))
    add, remove = (ctypes.cast(call, ctypes.c_void_p).value or 0 for call in (library.cudaHostRegister, library.cudaHostUnregister))
    return add, remove


DRIVERS: dict[str, Callable[[], tuple[int, int]]] = {"cuda": _cuda_driver}
"""Functions that return the addresses, by the type of a device."""


def _when_it_goes(array: np.ndarray, call: Callable[[], object]) -> None:
    """Calls `call` when the array is freed, in this process alone: a forked one has neither the memory nor the device."""
    process = os.getpid()
    weakref.finalize(array, lambda: os.getpid() == process and call()).atexit = False


class CopyStream:
    """A stream of copies to and from a device, beside the stream that computes."""

    def __init__(self, device: torch.device) -> None:
        """Makes the stream. device: a torch.device with its number."""
        import torch

        self.device = device
        self._stream = torch.Stream(device=device)

    def compute(self) -> torch.Stream:
        """Returns the stream on which this thread computes."""
        import torch

        return torch.accelerator.current_stream(self.device)

    def copies(self, targets: Iterable[torch.Tensor], sources: Iterable[torch.Tensor], after: torch.Event) -> torch.Event:
        """Begins to copy sources to targets. Returns the event after which all are copied.

        after: an event of the compute stream, recorded when the device's memory was allocated or last written.
        """
        with self._stream:
            self._stream.wait_event(after)
            for target, source in zip(targets, sources, strict=True):
                target.copy_(source, non_blocking=True)
            return self._stream.record_event()


class Pinned:
    """Pinned host memory that grows on demand, leased as "pinned"."""

    def __init__(self, governor: Governor, device: torch.device) -> None:
        self._governor, self._device = governor, device
        self._bytes: torch.Tensor | None = None
        self.size = 0
        """Leased bytes."""

    def grow(self, size: int) -> None:
        """Makes room for `size` bytes; the former content is lost. Requires: no copy to or from the memory is pending.

        Errors: BudgetExceeded; NotPinned; then there is no room at all.
        """
        import torch

        if size <= self.size:
            return
        self.close()  # First, as old and new together would need twice the room.
        size = -(-size // mmap.PAGESIZE) * mmap.PAGESIZE
        lease = self._governor.reserve(size, "pinned")
        try:
            array = pinned(size, self._device)
        except BaseException:
            lease.close()
            raise
        _when_it_goes(array, lease.close)
        self._bytes, self.size = torch.from_numpy(array), size

    def views(self, like: Sequence[Like]) -> list[torch.Tensor]:
        """Returns tensors over the memory, one after another. Requires: bytes_of(like) fit."""
        import torch

        assert self._bytes is not None
        found, begin = [], 0
        for one in like:
            flat = self._bytes[begin:begin + one.bytes].view(one.dtype)
            found.append(torch.as_strided(flat, one.shape, one.strides, flat.storage_offset()))
            begin += -(-one.bytes // _ALIGNED) * _ALIGNED
        return found

    def close(self) -> None:
        """Releases the memory, which is freed with the last tensor over it."""
        self._bytes, self.size = None, 0


class Like(NamedTuple):
    """The shape, strides and dtype of a tensor. Its strides leave no gap."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: torch.dtype
    bytes: int

    @classmethod
    def dense(cls, shape: tuple[int, ...], dtype: torch.dtype) -> Like:
        """Makes the description of a contiguous tensor."""
        import torch

        meta = torch.empty(shape, dtype=dtype, device="meta")
        return cls(shape, meta.stride(), dtype, meta.nbytes)


def bytes_of(like: Sequence[Like]) -> int:
    """Returns the bytes of a slot for such tensors."""
    return sum(-(-one.bytes // _ALIGNED) * _ALIGNED for one in like)


class _Slot:
    def __init__(self, memory: Pinned) -> None:
        self.memory = memory
        self.free: torch.Event | None = None
        """The event after which the slot may be written: all copies from it are complete."""

    def wait(self) -> None:
        if self.free is not None:
            self.free.synchronize()
            self.free = None


class Sent:
    """Tensors that are being copied to a device."""

    def __init__(self, copies: CopyStream, tensors: list[torch.Tensor],
                 begun: concurrent.futures.Future[tuple[torch.Event, list[torch.Tensor]]]) -> None:
        """Takes the pending copy. begun: resolves when the copies begin, to the event of their end and the slot's tensors."""
        self._copies, self._tensors, self._begun = copies, tensors, begun
        self.over = False
        """Whether the tensors have arrived, or never will."""

    def arrive(self) -> list[torch.Tensor]:
        """Returns the tensors, once. The compute stream waits for the copies; this thread waits until they begin.

        Errors: those of `fill`; torch.OutOfMemoryError after give_back().
        """
        self.over = True
        event, sources = self._begun.result()
        tensors, self._tensors = self._tensors, []
        if not tensors:
            return [one.to(self._copies.device, copy=True) for one in sources]
        self._copies.compute().wait_event(event)
        return tensors

    def begun(self) -> None:
        """Waits until the copies begin, when the slot holds the values. Errors: those of `fill`."""
        self._begun.result()

    def give_back(self) -> None:
        """Frees the device's memory of the tensors. The slot keeps their values for arrive()."""
        with contextlib.suppress(Exception):  # arrive() raises it.
            event, _ = self._begun.result()
            self._copies.compute().wait_event(event)
        self._tensors = []

    def drop(self) -> None:
        """Frees the device's memory of tensors that are no longer needed."""
        self.over = True
        self.give_back()


class HostSlots:
    """Two slots of pinned host memory, used in turn, through which tensors are copied to a device while it computes."""

    def __init__(self, governor: Governor, device: torch.device) -> None:
        """Makes empty slots. device: a torch.device with its number."""
        self._copies = CopyStream(device)
        self._slots = [_Slot(Pinned(governor, device)) for _ in range(2)]
        self._turn = 0
        self._sent: weakref.ref[Sent] | None = None
        self._thread: concurrent.futures.ThreadPoolExecutor | None = None
        governor._adopt(self)
        governor._on_their_way.add(self)
        self._process = os.getpid()

    @property
    def device(self) -> torch.device:
        """The device that tensors are copied to."""
        return self._copies.device

    @property
    def busy(self) -> bool:
        """Whether the last tensors sent have not arrived, so that the slots may hold their only values."""
        sent = self._sent() if self._sent is not None else None
        return sent is not None and not sent.over

    def admit(self, size: int) -> None:
        """Leases slots of `size` bytes now. Errors: those of Pinned.grow()."""
        for slot in self._slots:
            slot.wait()
            slot.memory.grow(size)

    def send(self, like: Sequence[Like], fill: Callable[[list[torch.Tensor]], object]) -> Sent:
        """Begins to copy tensors described by `like` to the device. Requires: the last ones sent have arrived or were dropped.

        fill: writes the values to the given host tensors. It runs in a thread of its own, once the slot's last copies are complete.
        Errors: BudgetExceeded, where the host has no room for the slot; NotPinned; torch.OutOfMemoryError.
        """
        if self._thread is None:
            self._thread = concurrent.futures.ThreadPoolExecutor(1, "plimsoll-copies")
        assert not self.busy
        slot, targets, taken = self._taken(like)
        sent = Sent(self._copies, targets, self._thread.submit(self._begin, slot, like, targets, taken, fill))
        self._sent = weakref.ref(sent)
        return sent

    def bring(self, like: Sequence[Like], fill: Callable[[list[torch.Tensor]], object]) -> list[torch.Tensor]:
        """Returns tensors on the device, for which the compute stream waits. `fill` runs in this thread. Errors: those of send() and `fill`."""
        slot, targets, taken = self._taken(like)
        event, _ = self._begin(slot, like, targets, taken, fill)
        self._copies.compute().wait_event(event)
        return targets

    def _taken(self, like: Sequence[Like]) -> tuple[_Slot, list[torch.Tensor], torch.Event]:
        """Returns the next slot, with room, tensors on the device, and the event of their allocation."""
        import torch

        slot = self._slots[self._turn]
        if (size := bytes_of(like)) > slot.memory.size:
            slot.wait()
            slot.memory.grow(size)
        targets = [torch.empty_strided(one.shape, one.strides, dtype=one.dtype, device=self.device) for one in like]
        self._turn = 1 - self._turn
        return slot, targets, self._copies.compute().record_event()

    def _begin(self, slot: _Slot, like: Sequence[Like], targets: list[torch.Tensor], taken: torch.Event,
               fill: Callable[[list[torch.Tensor]], object]) -> tuple[torch.Event, list[torch.Tensor]]:
        slot.wait()
        sources = slot.memory.views(like)
        fill(sources)
        slot.free = self._copies.copies(targets, sources, taken)
        return slot.free, sources

    def give_back(self) -> None:
        """Frees the device's memory of tensors that have not arrived."""
        sent = self._sent() if self._sent is not None else None
        if sent is not None and not sent.over:
            sent.give_back()

    def close(self) -> None:
        """Ends the thread and releases the slots. Does nothing in a forked process."""
        if os.getpid() != self._process:
            return
        if self._thread is not None:
            self._thread.shutdown()
            self._thread = None
        for slot in self._slots:
            slot.wait()
            slot.memory.close()


class FromDevice:
    """Pinned host memory that receives tensors from a device."""

    def __init__(self, governor: Governor, device: torch.device) -> None:
        """Makes it without memory. device: a torch.device with its number."""
        self._copies, self._memory = CopyStream(device), Pinned(governor, device)
        governor._adopt(self)

    def fetch(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Returns contiguous copies in host memory, valid until the next call. This thread waits for these copies alone.

        Errors: BudgetExceeded; NotPinned.
        """
        like = [Like.dense(tuple(one.shape), one.dtype) for one in tensors]
        self._memory.grow(bytes_of(like))
        found = self._memory.views(like)
        self._copies.copies(found, tensors, self._copies.compute().record_event()).synchronize()
        return found

    def close(self) -> None:
        """Releases the memory."""
        self._memory.close()
