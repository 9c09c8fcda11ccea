# SPDX-License-Identifier: Apache-2.0
"""Where rows come from: files, or rows of any iterable.

Both are read once, as lines (src/data/chat_lines.h); what was read is said in sums.

Threads: one owner.   Memory: of rows a block of 64 KiB of lines, and the row that goes beyond it.
"""
from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable, Iterator, Sized
from typing import Any

from . import _core
from ._parts import Part, joined_sum, share
from ._tar_rows import TarRows
from .errors import NotFoundError

_BLOCK_BYTES = 64 << 10
_CHAT_KEYS = _core.chat_row_keys()
TRAINING = ("assistant", "last", "all")  # ChatTraining.
Line = Callable[[Any], Any]


class ChatFiles:
    """Files of rows. Errors: NotFoundError, OSError."""

    can_be_asked_again = True

    def __init__(self, paths: list[str]) -> None:
        self._paths = paths
        try:
            self._bytes = [os.stat(path).st_size for path in paths]
        except FileNotFoundError as error:
            raise NotFoundError(f"{error.filename}: {error.strerror}") from None
        self.total = sum(self._bytes)

    def identity(self) -> list[list[Any]]:
        """What is known of the inputs before they are read: names and sizes."""
        return [[os.path.basename(path), size] for path, size in zip(self._paths, self._bytes, strict=True)]

    def lines(self) -> tuple[list[str], None]:
        """What a reader of lines is to open: names, and no feed."""
        return self._paths, None

    def files(self) -> list[list[Any]]:
        """Names and sizes of what parts are made of."""
        return self.identity()

    def part(self, part: Part) -> ChatFiles:
        """The files of a part; there may be none."""
        return ChatFiles(self._paths[share(self._bytes, part)])

    def joined(self, inputs: list[list[dict[str, Any]]]) -> list[dict[str, Any]]:
        """What was read, of what was read of each part."""
        return [one for part in inputs for one in part]

    def named(self, first: list[str], lines: int) -> list[str]:
        """Lines that a part names, as they are named where so many lines are before the part."""
        return first


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

    def lines(self) -> tuple[list[str], Callable[[int], bytes]]:
        """What a reader of lines is to open: a name, and the feed of its lines from the first row on."""
        return ["rows"], _Lines(self._rows, self._line).read

    def files(self) -> list[list[Any]]:
        """As of ChatFiles: the archives. Errors: ValueError where there are none; NotFoundError, OSError."""
        return ChatFiles(self._archives().paths).files()

    def part(self, part: Part) -> ChatRows:
        """The rows of a part. Errors: those of files()."""
        archives = self._archives()
        return ChatRows(archives.some(share([size for _, size in self.files()], part)), self._line)

    def joined(self, inputs: list[list[dict[str, Any]]]) -> list[dict[str, Any]]:
        """As of ChatFiles."""
        return [joined_sum([part[0] for part in inputs])]

    def named(self, first: list[str], lines: int) -> list[str]:
        """As of ChatFiles: a row's name has its number."""
        return [f"rows[{int(name[5:-1]) + lines}]" for name in first]

    def _archives(self) -> TarRows:
        if not isinstance(self._rows, TarRows):
            raise ValueError("part and join are for files, and these are rows of an iterable")
        return self._rows


class _Lines:
    """Rows as lines of JSON, read as a file is."""

    def __init__(self, rows: Iterable[Any], line: Line) -> None:
        self._rows = enumerate(rows)
        self._line = line
        self._left = memoryview(b"")

    def read(self, size: int) -> bytes:
        if not self._left:
            lines, held = [], 0
            for number, row in self._rows:
                lines.append(self._encoded(number, row))
                held += len(lines[-1])
                if held >= _BLOCK_BYTES:
                    break
            self._left = memoryview(b"".join(lines))
        part, self._left = self._left[:size], self._left[size:]
        return bytes(part)

    def _encoded(self, number: int, row: Any) -> bytes:
        try:
            text = json.dumps(self._line(row), ensure_ascii=False, allow_nan=False)
        except (TypeError, ValueError) as error:
            raise ValueError(f"rows[{number}]: {error}") from None
        return text.encode(errors="surrogatepass") + b"\n"


def chat_line(row: Any) -> Any:
    """Of a row what an import of chats looks at: other columns may be pictures, dates, or long."""
    if isinstance(row, dict):
        return {key: row[key] for key in _CHAT_KEYS if row.get(key) is not None}
    return row


def chat_source(given: Any, line: Line = chat_line) -> ChatFiles | ChatRows:
    """Files where these are paths, else rows, of which `line` says what JSON is to say.

    Errors: ValueError for nothing, TypeError for what is neither.
    """
    if isinstance(given, (str, os.PathLike)):
        return ChatFiles([os.fspath(given)])
    if not isinstance(given, Iterable) or isinstance(given, (bytes, dict)):
        raise TypeError(f"files: {type(given).__name__} is neither paths nor an iterable of rows")
    if isinstance(given, (list, tuple)):
        if not given:
            raise ValueError("files: none were given")
        paths = [isinstance(one, (str, os.PathLike)) for one in given]
        if all(paths):
            return ChatFiles([os.fspath(one) for one in given])
        if any(paths):
            raise ValueError("files: paths and rows are mixed")
    return ChatRows(given, line)
