# SPDX-License-Identifier: Apache-2.0
"""WeightRing: the weights of a few blocks in memory, those of the next ones read ahead.

A slot belongs to whoever has tensors over it: the block that runs, and in backward the graph that saved its
weights. Only when the last of them is gone is it read into again, so that no order of use gives stale values.

The last blocks may have a slot each that stays theirs: they are read once, until the governor needs the memory. Which blocks those
are does not matter, as steps go forward and back over all of them; the first ones may stay on a device.

Threads: one reads; all else is for the thread that trains. Tensors may be let go by any.
Memory:  slots × the largest block, and a piece of a file, leased when it is made; what is kept beside them.
"""
from __future__ import annotations

import dataclasses
import gc
import mmap
import os
import threading
import time
import weakref
from collections.abc import Sequence
from typing import Any

import numpy as np

from .. import _core
from ..errors import BudgetExceeded
from ..memory._memory import Governor, format_bytes
from ..memory._pinned import driver_of, mapped, pinned
from ._weight_files import READER_BYTES, Place, WeightReader, laid_out

PATIENCE = 1.0  # Seconds, before slots that are in use are an error.


@dataclasses.dataclass
class _Slot:
    memory: Any
    """A buffer of bytes."""
    block: int = -1
    reading: bool = False
    users: int = 0
    """Arrays over it that are alive."""


@dataclasses.dataclass
class _OwnSlot(_Slot):
    """A slot that stays its block's, unless the governor needs the memory meanwhile."""

    slots: _core.KeptSlots = dataclasses.field(kw_only=True)
    number: int = dataclasses.field(kw_only=True)
    full: bool = False
    """Whether it had the block when it was last looked at."""

    def take(self) -> bool:
        """Whether it is the block's, and in use from now on. Requires: it is not in use."""
        found = self.slots.take(self.number)
        if found == _core.Found.ROOM:
            self.give(False)  # The block went, and memory has come again.
        self.full = found == _core.Found.CONTENT
        return self.full

    def take_to_read(self) -> bool:
        """Whether it has memory to read the block into, and is in use from now on. Requires: it is not in use."""
        self.reading = self.slots.take(self.number) != _core.Found.NOTHING
        return self.reading

    def give(self, full: bool) -> None:
        """Gives the slot back. full: it has the block."""
        self.full = full
        self.slots.give(self.number, full)

    def has_block(self) -> bool:
        return self.users > 0 or self.full and self.slots.has_content(self.number)


