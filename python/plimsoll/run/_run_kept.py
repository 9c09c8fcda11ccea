# SPDX-License-Identifier: Apache-2.0
"""Keeper: the state of the last boundary between two steps, for a commit that may be made later.

A step that fails half way, or a body that memory ends, has already changed models and optimizers. The state for a commit of the
boundary before it is kept here: copies of random states, numbers and texts, the versions of tensors, and copies of their
bytes if those cost next to nothing. If no optimizer has stepped since, the live tensors are those of the boundary.

    calm                bytes are copied if that takes 0.6 ms of processor time, or 0.5 % of the time since the last copy
    memory is short     10 % of the time
    the end is near     at every boundary: at the present growth, 32 more steps would pass the limit

Reading order: _run_writer.py, this file, _run_life.py.
Threads: the thread that trains.
Memory:  one copy of the state, leased, if it takes at most a quarter of the free memory beside a step. When the end is
         near it is kept even as free memory shrinks, since it is made for that moment.
"""
from __future__ import annotations

import collections
import contextlib
import dataclasses
import enum
import mmap
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from ..core._random_states import RandomStates
from ..errors import BudgetExceeded
from ..training._checkpoint import copied
from ._run_writer import aligned, room_for

if TYPE_CHECKING:
    from .._core import PressureReport
    from ..memory._memory import Governor, Lease
    from ..rows._embedding import EmbeddingStore
    from ._run_commit import Position

_NOTHING_SECONDS = 6e-4  # Time that is always allowed per boundary.
_COPIES_A_SECOND = 2 << 30  # Assumed bytes per second of the first copy.
_TRIED_SECONDS = 4e-3  # Work up to this long is tried _TIMES times, to measure it.
_TIMES = 8
_TIMES_KEPT = 64  # The minimum of so many measurements counts, as other programs disturb most of them.
_LOOKS = 32
_STEPS_AHEAD = 32
_STOP_FRACTION = 0.97  # The share of the limit at which the governor asks for a stop.


class Near(enum.Enum):
    """How near the end for lack of memory is. The value is the share of time that may be spent on preparing for it."""

    CALM = 0.005
    SHORT = 0.1
    END = 1.0


def _may_take(times: collections.deque[float], since: float, near: Near) -> bool:
    """Whether work that took `times` seconds before may be done again, `since` seconds after the last time."""
    least = min(times, default=0.0)
    few = len(times) < _TIMES and least < _TRIED_SECONDS  # First times are longer than later ones.
    return few or least <= max(_NOTHING_SECONDS, since * near.value)


class Course:
    """The growth of resident memory and of leased tensors from boundary to boundary."""

    def __init__(self) -> None:
        self._looks: collections.deque[tuple[int, int, int]] = collections.deque(maxlen=_LOOKS)

    def near(self, step: int, seen: PressureReport, governor: Governor) -> Near:
        """Records a report of the boundary after `step` steps, and returns how near the end is."""
        ledger = governor.ledger()
        tensors = ledger.pools["tensors"]
        held = seen.resident.total
        in_a_step = max(0, tensors.peak_bytes - max(tensors.leased_bytes, tensors.floor_bytes))
        self._looks.append((step, held, tensors.leased_bytes))
        near = Near.SHORT if seen.pressure else Near.CALM
        for which, room in ((1, int(ledger.limit_bytes * _STOP_FRACTION) - held), (2, ledger.free_bytes - in_a_step)):
            first, last = self._looks[0], self._looks[-1]
            steps = last[0] - first[0]
            if steps > 0 and room < _STEPS_AHEAD * (last[which] - first[which]) / steps:
                return Near.END
            looks = [one[which] for one in self._looks]
            if room < 2 * max((after - before for before, after in zip(looks, looks[1:])), default=0):
                near = Near.SHORT
        return near


@dataclasses.dataclass
class _Then:
    """The kept state of a boundary."""

    position: Position
    content: Any
    """The content of a commit, with a _Number in place of each tensor."""
    random: RandomStates
    tensors: list[Any] | None
    """The live tensors. None: they include accumulated gradients, which are freed once used."""
    versions: list[int]
    written: list[int]
    """The number of writes to each table so far."""


class _Number(int):
    """The index of a tensor, in place of it in the content."""


