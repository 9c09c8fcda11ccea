# SPDX-License-Identifier: Apache-2.0
"""ChatFiles and ChatRows: the rows of an import, from files or from any iterable.

Both are read once, as lines (src/data/chat_lines.h). Sums (bytes and CRC-32C) identify the lines read.

Threads: one owner.   Memory: for rows of an iterable, a block of 64 KiB of lines and the row that exceeds it.
"""
from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Sized
from typing import Any

from ...errors import NotFoundError
from ._arrow_rows import saved_files
from ._parts import Part, joined_sum, share
from ._row_files import Line, Reading, RowFeed, RowLines

TRAINING = ("assistant", "last", "all")  # ChatTraining.


class ChatFiles:
    """Rows from files. Errors: NotFoundError, OSError."""

    can_be_asked_again = True

    def __init__(self, paths: list[str], reading: Reading) -> None:
        self._paths, self._reading = paths, reading
        self._feed: RowFeed | None = None
        try:
            self._bytes = [os.stat(path).st_size for path in paths]
        except FileNotFoundError as error:
            raise NotFoundError(f"{error.filename}: {error.strerror}") from None
        self.total = sum(self._bytes)

    def identity(self) -> list[list[Any]]:
        """Returns [name, size] of each file: the inputs' identity before they are read."""
        return [[os.path.basename(path), size] for path, size in zip(self._paths, self._bytes, strict=True)]

    def lines(self) -> tuple[list[str], RowFeed]:
        """Returns the paths for a reader of lines, and a feed for the files that it cannot read itself."""
        self._feed = RowFeed(self._paths, self._reading)
        return self._paths, self._feed

    def folders(self) -> list[str]:
        """Returns the folder that relative paths in each file's rows refer to."""
        return [os.path.dirname(path) for path in self._paths]

    def odd(self) -> dict[str, dict[str, Any]]:
        """Returns counts and examples of the parts of the files that were not used."""
        return {} if self._feed is None else self._feed.odd()

    def files(self) -> list[list[Any]]:
        """Returns [name, size] of each file that the parts divide."""
        return self.identity()

    def part(self, part: Part) -> ChatFiles:
        """Returns the files of a part; there may be none."""
        return ChatFiles(self._paths[share(self._bytes, part)], self._reading)

    def joined(self, inputs: list[list[dict[str, Any]]]) -> list[dict[str, Any]]:
        """Combines the parts' lists of inputs into one."""
        return [one for part in inputs for one in part]


class ChatRows:
    """Rows from an iterable, each a dict like a line of a file."""

    def __init__(self, rows: Iterable[Any], line: Line) -> None:
        self._rows = rows
        self._line = line
        self.can_be_asked_again = not isinstance(rows, Iterator)
        self.total = len(rows) if isinstance(rows, Sized) else 0

    def identity(self) -> list[list[Any]]:
        """Returns the number of rows, or 0 where it is unknown: the content of rows is known only once they are read."""
        return [["rows", self.total]]

    def lines(self) -> tuple[list[str], _RowsFeed]:
        """Returns a name for a reader of lines, and a feed of the rows from the first one on."""
        return ["rows"], _RowsFeed(RowLines((("", row) for row in self._rows), self._line, "rows"))

    def folders(self) -> list[str]:
        """Returns the working directory, which relative paths in rows refer to."""
        return [""]

    def odd(self) -> dict[str, dict[str, Any]]:
        """Returns nothing: rows of an iterable have no unused parts."""
        return {}

    def files(self) -> list[list[Any]]:
        """Refuses parts, which only ChatFiles has. Errors: ValueError, always."""
        raise ValueError("part and join are for files, and these are rows of an iterable")

    def part(self, part: Part) -> ChatRows:
        """Refuses parts, which only ChatFiles has. Errors: ValueError, always."""
        raise ValueError("part and join are for files, and these are rows of an iterable")

    def joined(self, inputs: list[list[dict[str, Any]]]) -> list[dict[str, Any]]:
        """Combines the parts' lists of inputs into one sum."""
        return [joined_sum([part[0] for part in inputs])]


class _RowsFeed:
    """A feed of rows in place of a file: implements ChatFeed (src/data/chat_lines.h)."""

    def __init__(self, lines: RowLines) -> None:
        self._lines = lines
        self.read = lines.read

    def begin(self, file: int) -> int:
        return 2

    def done(self) -> int:
        return self._lines.count

    def name(self, file: int, line: int) -> str:
        return ""


def chat_source(given: Any, reading: Reading) -> ChatFiles | ChatRows:
    """Returns ChatFiles for paths or a folder written by datasets.save_to_disk(), and ChatRows for any other iterable.

    Errors: ValueError for an empty list or a mixed one; TypeError for anything else.
    """
    if isinstance(given, (str, os.PathLike)):
        return ChatFiles(_files([given]), reading)
    if not isinstance(given, Iterable) or isinstance(given, (bytes, dict)):
        raise TypeError(f"files: {type(given).__name__} is neither paths nor an iterable of rows")
    if isinstance(given, (list, tuple)):
        if not given:
            raise ValueError("files: none were given")
        paths = [isinstance(one, (str, os.PathLike)) for one in given]
        if all(paths):
            return ChatFiles(_files(given), reading)
        if any(paths):
            raise ValueError("files: paths and rows are mixed")
    return ChatRows(given, reading.line)


def _files(given: Iterable[Any]) -> list[str]:
    """Returns the given files, and the files in the given folders."""
    return [file for one in given for file in (saved_files(os.fspath(one)) if os.path.isdir(one) else [os.fspath(one)])]
