# SPDX-License-Identifier: Apache-2.0
"""Growth of a loop's memory: how many steps a limit lasts, and advice for the function that runs.

Threads: the thread whose loop it is.   Memory: 32 pairs of numbers.
"""
from __future__ import annotations

import sys
from typing import TYPE_CHECKING

from .. import _core

if TYPE_CHECKING:
    from types import FrameType

_FLOORS_MOST = 32
_RISE_LEAST = 5000  # Bytes per step below which growth is ignored, as in src/watch/trend.h.
# Library functions that hold much memory while they run, by the end of their file's path.
_HELPS = {
    ("transformers/trainer.py", "evaluation_loop"): _core.EVALUATION_ADVICE,
    ("datasets/arrow_dataset.py", "_map_single"):
        "datasets.map keeps writer_batch_size rows (1,000) in memory before it writes them: ask for fewer where rows are large "
        "(writer_batch_size=50), and for fewer processes (num_proc)",
}


class Growth:
    """The rate at which a loop's memory grows, from the bytes held at its step boundaries."""

    def __init__(self) -> None:
        self._floors: list[tuple[int, int]] = []  # (first step of a window, fewest bytes held in it)
        self._width = 1

    def add(self, step: int, held_bytes: int) -> None:
        """Records the bytes held after a step. A step lower than the last one clears all records."""
        if self._floors and step < self._floors[-1][0]:
            self._floors.clear()
        begun = step // self._width * self._width
        if self._floors and self._floors[-1][0] == begun:
            self._floors[-1] = (begun, min(self._floors[-1][1], held_bytes))
            return
        self._floors.append((begun, held_bytes))
        while len(self._floors) > _FLOORS_MOST:  # Windows are joined in pairs.
            self._width *= 2
            joined: dict[int, int] = {}
            for at, floor in self._floors:
                at = at // self._width * self._width
                joined[at] = min(joined.get(at, floor), floor)
            self._floors = list(joined.items())

    @property
    def bytes_per_step(self) -> float:
        """The growth over the newest half of the windows, in bytes per step. 0 if it is not steady: memory was higher before, or one
        step makes most of the growth.
        """
        over = self._floors[:-1]  # Without the last window, which is incomplete.
        newest = over[len(over) // 2:]
        before = [floor for _, floor in over[:len(over) // 2]]
        if len(newest) < 4 or newest[-1][1] < max(floor for _, floor in over) or newest[0][1] < min(before) + _RISE_LEAST:
            return 0.0
        rise = newest[-1][1] - newest[0][1]
        largest = max(later[1] - earlier[1] for earlier, later in zip(newest, newest[1:]))
        rate = rise / (newest[-1][0] - newest[0][0])
        return rate if rate > _RISE_LEAST and largest < 0.6 * rise else 0.0


def what_helps() -> str:
    """Returns advice for a known memory-hungry function that runs in this thread; "" for none."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        code = frame.f_code
        for (file, name), text in _HELPS.items():
            if code.co_name == name and code.co_filename.endswith(file):
                return text
        frame = frame.f_back
    return ""
