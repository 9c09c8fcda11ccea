# SPDX-License-Identifier: Apache-2.0
"""Messages between ranks, and the interfaces of tables and parts that other rooms implement.

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
    """The requests that a run serves between two steps."""

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
    """The error of a micro-batch whose weight in its batch is unknown."""


class Wanted(Protocol):
    """Rows of a table that one rank asks the others for."""

    @property
    def counts(self) -> Sequence[int]:
        """The number of rows wanted from each rank, in order of rank."""


class Table(Protocol):
    """A table whose rows are divided among ranks."""

    index: int
    """The table's position in the ranks' list of tables."""

    def gathered(self, ids: Any) -> torch.Tensor:
        """Returns rows that this process owns. Shape: ids int64 [n]; rows float32 [n, dim]."""

    def lay(self, memory: RankMemory, wanted: Any) -> int:
        """Writes the ids of a Wanted to memory that all ranks can read. Returns their position."""

    def exchanged(self, ranks: Ranks, wanted: Any, asked_by: list[list[int]], begins: list[int]) -> torch.Tensor | None:
        """Sends ids to their owners and returns the rows of `wanted`; None where this rank only serves others."""


class States(Protocol):
    """The parts of a run."""

    def states(self, wanted: Callable[[Any], bool] = ...) -> dict[str, Any]:
        """Returns the states of the parts that `wanted` accepts, by name."""

    def check(self, states: dict[str, Any]) -> None:
        """Raises ValueError for a state that could not be loaded safely."""
