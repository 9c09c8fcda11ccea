# SPDX-License-Identifier: Apache-2.0
"""Rows that a step's function looks up while it runs: they are collected for the running attempt.

A failed attempt drops them, and the next one looks them up again. So nothing has to be undone.

Threads: one step runs at a time; its backward may look up again in a thread of autograd (recomputing).
Memory:  a list of handles.
"""
from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ._transaction import Gradients

_running: tuple[list[Any], Gradients] | None = None


@contextlib.contextmanager
def collected(gradients: Gradients) -> Iterator[list[Any]]:
    """Collects the rows of add() in a list, inside the `with` block. Their gradients are watched."""
    global _running
    rows: list[Any] = []
    before, _running = _running, (rows, gradients)
    try:
        yield rows
    finally:
        _running = before


def is_running() -> bool:
    """Whether a step is running."""
    return _running is not None


def add(rows: Any) -> bool:
    """Adds rows to the running step, which applies them. Returns whether a step is running.

    rows: Rows or LookedUp.
    """
    if _running is None:
        return False
    _running[0].append(rows)
    _running[1].watch_together(rows.tensor)
    return True
