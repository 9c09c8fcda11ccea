# SPDX-License-Identifier: Apache-2.0
"""DeviceRing: the weights of a few blocks on a device, those of the next ones on their way there.

They come from the disk through the slots of a WeightRing, which the device reads by itself (pinned memory). A slot of the device
is memory of its own allocator, and goes back when the last tensor over it is gone.

The order of copies and kernels is that of memory/_pinned.py.

The first blocks stay on the device as far as its limit leaves room beside what steps reserve at most: one more with each step, and
half as many after memory was refused, when all of them go at once.

Threads: one copies; all else is for the thread that trains, and autograd's. Tensors may be let go by any.
Memory:  slots × the largest block on the device, from its allocator, and blocks that stay. In host memory what the WeightRing leases.
"""
from __future__ import annotations

import collections
import contextlib
import gc
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch

from ..memory._pinned import CopyStream
from ._weight_ring import PATIENCE, WeightRing

_FORGOTTEN = 64  # Passes, after which one block more may stay than before a refusal.


class _Slot:
    """A block on the device, or on its way there."""

    def __init__(self, ring: DeviceRing, block: int, after: Sequence[int], stays: bool = False) -> None:
        """Allocates the slot. stays: it is not one of the ring's slots. Errors: torch.OutOfMemoryError."""
        self.block, self.after = block, after
        self.ready: torch.Event | None = None
        self.data = torch.empty(ring.slot_bytes, dtype=torch.uint8, device=ring.device)
        self.taken = ring.copies.compute().record_event()
        if not stays:
            ring.alive += 1
            weakref.finalize(self.data.untyped_storage(), ring.let_go).atexit = False