class WeightRing:
    """The weights of blocks 0 to n − 1, each a list of places."""

    def __init__(self, blocks: Sequence[Sequence[Place]], slots: int, governor: Governor,
                 reader: WeightReader | None = None, device: Any = None, cache_bytes: int = 0) -> None:
        """Leases the slots. reader: has opened files already, and is the ring's from now on. device: a torch.device that reads the slots directly.
        cache_bytes: for blocks that have a slot of their own. Errors: BudgetExceeded naming what is leased.
        """
        self._blocks = blocks
        laid = [laid_out(block) for block in blocks]
        self._begins = [begins for begins, _ in laid]
        size = max(end for _, end in laid)
        slots = min(slots, len(blocks))
        self.count, self.slots, self.slot_bytes = len(blocks), slots, max(size, 1)
        """Blocks; slots; and bytes of a slot."""
        stride = -(-size // mmap.PAGESIZE) * mmap.PAGESIZE
        self._bytes, count = slots * stride + READER_BYTES, min(cache_bytes // max(stride, 1), len(blocks))
        try:
            self._kept: _core.KeptSlots | None = _core.KeptSlots.open(governor._core, count, self.slot_bytes, self._bytes, *driver_of(device))
        except BudgetExceeded as error:
            cached = f" and cache_bytes for {count} blocks" if count else ""
            raise governor.refusal(
                "weights", self._bytes, f"stream_frozen: {slots} slots of {format_bytes(size)}, the largest block,{cached} are "
                f"refused: {error}") from None
        self._slots = [_Slot(pinned(self.slot_bytes, device) if device is not None else mapped(self.slot_bytes)) for _ in range(slots)]
        self._own = [_OwnSlot(self._kept.array(one), len(blocks) - 1 - one, slots=self._kept, number=one) for one in range(count)]
        self._reader = reader or WeightReader()
        self._changed = threading.Condition()  # Guards slots and what follows.
        self._wanted = list(range(slots))  # Blocks, the next one first.
        self._error: BaseException | None = None
        self._closed = False
        self._process = os.getpid()
        self.stall_seconds = 0.0
        """Seconds that use() has waited for the disk."""
        self._thread = threading.Thread(target=self._read_ahead, name="plimsoll-weights", daemon=True)
        self._thread.start()

    device_bytes = 0
    """Bytes on a device."""

    @property
    def bytes(self) -> int:
        """Bytes that are leased."""
        return self._bytes + self.kept_bytes

    @property
    def kept_bytes(self) -> int:
        """Bytes of slots that stay a block's."""
        return self._kept.leased_bytes if self._kept is not None else 0

    def use(self, block: int, after: Sequence[int] | None = None) -> list[Any]:
        """Returns the block's tensors, uint8, in the order of its places. They use the slot as long as one of them is alive.

        after: the blocks that will come next, the first one first. None: a part of the block runs again, and those that were named come next.
        Errors: those of the reading thread; RuntimeError (all slots are in use; closed; in a forked process).
        """
        if os.getpid() != self._process:
            raise RuntimeError("stream_frozen: a forked process has no streamed weights: run the model in the process "
                               "that made them, or start workers by \"spawn\"")
        with self._changed:
            self._wanted = [block, *(after if after is not None else (one for one in self._wanted if one != block))]
            self._changed.notify_all()
            slot, began, patience = self._slot_of(block), time.monotonic(), 0.0
            while slot is None:
                if self._error is not None:
                    raise self._error
                if self._closed:
                    raise RuntimeError("stream_frozen: the weights were closed, and the model cannot run any more")
                if self._all_in_use():
                    # A collection under way in another thread has collect() return at once, and may be about to let
                    # a slot go: it waits for the lock that is held here.
                    patience = patience or time.monotonic() + PATIENCE
                    if time.monotonic() > patience:
                        raise RuntimeError(
                            f"stream_frozen: all {len(self._slots)} slots are in use, and none is left for block "
                            f"{block}: something keeps weights of blocks that have run, such as a graph without "
                            "backward; let it go, or say slots=3 or more")
                    self._changed.wait(PATIENCE / 20)
                    slot = self._slot_of(block)
                    continue
                self._changed.notify_all()  # A slot may have come free while the other thread looked.
                self._changed.wait()
                slot = self._slot_of(block)
            self.stall_seconds += time.monotonic() - began
            return self._tensors(slot)

    def _all_in_use(self) -> bool:
        if any(one.reading for one in self._own):
            return False
        if all(one.users for one in self._slots):
            gc.collect()
        return all(one.users for one in self._slots)

    def _slot_of(self, block: int) -> _Slot | None:
        if (own := self._own_of(block)) is not None and own.full and not own.reading and (own.users or own.take()):
            return own
        return next((one for one in self._slots if one.block == block and not one.reading), None)

    def _own_of(self, block: int) -> _OwnSlot | None:
        """Returns the slot that stays the block's."""
        last = self.count - 1 - block
        return self._own[last] if last < len(self._own) else None

    def _tensors(self, slot: _Slot) -> list[Any]:
        import torch

        array = np.frombuffer(slot.memory, dtype=np.uint8)
        slot.users += 1
        weakref.finalize(array, self._let_go, slot).atexit = False
        return self.parts(slot.block, torch.from_numpy(array))

    def parts(self, block: int, whole: Any) -> list[Any]:
        """Returns the parts of a slot's bytes, in the order of the block's places."""
        return [whole[begin:begin + place.memory_bytes] for place, begin in zip(self._blocks[block], self._begins[block])]

    def _let_go(self, slot: _Slot) -> None:
        if os.getpid() != self._process:
            return  # A thread that is not there may have the lock.
        with self._changed:
            slot.users -= 1
            if isinstance(slot, _OwnSlot) and not slot.users:
                slot.give(True)
            self._changed.notify_all()

    # ---- The thread that reads ----

    def _read_ahead(self) -> None:
        try:
            while (slot := self._next()) is not None:
                memory = np.frombuffer(slot.memory, dtype=np.uint8)
                for place, begin in zip(self._blocks[slot.block], self._begins[slot.block]):
                    if place.in_place:
                        self._reader.read_in_place(place, memory, begin)
                    else:
                        self._reader.read(place, memory[begin:begin + place.memory_bytes])
                del memory
                with self._changed:
                    slot.reading = False
                    if isinstance(slot, _OwnSlot):
                        slot.give(True)
                    self._changed.notify_all()
        except BaseException as error:  # Raised in the thread that trains.
            with self._changed:
                self._error = error.with_traceback(None)
                self._changed.notify_all()

    def _next(self) -> _Slot | None:
        """Waits for a slot to read into, and returns it with its block set. None: the ring is closed."""
        with self._changed:
            while not self._closed:
                there = {one.block for one in self._slots}
                for rank, block in enumerate(self._wanted):
                    if block in there:
                        continue
                    if (own := self._own_of(block)) is not None:
                        if own.has_block():
                            continue
                        if own.take_to_read():
                            return own
                    # Never in place of a block that is wanted earlier.
                    keep = self._wanted[:rank]
                    free = [one for one in self._slots if not one.users and not one.reading and one.block not in keep]
                    if not free:
                        break
                    slot = min(free, key=lambda one: one.block in self._wanted)
                    slot.block, slot.reading = block, True
                    return slot
                self._changed.wait()
        return None

    def close(self) -> None:
        """Ends the thread and returns the memory; what is in use stays until it is let go."""
        with self._changed:
            if self._closed or os.getpid() != self._process:
                return
            self._closed = True
            self._changed.notify_all()
        if threading.current_thread() is not self._thread:  # A model may go in any.
            self._thread.join()
        self._reader.close()
        self._slots.clear()
        self._own.clear()
        if self._kept is not None:
            self._kept.give_back()
        self._kept = None
