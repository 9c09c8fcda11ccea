# SPDX-License-Identifier: Apache-2.0
"""RowSet: the common base of TokenSet and ImageSet, a sequence of rows in one file.

Threads: any number of threads may read.   Memory: a file descriptor.
"""
from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any, Generic, TypeVar

_Row = TypeVar("_Row")
_Self = TypeVar("_Self", bound="RowSet[Any]")


class RowSet(Generic[_Row]):
    """A sequence of rows in an open file. A subclass opens the file and defines a row."""

    def __init__(self, path: str, core: Any) -> None:
        """Takes the open set. core: that of the bindings."""
        self.path = path
        self._core = core

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.path,)  # A worker opens the file itself.

    @property
    def about(self) -> dict[str, Any]:
        """The record of the import: inputs, options, and irregularities that it found."""
        return json.loads(self._core.about)

    def row(self, row: int) -> _Row:
        """Returns a row. Errors: IndexError; CorruptError naming the row; OSError."""
        raise NotImplementedError

    def __getitem__(self, row: int) -> _Row:
        return self.row(row)

    def __len__(self) -> int:
        return self._core.rows

    def __iter__(self) -> Iterator[_Row]:
        return (self.row(row) for row in range(len(self)))

    def verify(self) -> None:
        """Reads the whole file and compares every checksum. Errors: CorruptError, OSError."""
        self._core.verify()

    def close(self) -> None:
        """Closes the file. Open batches keep it open until they are closed."""
        self._core.close()

    def _number(self, row: int) -> int:
        if not -len(self) <= row < len(self):
            raise IndexError(f"row {row} of {len(self)}")
        return row % len(self)

    def __enter__(self: _Self) -> _Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