class Keeper:
    """Keeps the state of a run's last boundary. content: returns a commit's content without random states, and the tables, at a boundary."""

    def __init__(self, governor: Governor, content: Callable[[], tuple[dict[str, Any], list[EmbeddingStore]]]) -> None:
        self._governor, self._content = governor, content
        self._course = Course()
        self.tables: list[EmbeddingStore] = []
        """Tables of the last boundary. Once their rows are written, that boundary cannot be committed any more."""
        self._last: _Then | None = None
        self._whole: _Then | None = None  # The boundary whose bytes are copied.
        self._bytes = _Bytes(governor)
        self._near = Near.CALM
        self.fits = True
        """Whether there was memory for the last copy."""
        self._stepped = False  # Whether an optimizer has stepped since `_last`.
        self._seconds: collections.deque[float] = collections.deque(maxlen=_TIMES_KEPT)
        self._copy_seconds: collections.deque[float] = collections.deque(maxlen=_TIMES_KEPT)
        self._at = self._copied_at = time.monotonic()
        from torch.optim.optimizer import register_optimizer_step_pre_hook

        self._hook = register_optimizer_step_pre_hook(self._sees_step)

    def _sees_step(self, *_: Any) -> None:
        self._stepped = True

    def near(self, step: int, seen: PressureReport | None) -> Near:
        """Returns how near the end is. seen: the pressure report of this boundary; None: there is none."""
        if seen is not None:
            self._near = self._course.near(step, seen, self._governor)
        return self._near

    def keep(self, position: Position, near: Near) -> None:
        """Keeps the state of a boundary, which is that of the live tensors now."""
        began, spent = time.monotonic(), time.thread_time()  # Processor time: other programs do not count.
        if not _may_take(self._seconds, began - self._at, near):
            return
        tensors: list[Any] = []

        def numbered(tensor: Any) -> _Number:
            tensors.append(tensor)
            return _Number(len(tensors) - 1)

        content, self.tables = self._content()
        steps = content["step_state"] or {}
        waiting = bool(content.get("gradients") or any(one["batches"] for one in steps.get("of", {"": steps}).values() if one))
        made = copied({**content, "source": position.source}, numbered)
        self._last = _Then(dataclasses.replace(position, source=None), made, RandomStates(), tensors,
                           [one._version for one in tensors], [one._written for one in self.tables])
        self._stepped = False
        self._at = began
        self._seconds.append(time.thread_time() - spent)
        if not self._copy_seconds:
            self._copy_seconds.append((room_for(tensors) or 0) / _COPIES_A_SECOND)
        if _may_take(self._copy_seconds, began - self._copied_at, near):
            copying = time.thread_time()
            self.fits = self._bytes.take(tensors, near)
            self._whole = self._last if self.fits else None
            self._copied_at = began
            self._copy_seconds.append(time.thread_time() - copying)
        if waiting:
            self._last.tensors = None

    def is_live(self) -> bool:
        """Whether the live tensors still have the values of the last boundary."""
        last = self._last
        return last is not None and last.tensors is not None and not self._stepped and all(
            one._version == version for one, version in zip(last.tensors, last.versions))

    def put_back(self) -> None:
        """Records that a failed step was undone, so that the live tensors have the boundary's values again."""
        if self._last is not None and self._last.tensors is not None:
            self._stepped, self._last.versions = False, [one._version for one in self._last.tensors]

    def last(self) -> tuple[dict[str, Any], Position, list[EmbeddingStore]] | None:
        """Returns (content, position, tables) of the newest boundary that can still be committed, or None."""
        for then, given in ((self._last, self._last.tensors if self._last is not None and self.is_live() else None),
                            (self._whole, self._bytes.tensors)):
            if then is None or given is None:
                continue
            if then.written != [one._written for one in self.tables]:
                continue
            content = copied(then.content, given.__getitem__, _Number)
            position = dataclasses.replace(then.position, source=content.pop("source"))
            return {**content, "random": then.random.to_plain()}, position, self.tables
        return None

    def give_way(self) -> None:
        """Frees the copy: memory was refused, or another copy is made."""
        self._whole = None
        self._bytes.close()

    def close(self) -> None:
        self._last = self._whole = None
        self._bytes.close()
        self._hook.remove()


class _Bytes:
    """A copy of tensors, each storage once, in leased memory that is reused. Forked processes do not inherit it."""

    def __init__(self, governor: Governor) -> None:
        self._governor = governor
        self._pages: mmap.mmap | None = None
        self._lease: Lease | None = None
        self._room = 0
        self._places: list[Any] = []  # Address, dtype, shape and strides of the copied tensors.
        self.tensors: list[Any] = []

    def take(self, tensors: list[Any], near: Near) -> bool:
        """Copies the tensors. Returns False, without a copy, if memory is short or a tensor has no plain bytes."""
        import torch

        places = [(one.data_ptr(), one.dtype, one.shape, one.stride()) for one in tensors]
        same = bool(places) and places == self._places
        room = self._room if same else room_for(tensors)
        if room is None or not self._has(room, near):
            self.close()
            return False
        with torch.no_grad():
            if not same:
                self._lay_out(tensors)
            if tensors:
                torch._foreach_copy_(self.tensors, tensors)
        self._places = places
        return True

    def _lay_out(self, tensors: list[Any]) -> None:
        import torch

        used, storages = 0, {}
        self.tensors = []
        for tensor in tensors:
            source = tensor.untyped_storage()
            size = source.nbytes()
            if source._cdata not in storages:
                copy = torch.frombuffer(self._pages, dtype=torch.uint8, count=size, offset=used) if size else torch.empty(0)
                storages[source._cdata] = copy.untyped_storage()
                used += aligned(size)
            made = torch.empty(0, dtype=tensor.dtype)
            made.set_(storages[source._cdata], tensor.storage_offset(), tensor.size(), tensor.stride())
            self.tensors.append(made.requires_grad_(tensor.requires_grad))

    def _has(self, room: int, near: Near) -> bool:
        """Maps `room` bytes if need be. Returns whether they still fit beside a step."""
        mapped = self._pages is not None and room == self._room
        if mapped and near is Near.END:
            return True
        ledger = self._governor.ledger()
        tensors = ledger.pools["tensors"]
        in_a_step = max(0, tensors.peak_bytes - max(tensors.leased_bytes, tensors.floor_bytes))
        free = ledger.free_bytes - in_a_step + self._room
        if 4 * room > free:
            return False
        if mapped:
            return True
        self.close()
        try:
            self._lease = self._governor.reserve(room)
        except BudgetExceeded:
            return False
        self._pages = mmap.mmap(-1, max(1, room), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        self._pages.madvise(mmap.MADV_DONTFORK)
        with contextlib.suppress(OSError):  # A kernel without huge pages.
            self._pages.madvise(mmap.MADV_HUGEPAGE)
        self._room = room
        return True

    def close(self) -> None:
        self.tensors, self._places, pages, self._pages, self._room = [], [], self._pages, None, 0
        if pages is not None:
            with contextlib.suppress(BufferError):  # A tensor over it is still alive; the memory is freed with it.
                pages.close()
        if self._lease is not None:
            self._lease.close()
            self._lease = None
