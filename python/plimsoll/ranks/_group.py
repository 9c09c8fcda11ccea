# SPDX-License-Identifier: Apache-2.0
"""Group: the processes that train one run. One process and several have the same methods, so that callers need no cases.

    Solo     one process: it agrees with itself, at the cost of a call
    Ranks    several, as torchrun starts them; _ranks.py documents each method
    Leader   a Solo whose other ranks compute tiles for it; _crew.py

Threads: the thread that trains.   Memory: none.
"""
from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar

from .. import _core
from ..memory._memory import Governor
from ._chunks import by_chunks
from ._virtual_workers import Node

if TYPE_CHECKING:
    import numpy as np

    from ._crew import Leader
    from ._messages import Boundary, States, Table
    from ._ranks import Ranks

Group: TypeAlias = "Solo | Ranks"
_T = TypeVar("_T")


class Solo:
    """A process that trains alone."""

    rank, count, first, over, alike = 0, 1, True, False, False
    commits_alone = True
    """Whether a commit and the end of the run wait for no other process, so that a copy of a boundary can be committed later."""
    others_may_fail = False
    """Whether another process may fail in a step that succeeded here, which then has to be undone here too."""
    crew: Leader | None = None
    """The rank that others compute for, where this is it."""
    undisturbed: Callable[[], contextlib.AbstractContextManager[None]] = contextlib.nullcontext

    def __init__(self) -> None:
        self.tables: list[Table] = []

    def _own(self, place: str, value: _T) -> _T:
        return value

    all = any = least = _own

    def on_all(self, place: str, work: Callable[[], _T]) -> _T:
        return work()

    first_says = on_all

    def _nothing(self, *_: Any) -> None:
        pass

    must_be_same = check_parts = check_shared = check_made = close = _nothing

    def alone(self, work: Callable[[], _T]) -> _T:
        return work()

    def either(self, alone: Callable[[], _T], together: Callable[[Ranks], _T]) -> _T:
        return alone()

    def own_states(self, parts: States, live: dict[str, Any], more: dict[str, Any]) -> tuple[dict[str, Any], list[str]]:
        parts.check(live)
        return live, []

    def next(self, batches: Iterator[Any]) -> Any:
        return next(batches)

    def look_up(self, table: Table, wanted: Any) -> Any:
        return table.gathered(wanted.ids)

    def gradients(self, graded: Callable[[], tuple[float, float, float]], parameters: Callable[[], list[Any]],
                  models: list[Any], sums: bool) -> Node:
        return Node(*graded()[:2], {})

    def by_chunks(self, rows: int, chunk: int, work: Callable[[int, int], np.ndarray], look: Callable[[], object] = lambda: None) -> np.ndarray:
        return by_chunks(self, rows, chunk, work, look)

    def write_last(self, write: Callable[[], None], undo: contextlib.ExitStack) -> contextlib.ExitStack:
        write()
        return undo.pop_all()

    def whole(self, share_bytes: int) -> int:
        return share_bytes

    def governor(self, memory_limit: int | str, **options: Any) -> Governor:
        return Governor(memory_limit, **options)

    def open_folder(self, root: str, opened: Callable[[], tuple[Any, bool, int, str]]) -> tuple[Any, bool, int, str]:
        return opened()

    def limits(self, governor: Governor, root: str) -> _core.LimitRequests:
        return _core.LimitRequests(governor._core, root)

    def settle(self, own: Boundary, limits: Any) -> Boundary:
        return own