class DeviceRing:
    """The weights of a WeightRing's blocks, on a device."""

    def __init__(self, host: WeightRing, device: torch.device, slots: int, room: Callable[[], int]) -> None:
        """Makes an empty ring. host: the ring whose slots the device reads, which is this one's from now on. room: returns the unreserved bytes of the
        device, in which blocks may stay.
        """
        self._host, self.device, self._slots = host, device, min(slots, host.count)
        self.slot_bytes = host.slot_bytes
        """Bytes of a slot on the device."""
        self.stall_seconds = 0.0
        """Seconds that use() has waited for a copy to be under way."""
        self.alive = 0
        """Slots with memory on the device."""
        self.copies = CopyStream(device)
        self._changed = threading.Condition()  # Guards what follows.
        self._wanted: list[_Slot] = []  # Whose copies have not begun, the next one first.
        self._there: list[_Slot] = []  # Until another block is used, and they are not wanted: the last one of forward is the first of backward.
        self._error: BaseException | None = None
        self._closed = False
        self._staying: dict[int, _Slot] = {}  # By block.
        self._stay, self._most, self._passes = 0, host.count, 0  # Blocks 0 to _stay − 1 stay; so many at most; passes since some were given back.
        self._room = room
        self._thread = threading.Thread(target=self._copy_ahead, name="plimsoll-device-weights", daemon=True)
        self._thread.start()

    @property
    def bytes(self) -> int:
        """Bytes that are leased of host memory."""
        return self._host.bytes

    @property
    def device_bytes(self) -> int:
        """Bytes of all slots on the device, and of blocks that stay there."""
        return (self._slots + len(self._staying)) * self.slot_bytes

    @property
    def kept_bytes(self) -> int:
        """Bytes of slots that stay a block's, a part of `bytes`."""
        return self._host.kept_bytes

    def let_go(self) -> None:
        """Counts a slot whose memory went back. Called as its last tensor goes."""
        with self._changed:
            self.alive -= 1
            self._changed.notify_all()

    def use(self, block: int, after: Sequence[int] | None = None) -> list[Any]:
        """Returns the block's tensors, uint8, in the order of its places. The compute stream waits for them.

        after: the blocks that will come next, the first one first. They are copied meanwhile where a slot is free. None: a part of the
               block runs again, and those that were named come next.
        Errors: what the disk or the copies met; torch.OutOfMemoryError; RuntimeError (all slots are in use; closed).
        """
        began = time.monotonic()
        with self._changed:
            if after is not None:
                if block == 0:
                    self._passed()
                self._settle([block, *after])
            slot = self._found(block) or self._stayed(block) or self._made(block, after or [])
            while slot.ready is None:
                self._must_go_on()
                self._changed.wait()
            self.stall_seconds += time.monotonic() - began
            self.copies.compute().wait_event(slot.ready)
            tensors = self._host.parts(block, slot.data)
            for one in after or []:
                if self._found(one) is None and self._stayed(one) is None and self.alive < self._slots:
                    with contextlib.suppress(torch.OutOfMemoryError):  # Then it is copied when it is needed.
                        self._ask(one, [])
            return tensors

    def _passed(self) -> None:
        """Lets another block stay, if there is room for two."""
        self._passes += 1
        if self._passes % _FORGOTTEN == 0:
            self._most = min(self._most + 1, self._host.count)
        # A whole step comes first: what it reserves is no room.
        if self._passes > 2 and len(self._staying) == self._stay < self._most and self._room() >= 2 * self.slot_bytes:
            self._stay += 1

    def _stayed(self, block: int) -> _Slot | None:
        """Returns the slot of a block that stays from now on. None: it does not."""
        if block >= self._stay:
            return None
        try:
            slot = self._staying[block] = _Slot(self, block, [], stays=True)
        except torch.OutOfMemoryError:
            self._stay = block
            return None
        self._wanted.append(slot)
        self._changed.notify_all()
        return slot

    def give_back(self) -> None:
        """Gives back the memory of blocks that stay on the device: it was refused to somebody else."""
        with self._changed:
            if not self._staying:
                return
            self._most, self._stay, self._passes = len(self._staying) // 2, 0, 0
            for slot in self._staying.values():
                if slot.ready is not None:
                    self.copies.compute().wait_event(slot.ready)
                else:  # It is on its way, and goes as one that is not wanted.
                    self._there.append(slot)
            self._staying.clear()

    def _found(self, block: int) -> _Slot | None:
        if (slot := self._staying.get(block)) is not None:
            return slot
        return next((one for one in self._there if one.block == block), None)

    def _ask(self, block: int, after: Sequence[int]) -> _Slot:
        slot = _Slot(self, block, after)
        self._there.append(slot)
        self._wanted.append(slot)
        self._changed.notify_all()
        return slot

    def _made(self, block: int, after: Sequence[int]) -> _Slot:
        """Asks for the block, once a slot is free."""
        until = 0.0
        while self.alive >= self._slots:
            self._must_go_on()
            self._settle([block])
            gc.collect()
            if self.alive < self._slots:
                break
            until = until or time.monotonic() + PATIENCE
            if time.monotonic() > until and all(one.ready is not None for one in self._there):
                raise RuntimeError(
                    f"stream_frozen: all {self._slots} slots on {self.device} are in use, and none is left for block {block}: something keeps "
                    "weights of blocks that have run, such as a graph without backward; let it go, or say slots=3 or more")
            self._changed.wait(PATIENCE / 20)
        return self._ask(block, after)

    def _settle(self, wanted: Sequence[int]) -> None:
        """Lets go of slots that are not wanted. One whose copy has begun stays until that is under way, and is waited for."""
        for slot in list(self._there):
            if slot.block in wanted:
                continue
            if slot.ready is not None:
                self.copies.compute().wait_event(slot.ready)
            elif slot in self._wanted:
                self._wanted.remove(slot)
            else:
                continue
            self._there.remove(slot)

    def _must_go_on(self) -> None:
        if self._error is not None:
            raise self._error
        if self._closed:
            raise RuntimeError("stream_frozen: the weights were closed, and the model cannot run any more")

    # ---- The thread that copies ----

    def _copy_ahead(self) -> None:
        held: collections.deque[tuple[Any, Any]] = collections.deque()  # Events, and the host's tensors that are read until then.
        try:
            while (slot := self._next()) is not None:
                sources = self._host.use(slot.block, [one for one in slot.after if one != slot.block])
                ready = self.copies.copies(self._host.parts(slot.block, slot.data), sources, slot.taken)
                held.append((ready, sources))
                del sources
                with self._changed:
                    slot.ready = ready
                    del slot
                    self._changed.notify_all()
                while len(held) >= self._host.slots:  # The next one wants a slot of the host.
                    held.popleft()[0].synchronize()
            for event, _ in held:
                event.synchronize()
        except BaseException as error:  # Raised in the thread that trains.
            with self._changed:
                self._error = error.with_traceback(None)
                self._changed.notify_all()

    def _next(self) -> _Slot | None:
        """Returns the slot to copy to; waits for one. None: closed."""
        with self._changed:
            while not self._closed:
                if self._wanted:
                    return self._wanted.pop(0)
                self._changed.wait()
        return None

    def close(self) -> None:
        """Ends the thread and returns the host's memory; what is in use stays until it is let go."""
        with self._changed:
            if self._closed:
                return
            self._closed = True
            self._changed.notify_all()
        if threading.current_thread() is not self._thread:  # A model may go in any.
            self._thread.join()
        self._there.clear()
        self._staying.clear()
        self._wanted.clear()
        self._host.close()
