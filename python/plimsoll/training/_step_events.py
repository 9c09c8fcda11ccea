# SPDX-License-Identifier: Apache-2.0
"""Events of a TrainingStep: admissions, refusals and their remedies, the stop, the summary.

Threads: the thread that trains.   Memory: an event at a time.
"""
from __future__ import annotations

import json
import os
from collections.abc import Callable
from typing import Any, TypeVar

from ..errors import BudgetExceeded, MemoryPressure
from ..memory._refusal import Refusal

_Stop = TypeVar("_Stop", BudgetExceeded, MemoryPressure)


class Events:
    """A log of a step's events. Calls the program's `commit` at a stop.

    to:     a file that gets a line of JSON for each, or a function that gets the dict.
    commit: the program's, called at a stop.
    """

    def __init__(self, to: str | os.PathLike[str] | Callable[[dict[str, Any]], Any] | None,
                 commit: Callable[[], Any] | None) -> None:
        self._to, self._commit, self._closed = to, commit, False
        self.stop: dict[str, Any] = {}
        """After a stop: stop_reason and smallest_limit_bytes."""

    def append(self, event: dict[str, Any]) -> None:
        if callable(self._to):
            self._to(event)
        elif self._to is not None:
            with open(self._to, "a", encoding="utf-8") as file:
                file.write(json.dumps(event) + "\n")

    def refusal(self, step: int, refusal: Refusal, helped: str) -> None:
        """Appends a refusal. step: the refused step. helped: the next try."""
        self.append({"event": "refusal", "step": step, "refusal": str(refusal), "next": helped})

    def stopped(self, step: int, error: _Stop) -> _Stop:
        """Commits, appends the stop, and returns `error`. step: the last step that was made."""
        self.stop = {"stop_reason": str(error), "smallest_limit_bytes": error.smallest_limit_bytes}
        if self._commit is not None:
            self._commit()
        self.append({"event": "stopped", "step": step, **self.stop})
        return error

    def close(self, summary: Callable[[], dict[str, Any]]) -> None:
        """Appends the summary. A second close does nothing."""
        if not self._closed:
            self._closed = True
            self.append({"event": "summary", **summary()})
