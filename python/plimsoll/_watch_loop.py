# SPDX-License-Identifier: Apache-2.0
"""LoopWatch: a Watch in the loop of another library, which says once what leaks.

Threads: the thread that trains.   Memory: its Watch's.
"""
from __future__ import annotations

import warnings
from contextlib import ExitStack

from ._watch import Watch

_ASKED_EVERY = 50  # Steps between two questions for the verdict.


class LoopWatch:
    """What the callbacks of plimsoll.integrations share: steps, one phase at a time, and a warning."""

    def __init__(self, watch: Watch | None) -> None:
        self.watch = Watch() if watch is None else watch
        """Whose verdict() there is at any time."""
        self._phase = ExitStack()
        self._inside = ""
        self._warned: set[tuple[str, str]] = set()

    def step(self) -> None:
        """A step of the optimizer was made."""
        self.leave()
        self.watch.step()
        if self.watch.steps % _ASKED_EVERY == 0:
            self.ask()

    def enter(self, phase: str) -> None:
        """What comes belongs to that phase, until leave(); again: nothing."""
        if self._inside != phase:
            self.leave()
            self._phase.enter_context(self.watch.phase(phase))
            self._inside = phase

    def leave(self) -> None:
        self._phase.close()
        self._inside = ""

    def ask(self, *, wait: bool = False) -> None:
        """Warns of a leak, once for each owner and kind; wait: also of one that is still being looked into."""
        found = self.watch.verdict(wait=wait)
        if self.watch.searching and not wait:
            return
        if found.kind in ("leak", "uncollected garbage") and (found.kind, found.owner) not in self._warned:
            self._warned.add((found.kind, found.owner))
            warnings.warn("; ".join([f"plimsoll: {found}", *found.advice]), RuntimeWarning, stacklevel=2)
