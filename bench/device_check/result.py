# SPDX-License-Identifier: Apache-2.0
"""Results of checks: lines of expected beside measured, and the value that is recorded.

Threads: none.   Memory: none.
"""
from __future__ import annotations

import dataclasses
from typing import Any


class CannotRun(Exception):
    """A check lacks something on this machine. Its text says what."""


@dataclasses.dataclass
class Line:
    """One fact: what was expected, and what was measured. holds: None where nothing was expected of it."""

    what: str
    expected: str
    measured: str
    holds: bool | None = None


@dataclasses.dataclass
class Result:
    """A check's lines, and its value beside the bar, for the record."""

    value: float
    unit: str
    bar: float
    lines: list[Line] = dataclasses.field(default_factory=list)
    peers: dict[str, Any] = dataclasses.field(default_factory=dict)

    def add(self, what: str, expected: str, measured: str, holds: bool | None = None) -> None:
        """Appends a line."""
        self.lines.append(Line(what, expected, measured, holds))

    @property
    def holds(self) -> bool:
        """Whether every line with a bar meets it, and one has a bar."""
        return all(one.holds is not False for one in self.lines) and any(one.holds for one in self.lines)

    def as_json(self) -> dict[str, Any]:
        """Returns the fields, and whether it holds."""
        return {**dataclasses.asdict(self), "holds": self.holds}


def mib(size: float) -> str:
    """Returns bytes as text: "34.0 MiB"."""
    return f"{size / 2**20:,.1f} MiB"
