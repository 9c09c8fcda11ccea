# SPDX-License-Identifier: Apache-2.0
"""Where chats come from: files, or rows of any iterable.

Both are read once, by a ChatReader (src/data/chat_reader.h); what was read it says in sums.

Threads: one owner.   Memory: of rows a block of 64 KiB of lines, and the row that goes beyond it.
"""
from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator, Sized
from typing import Any

from . import _core
from .errors import NotFoundError

_BLOCK_BYTES = 64 << 10
TRAINING = ("assistant", "last", "all")  # ChatTraining.


class ChatFiles:
    """Files of chats. Errors: NotFoundError, OSError."""

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

    def open(self, governor: _core.Governor, options: dict[str, Any]) -> _core.ChatReader:
        """A reader of them, from the beginning. Errors: BudgetExceeded."""
        return _open(governor, self._paths, options, None)


class ChatRows:
    """Rows of an iterable, each a dict as a line of a file is."""

    def __init__(self, rows: Iterable[Any]) -> None:
        self._rows = rows
        self.can_be_asked_again = not isinstance(rows, Iterator)
        self.total = len(rows) if isinstance(rows, Sized) else 0

    def identity(self) -> list[list[Any]]:
        """Of rows nothing is known before they are read."""
        return [["rows", self.total]]

    def open(self, governor: _core.Governor, options: dict[str, Any]) -> _core.ChatReader:
        """A reader of them, from the beginning. Errors: BudgetExceeded."""
        return _open(governor, ["rows"], options, _Lines(self._rows).read)


class _Lines:
    """Rows as lines of JSON, read as a file is."""

    def __init__(self, rows: Iterable[Any]) -> None:
        self._rows = enumerate(rows)
        self._keys = _core.chat_row_keys()
        self._left = memoryview(b"")

    def read(self, size: int) -> bytes:
        if not self._left:
            lines, held = [], 0
            for number, row in self._rows:
                lines.append(self._line(number, row))
                held += len(lines[-1])
                if held >= _BLOCK_BYTES:
                    break
            self._left = memoryview(b"".join(lines))
        part, self._left = self._left[:size], self._left[size:]
        return bytes(part)

    def _line(self, number: int, row: Any) -> bytes:
        if isinstance(row, dict):  # Other columns may be pictures, dates, or long.
            row = {key: row[key] for key in self._keys if row.get(key) is not None}
        try:
            text = json.dumps(row, ensure_ascii=False, allow_nan=False)
        except (TypeError, ValueError) as error:
            raise ValueError(f"rows[{number}]: {error}") from None
        return text.encode(errors="surrogatepass") + b"\n"


def chat_source(given: Any) -> ChatFiles | ChatRows:
    """Files where these are paths, else rows. Errors: ValueError for nothing, TypeError for what is neither."""
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
    return ChatRows(given)


def _open(governor: _core.Governor, names: list[str], options: dict[str, Any], feed: Any) -> _core.ChatReader:
    return _core.ChatReader.open(governor, names, TRAINING.index(options["train"]), options["line_bytes_max"],
                                 options["text_bytes_max"], options["errors_max"], feed)
