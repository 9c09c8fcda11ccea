# SPDX-License-Identifier: Apache-2.0
"""LineTrace: finds the lines at which an owner grows, by a look at its memory between lines of a few steps.

For memory that no hook sees, such as that of functions looked up by ctypes. Each line of the program costs a Python
call and a look (some 20 µs), so the number of lines and the processor time are bounded. A traced step continues where
the one before stopped, and starts anew after a whole step.

Threads: the one whose loop it is.   Memory: a count for each of 512 lines.
"""
from __future__ import annotations

import sys
import time
from types import FrameType
from typing import Any

from .. import _core

STEPS = 8
_LINES_A_STEP = 400
_SECONDS_A_STEP = 0.004
_LINES_MOST = 512


class LineTrace:
    """A trace of how much an owner grows at each line. After STEPS steps, each from begin() to end(), `sites` has the result."""

    def __init__(self, owner: str, folders: tuple[str, ...]) -> None:
        self._owner, self._folders = owner, folders
        self._grown: dict[tuple[str, int], int] = {}
        self._frames: list[FrameType] = []
        self._first = 0  # Lines of a step that are passed over.
        self.steps = 0

    def begin(self) -> bool:
        """Begins a step. Returns False where another tracer is set (a debugger, a coverage tool)."""
        if sys.gettrace() is not None:
            return False
        self._passed, self._spent, self._next = 0, 0.0, 0
        self._at: tuple[str, int] | None = None
        frame: FrameType | None = sys._getframe(1)
        while frame is not None:
            if self._of_program(frame):
                frame.f_trace = self._line
                self._frames.append(frame)
            frame = frame.f_back
        sys.settrace(self._call)
        return True

    def end(self) -> None:
        """Ends a step."""
        sys.settrace(None)
        for frame in self._frames:
            frame.f_trace = None
        self._frames.clear()
        self._first = self._next
        self.steps += 1

    @property
    def sites(self) -> list[tuple[str, int]]:
        """Lines and the bytes they grew by, largest first."""
        grown = sorted(self._grown.items(), key=lambda one: -one[1])
        return [(f"{file}:{line}".encode(errors="replace").decode(), held) for (file, line), held in grown if held > 0]

    def _of_program(self, frame: FrameType) -> bool:
        file = frame.f_code.co_filename
        return not file.startswith(("<frozen", *self._folders))

    def _call(self, frame: FrameType, event: str, argument: Any) -> Any:
        if not self._of_program(frame):
            return None  # Its growth belongs to the calling line.
        return self._line(frame, event, argument)

    def _line(self, frame: FrameType, event: str, argument: Any) -> Any:
        self._passed += 1
        if self._passed <= self._first:
            return self._line
        if self._passed > self._first + _LINES_A_STEP or self._spent > _SECONDS_A_STEP:
            self._next = max(self._passed - 2, self._first + 1)  # The last line again: what it grew is not known.
            sys.settrace(None)
            return None
        began = time.thread_time()
        held = _core.own_bytes(self._owner)
        if self._at is not None and (self._at in self._grown or len(self._grown) < _LINES_MOST):
            self._grown[self._at] = self._grown.get(self._at, 0) + held - self._held
        self._held: int = held
        place = frame.f_back if event == "return" else frame
        while place is not None and not self._of_program(place):
            place = place.f_back
        self._at = None if place is None else (place.f_code.co_filename, place.f_lineno)
        self._spent += time.thread_time() - began
        return self._line
