# SPDX-License-Identifier: Apache-2.0
"""Sentences about growth in a text about short memory: how long a limit lasts, and what helps the loop that runs.

Threads: the thread whose loop it is.   Memory: 32 pairs of numbers.
"""
from __future__ import annotations

import sys
from typing import TYPE_CHECKING

from .. import _core

if TYPE_CHECKING:
    from types import FrameType

_FLOORS_MOST = 32
_RISE_LEAST = 5000  # Bytes a step; as a verdict has it (src/watch/trend.h).
# Functions of libraries that hold much while they run, by the end of their file.
_HELPS = {
    ("transformers/trainer.py", "evaluation_loop"): _core.EVALUATION_ADVICE,
    ("datasets/arrow_dataset.py", "_map_single"):
        "datasets.map keeps writer_batch_size rows (1,000) in memory before it writes them: ask for fewer where rows are large "
        "(writer_batch_size=50), and for fewer processes (num_proc)",
}


class Growth:
    """How fast the memory of a loop grows, from what it held at its boundaries."""

    def __init__(self) -> None:
        self._floors: list[tuple[int, int]] = []  # Where a window began, and the least that was held in it.
        self._width = 1

    def add(self, step: int, held_bytes: int) -> None:
        """So much was held after that step. Steps never go back, or all begins anew."""
        if self._floors and step < self._floors[-1][0]:
            self._floors.clear()
        begun = step // self._width * self._width
        if self._floors and self._floors[-1][0] == begun:
            self._floors[-1] = (begun, min(self._floors[-1][1], held_bytes))
            return
        self._floors.append((begun, held_bytes))
        while len(self._floors) > _FLOORS_MOST:  # Two neighbours become one.
            self._width *= 2
            joined: dict[int, int] = {}
            for at, floor in self._floors:
                at = at // self._width * self._width
                joined[at] = min(joined.get(at, floor), floor)
            self._floors = list(joined.items())

    @property
    def bytes_per_step(self) -> float:
        """By the newest half, where that is the most that was held so far and no single step of it; else 0."""
        over = self._floors[:-1]  # The last window is not over.
        newest = over[len(over) // 2:]
        before = [floor for _, floor in over[:len(over) // 2]]
        if len(newest) < 4 or newest[-1][1] < max(floor for _, floor in over) or newest[0][1] < min(before) + _RISE_LEAST:
            return 0.0
        rise = newest[-1][1] - newest[0][1]
        largest = max(later[1] - earlier[1] for earlier, later in zip(newest, newest[1:]))
        rate = rise / (newest[-1][0] - newest[0][0])
        return rate if rate > _RISE_LEAST and largest < 0.6 * rise else 0.0


def what_helps() -> str:
    """Returns advice that fits the functions running in this thread; "" where none of them is known to hold much memory."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        code = frame.f_code
        for (file, name), text in _HELPS.items():
            if code.co_name == name and code.co_filename.endswith(file):
                return text
        frame = frame.f_back
    return ""
