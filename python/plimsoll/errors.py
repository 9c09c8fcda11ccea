# SPDX-License-Identifier: Apache-2.0
"""Plimsoll's own exceptions; every failure has one class.

    over the limit      BudgetExceeded (a MemoryError)    wrong argument   ValueError
    no such row, file   NotFoundError  (a KeyError)       disk, system     OSError with errno
    damaged files       CorruptError                      our bug          InternalError
    about to pass the   MemoryPressure (a MemoryError)    warned of that   PressureWarning
    limit unleased

A refusal inside one of torch's own operators arrives as torch.OutOfMemoryError with our text.
"""
from __future__ import annotations

__all__ = ["BudgetExceeded", "CorruptError", "InternalError", "MemoryPressure", "NotFoundError",
           "PressureWarning"]


class BudgetExceeded(MemoryError):
    """The governor refused bytes: the limit, or the cap of a component, would have been passed.

    Units: every figure is in bytes. Memory is as it was before the call. Where a device refused, `tag` is its name, such as
    "cuda", and its holders are "tensors", "cache" and "context".
    """

    tag: str
    """The holder whose bytes were asked for: "tensors", "rows", "features", "loader", "pinned", "weights", "foreign",
    "other"."""
    requested_bytes: int
    available_bytes: int
    limit_bytes: int
    held_bytes: dict[str, int]
    """Bytes that are held, by tag of the holder."""
    advice: str
    """Which option to change."""
    smallest_limit_bytes: int
    """A limit that would do; 0 where none is known."""

    def __init__(self, message: str, tag: str, requested_bytes: int, available_bytes: int,
                 limit_bytes: int = 0, held_bytes: dict[str, int] | None = None,
                 advice: str = "", smallest_limit_bytes: int = 0) -> None:
        super().__init__(message)
        self.tag = tag
        self.requested_bytes = requested_bytes
        self.available_bytes = available_bytes
        self.limit_bytes = limit_bytes
        self.held_bytes = dict(held_bytes or {})
        self.advice = advice
        self.smallest_limit_bytes = smallest_limit_bytes

    def __reduce__(self):
        return (type(self), (str(self), self.tag, self.requested_bytes, self.available_bytes,
                             self.limit_bytes, self.held_bytes, self.advice,
                             self.smallest_limit_bytes))


class MemoryPressure(MemoryError):
    """The process and its children hold nearly all of the limit, much of it without a lease, and nothing
    is left to give back: at the limit the kernel would end one of them.

    Raised between two steps by TrainingStep, its state as after the last of them; by a Run after a commit, or in a step or a
    body, which then are not part of it; in a loop that has no step boundaries by the governor's watcher, between any two
    instructions of the main thread, as KeyboardInterrupt is (see Governor, on_pressure).
    Units: every figure is in bytes.
    """

    held_bytes: int
    """By the process and its children, shared memory included."""
    limit_bytes: int
    smallest_limit_bytes: int
    """A limit that would do just now."""

    def __init__(self, message: str, held_bytes: int = 0, limit_bytes: int = 0,
                 smallest_limit_bytes: int = 0) -> None:
        super().__init__(message)
        self.held_bytes = held_bytes
        self.limit_bytes = limit_bytes
        self.smallest_limit_bytes = smallest_limit_bytes

    def __reduce__(self):
        return (type(self), (str(self), self.held_bytes, self.limit_bytes,
                             self.smallest_limit_bytes))


class PressureWarning(RuntimeWarning):
    """Memory that nobody leased has come near the limit."""


class NotFoundError(KeyError):
    """There is no such row, column, commit, table or file."""

    def __str__(self) -> str:  # KeyError would print the text in quotes.
        return str(self.args[0]) if self.args else ""


class CorruptError(Exception):
    """The bytes on disk are not what was written: a checksum or a format does not match."""


class InternalError(RuntimeError):
    """A bug in Plimsoll. Please report the text."""
