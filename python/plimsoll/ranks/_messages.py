# SPDX-License-Identifier: Apache-2.0
"""Messages between ranks, and those that the rooms above hand to them.

Threads: any.   Memory: none.
"""
from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Protocol

from ..errors import MemoryPressure

if TYPE_CHECKING:
    import torch

    from .._core import RankMemory
    from ._ranks import Ranks


@dataclasses.dataclass(frozen=True)
class Boundary:
    """Requests to serve between two steps."""

    asked: str
    """"", "pause" or "stop"."""
    why: str
    """The reason for the stop: who asked for it."""
    pressure: MemoryPressure | None
    """The exception that ends the loop; None: the loop goes on."""
    due: bool
    """A commit is due by the clock, or a wait ends."""
    wanted: bool = False
    """A commit is wanted because memory is short."""


class Unweighted(ValueError):
    """It cannot be told how much of a batch a part is."""


class Wanted(Protocol):
    """Rows of a table that one rank asks the others for."""

    @property
    def counts(self) -> Sequence[int]:
        """How many of each rank, in their order."""


class Table(Protocol):
    """A table whose rows are dealt to ranks."""

    index: int
    """Which of the tables of the ranks it is."""

    def gathered(self, ids: Any) -> torch.Tensor:
        """Rows that this process has."""

    def lay(self, memory: RankMemory, wanted: Any) -> int:
        """Puts the ids of a Wanted where all ranks can read them. Returns where."""

    def exchanged(self, ranks: Ranks, wanted: Any, asked_by: list[list[int]], begins: list[int]) -> torch.Tensor | None:
        """Ids to their owners, and rows back: those of a Wanted; None where this rank only serves."""


class States(Protocol):
    """Parts of a run."""

    def states(self, wanted: Callable[[Any], bool] = ...) -> dict[str, Any]:
        """Returns the states of the parts that `wanted` accepts, by name."""

    def check(self, states: dict[str, Any]) -> None:
        """Errors: ValueError for what could not be read back safely."""
