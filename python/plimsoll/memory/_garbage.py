# SPDX-License-Identifier: Apache-2.0
"""clean_up(): frees unused memory, at a cost that training does not notice.

A full collection looks at every Python object: 50 to 150 ns each, 30 ms or more with torch imported. So each clean-up
collects young generations only. A full collection runs if the last one freed much, or if it takes less than a hundredth
of the time since.

Threads: any; clean-ups run one at a time.   Memory: a few numbers.
"""
from __future__ import annotations

import ctypes
import gc
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

from .. import _core

_YOUNG = 1  # The generation up to which every clean-up collects.
_SHARE = 100  # A full collection may take one hundredth of the time since the last.
_BLOCK_SECONDS = 1e-7  # Estimated cost of the first full collection per block that Python has allocated.
_FREED_BYTES, _FREED_OBJECTS = 1 << 20, 10_000  # A collection that freed so much is repeated at the next clean-up.


class _Collector:
    """The schedule of full collections."""

    def __init__(self) -> None:
        self._ended = time.monotonic()
        self._seconds = 0.0  # Duration of the last full collection; 0: there was none.
        self._again = False  # Whether the last one freed much.

    def due(self) -> bool:
        costs = self._seconds or sys.getallocatedblocks() * _BLOCK_SECONDS
        return self._again or time.monotonic() - self._ended >= _SHARE * costs

    def collect(self, give_back: Callable[[], int]) -> int:
        """Collects all generations and returns the number of objects found. give_back: frees pages and returns the resident bytes."""
        before, began = _core.resident().total, time.monotonic()
        objects = gc.collect()
        self._ended = time.monotonic()
        self._seconds = self._ended - began
        self._again = objects >= _FREED_OBJECTS or before - give_back() >= _FREED_BYTES
        return objects


_collector = _Collector()
_turn = threading.RLock()  # A finalizer of a collected object may call clean_up().


def clean_up() -> dict[str, Any]:
    """Frees unused memory: objects in reference cycles, free pages of the tensor arena and of the heap. Changes no result.
    Needs neither a Governor nor a Run.

        evaluate(model)
        plimsoll.clean_up()

    Young objects are collected every time. All objects are collected if that freed much the last time, or takes less
    than a hundredth of the time since.

    Returns arena_bytes, collected_objects, resident_before_bytes, resident_after_bytes, freed_bytes (measured, not
    assumed) and seconds.
    """
    arena_bytes = 0

    def give_back() -> int:
        nonlocal arena_bytes
        tensors = sys.modules.get("plimsoll._torch")  # Loaded if tensors are leased.
        if tensors is None:
            _trim_heap()
            return _core.resident().total
        done = tensors.clean_up()
        arena_bytes += done["arena_bytes"]
        return int(done["resident_after_bytes"])

    with _turn:
        began, before = time.monotonic(), _core.resident().total
        collected = gc.collect(_YOUNG)
        after = give_back()
        if _collector.due():
            collected += _collector.collect(give_back)
            after = _core.resident().total
        return {"arena_bytes": arena_bytes, "collected_objects": collected, "resident_before_bytes": before,
                "resident_after_bytes": after, "freed_bytes": before - after, "seconds": time.monotonic() - began}


def _trim_heap() -> None:
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # Only glibc has it.
    if trim is not None:
        trim(0)
