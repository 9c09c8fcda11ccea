# SPDX-License-Identifier: Apache-2.0
"""Rows that a step's function looks up while it runs, handed to the attempt that it is part of.

An attempt that fails forgets them: the next one looks up again, so nothing has to be put back.

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
    """Inside, add() appends to the list that this gives, and gradients of the rows are watched."""
    global _running
    rows: list[Any] = []
    before, _running = _running, (rows, gradients)
    try:
        yield rows
    finally:
        _running = before


def is_running() -> bool:
    """Whether a step is."""
    return _running is not None


def add(rows: Any) -> bool:
    """rows: Rows or LookedUp. Whether a step is running, which then has these rows to apply."""
    if _running is None:
        return False
    _running[0].append(rows)
    _running[1].watch_together(rows.tensor)
    return True
