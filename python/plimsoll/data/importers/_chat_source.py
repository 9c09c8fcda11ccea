# SPDX-License-Identifier: Apache-2.0
"""Where rows come from: files, or rows of any iterable.

Both are read once, as lines (src/data/chat_lines.h); what was read is said in sums.

Threads: one owner.   Memory: of rows a block of 64 KiB of lines, and the row that goes beyond it.
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
    """Files of rows. Errors: NotFoundError, OSError."""

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
        """What is known of the inputs before they are read: names and sizes."""
        return [[os.path.basename(path), size] for path, size in zip(self._paths, self._bytes, strict=True)]

    def lines(self) -> tuple[list[str], RowFeed]:
        """What a reader of lines is to open: names, and what gives the bytes of those that it does not read itself."""
        self._feed = RowFeed(self._paths, self._reading)
        return self._paths, self._feed

    def folders(self) -> list[str]:
        """Where paths in rows begin."""
        return [os.path.dirname(path) for path in self._paths]

    def odd(self) -> dict[str, dict[str, Any]]:
        """What of the files was not used, as counts and examples."""
        return {} if self._feed is None else self._feed.odd()

    def files(self) -> list[list[Any]]:
        """Names and sizes of what parts are made of."""
        return self.identity()

    def part(self, part: Part) -> ChatFiles:
        """The files of a part; there may be none."""
        return ChatFiles(self._paths[share(self._bytes, part)], self._reading)

    def joined(self, inputs: list[list[dict[str, Any]]]) -> list[dict[str, Any]]:
        """What was read, of what was read of each part."""
        return [one for part in inputs for one in part]


class ChatRows:
    """Rows of an iterable, each a dict as a line of a file is."""

    def __init__(self, rows: Iterable[Any], line: Line) -> None:
        self._rows = rows
        self._line = line
        self.can_be_asked_again = not isinstance(rows, Iterator)
        self.total = len(rows) if isinstance(rows, Sized) else 0

    def identity(self) -> list[list[Any]]:
        """Of rows nothing is known before they are read."""
        return [["rows", self.total]]

    def lines(self) -> tuple[list[str], _RowsFeed]:
        """What a reader of lines is to open: a name, and the rows from the first one on."""
        return ["rows"], _RowsFeed(RowLines((("", row) for row in self._rows), self._line, "rows"))

    def folders(self) -> list[str]:
        """Where paths in rows begin: where the process is."""
        return [""]

    def odd(self) -> dict[str, dict[str, Any]]:
        """As of ChatFiles: nothing."""
        return {}

    def files(self) -> list[list[Any]]:
        """As of ChatFiles. Errors: ValueError, always."""
        raise ValueError("part and join are for files, and these are rows of an iterable")

    def part(self, part: Part) -> ChatRows:
        """As of ChatFiles. Errors: ValueError, always."""
        raise ValueError("part and join are for files, and these are rows of an iterable")

    def joined(self, inputs: list[list[dict[str, Any]]]) -> list[dict[str, Any]]:
        """As of ChatFiles."""
        return [joined_sum([part[0] for part in inputs])]


class _RowsFeed:
    """Rows in place of a file, as ChatFeed has it (src/data/chat_lines.h)."""

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
    """Files where these are paths, or a folder that datasets.save_to_disk() wrote, else rows.

    Errors: ValueError for nothing, TypeError for what is neither.
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
    """Files, and those of folders."""
    return [file for one in given for file in (saved_files(os.fspath(one)) if os.path.isdir(one) else [os.fspath(one)])]
