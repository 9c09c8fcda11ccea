# SPDX-License-Identifier: Apache-2.0
"""look() and RowFeed: find a file's format by its first bytes and read its rows, for all imports in Python.

C++ itself reads JSON in UTF-8, plain or packed by gzip or zstd (src/data/chat_lines.h). This file reads bzip2 and xz,
UTF-16 and UTF-32, tables (CSV, TSV), WebDataset archives (_tar_rows.py), Parquet and Arrow (_arrow_rows.py). Any other
format is refused with its name (src/data/file_kind.h) and with advice.

Reading order: look(), RowFeed, RowLines.
Threads: one owner.   Memory: a block of lines, a row, and the decompressor; the latter and pyarrow's are leased.
"""
from __future__ import annotations

import bz2
import csv
import dataclasses
import io
import json
import lzma
import os
import re
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any, Protocol

from ... import _core
from ...errors import CorruptError
from ...memory._memory import Governor
from ._arrow_rows import arrow_rows
from ._tar_rows import Fields, tar_rows

_BLOCK_BYTES = 64 << 10
_LINE_MOST = 64 << 10  # Most bytes of a table's header.
_NAMES_KEPT = 1 << 16  # Names of the last rows, for errors.
_BZIP2_BYTES = 8 << 20
_XZ_BYTES = (16 << 20, 80 << 20)  # Memory of a decoder: up to xz -6, up to xz -9.
_NAME = re.compile(r"[^\W\d][\w .:/-]{0,63}")
_EXAMPLES = 3
_PACKED = ("gzip", "zstd", "bzip2", "xz")
_TEXTS = {"utf-16": "utf-16", "utf-32": "utf-32", "text": "utf-8-sig"}  # Encodings, by kind of file.
ARROW = ("parquet", "arrow-file", "arrow-stream")

Row = tuple[str, Any]  # (name after the file's name, or "" for its number; content).
Line = Callable[[Any], Any]


class Bytes(Protocol):
    """A stream of a file's bytes, unpacked."""

    def read(self, size: int) -> bytes:
        """Returns at most `size` bytes; none at the end."""
    @property
    def position(self) -> int:
        """Number of bytes read from the file so far, packed."""
    def close(self) -> None: ...


@dataclasses.dataclass(frozen=True)
class Sort:
    """The format of a file."""

    packed: str  # "", "gzip", "zstd", "bzip2", "xz".
    kind: str  # The kind of the unpacked bytes, from _core.file_sort(), or "table".
    encoding: str = ""  # The encoding of a text.
    separator: str = ""  # The separator of a table.


@dataclasses.dataclass(frozen=True)
class Reading:
    """How an import reads files: the column names, how a row becomes a line, bounds, and whether rows have images."""

    fields: Fields
    line: Line
    governor: Governor
    member_bytes_max: int
    line_bytes_max: int
    images: bool


class _Plain:
    """A file that is not packed."""

    def __init__(self, path: str) -> None:
        self._file = open(path, "rb")
        self.close = self._file.close

    def read(self, size: int) -> bytes:
        return self._file.read(size)

    @property
    def position(self) -> int:
        return self._file.tell()


class _Unpacking:
    """Unpacks bzip2 or xz, stream by stream, as their tools do. Anything but a stream after a stream is an error."""

    def __init__(self, path: str, packed: str, governor: Governor) -> None:
        self._path, self._packed = path, packed
        self._file = open(path, "rb")
        self._lease = governor.reserve(_BZIP2_BYTES)
        self._make: Callable[[], Any] = bz2.BZ2Decompressor
        if packed == "xz":
            self._make = self._xz_decoder()
        self._decoder = self._make()

    def _xz_decoder(self) -> Callable[[], Any]:
        """Returns a maker of decoders with the memory that the first block needs. Errors: ValueError for a dictionary above 64 MiB."""
        head = self._file.read(_BLOCK_BYTES)
        self._file.seek(0)
        for size in _XZ_BYTES:
            def make(size: int = size) -> lzma.LZMADecompressor:
                return lzma.LZMADecompressor(lzma.FORMAT_XZ, memlimit=size)
            try:
                make().decompress(head, 1)
            except lzma.LZMAError as error:
                if "limit" in str(error).lower():
                    continue
            self._lease.grow(max(0, size - self._lease.bytes))
            return make
        raise ValueError(f"{self._path}: packed by xz with a dictionary above 64 MiB: pack it again with xz -9 or less, or "
                         "unpack it first (xz -d)")

    def read(self, size: int) -> bytes:
        try:
            return self._read(size)
        except (OSError, lzma.LZMAError, EOFError) as error:
            if isinstance(error, OSError) and error.errno is not None:
                raise
            raise CorruptError(f"{self._path}: damaged {self._packed} ({error}): get the file again") from None

    def _read(self, size: int) -> bytes:
        while True:
            data = b""
            if self._decoder.eof:
                data = self._decoder.unused_data or self._file.read(_BLOCK_BYTES)
                while self._packed == "xz" and data and not data.strip(b"\0"):
                    data = self._file.read(_BLOCK_BYTES)  # Padding between streams.
                data = data.lstrip(b"\0") if self._packed == "xz" else data
                if not data:
                    return b""
                self._decoder = self._make()
            elif self._decoder.needs_input and not (data := self._file.read(_BLOCK_BYTES)):
                raise EOFError("it ends too soon")
            if out := self._decoder.decompress(data, size):
                return out

    @property
    def position(self) -> int:
        return self._file.tell()

    def close(self) -> None:
        self._file.close()
        self._lease.close()


class _Raw(io.RawIOBase):
    """Wraps Bytes as a raw stream of the standard library."""

    def __init__(self, source: Bytes) -> None:
        self._source = source

    def readable(self) -> bool:
        return True

    def readinto(self, into: Any) -> int:
        data = self._source.read(len(into))
        into[:len(data)] = data
        return len(data)


def is_of_files(key: str) -> bool:
    """Whether RowFeed.odd() counts this key. Such a count is about files; no row was left out for it."""
    return key == "empty_files" or "member" in key.split() or " of .json, beside " in key


def open_bytes(path: str, packed: str, governor: Governor) -> Bytes:
    """Opens a file for reading its unpacked bytes. Errors: OSError, CorruptError, BudgetExceeded, ValueError."""
    if packed in ("gzip", "zstd"):
        return _core.Unpacked.open(governor._core, path)
    return _Unpacking(path, packed, governor) if packed else _Plain(path)


def look(path: str, governor: Governor) -> Sort:
    """Finds the format of a file from its first bytes. Errors: as open_bytes(); ValueError naming a file that no import reads."""
    with open(path, "rb") as file:
        kind, name, advice = _core.file_sort(file.read(_core.file_head))
    packed = kind if kind in _PACKED else ""
    source = open_bytes(path, packed, governor)
    try:
        head = _start(source, _core.file_head)
        if packed:
            kind, name, advice = _core.file_sort(head)
        if kind in ARROW and packed:
            raise ValueError(f"{path}: {name} packed by {packed}: unpack it first")
        if kind in (*ARROW, "tar", "empty"):
            return Sort(packed, kind)
        if kind not in _TEXTS:
            raise ValueError(f"{path}: {name}, where rows are read: {advice}")
        while len(head) < _LINE_MOST and b"\n" not in head.lstrip() and (more := source.read(_BLOCK_BYTES)):
            head += more
        separator = _separator(head, _TEXTS[kind])
        return Sort(packed, "table" if separator else "text", _TEXTS[kind], separator)
    finally:
        source.close()


def _start(source: Bytes, size: int) -> bytes:
    head = b""
    while len(head) < size and (more := source.read(size - len(head))):
        head += more
    return head


def _separator(head: bytes, encoding: str) -> str:
    """Returns the separator in a table's header; "" where the text is no table, such as JSON."""
    first = head.decode(encoding, errors="replace").lstrip().split("\n", 1)[0].rstrip("\r")
    if first.startswith(("{", "[")):
        return ""
    separator = "\t" if "\t" in first else ","
    try:
        names = next(csv.reader([first], delimiter=separator, strict=True), [])
    except csv.Error:
        return ""
    if not all(_NAME.fullmatch(name) for name in names) or len(set(names)) < len(names):
        return ""
    return separator if len(names) > 1 or names == ["text"] else ""


def _table(source: Bytes, path: str, sort: Sort, bytes_max: int) -> Iterator[Row]:
    """Yields rows of CSV or TSV. Cells are texts; empty ones are left out; a cell that holds a list of objects is parsed as JSON."""
    csv.field_size_limit(max(csv.field_size_limit(), min(bytes_max, (1 << 31) - 1)))
    with io.TextIOWrapper(io.BufferedReader(_Raw(source), _BLOCK_BYTES), sort.encoding, newline="") as text:
        rows = csv.reader(text, delimiter=sort.separator, strict=True)
        try:
            names = next(rows)
            for cells in rows:
                if not cells:
                    continue
                if len(cells) != len(names):
                    raise ValueError(f"{path}:{rows.line_num}: {len(cells)} fields, where the header names {len(names)}")
                yield f"line {rows.line_num}", {name: _cell(cell) for name, cell in zip(names, cells, strict=True) if cell}
        except (csv.Error, UnicodeDecodeError) as error:
            raise ValueError(f"{path}:{rows.line_num + 1}: {error}") from None


def _cell(text: str) -> Any:
    if text.startswith("[") and text.endswith("]") and text[1:].lstrip().startswith("{"):
        try:
            return json.loads(text)
        except ValueError:
            pass
    return text


class _Text:
    """Reads a text in any encoding as UTF-8 bytes."""

    def __init__(self, source: Bytes, path: str, encoding: str) -> None:
        self._text = io.TextIOWrapper(io.BufferedReader(_Raw(source), _BLOCK_BYTES), encoding, newline="")
        self._path, self._encoding = path, encoding
        self._left = b""

    def read(self, size: int) -> bytes:
        if not self._left:
            try:
                self._left = self._text.read(_BLOCK_BYTES // 4).encode(errors="surrogatepass")
            except UnicodeDecodeError as error:
                raise ValueError(f"{self._path}: no text in {self._encoding.upper()}: {error}") from None
        part, self._left = self._left[:size], self._left[size:]
        return part


class RowLines:
    """Turns rows into lines of JSON, to be read like a file."""

    def __init__(self, rows: Iterator[Row], line: Line, where: str, named: Callable[[str], object] = str) -> None:
        """Takes rows, and the function that makes a line of one. where: name of the rows in errors; named: called with the name of each row."""
        self._rows = enumerate(rows)
        self._line, self._where, self._named = line, where, named
        self._left = memoryview(b"")
        self.count = 0

    def read(self, size: int) -> bytes:
        """Returns at most `size` bytes; none at the end. Errors: ValueError naming the row; those of the rows."""
        if not self._left:
            lines, held = [], 0
            for number, (name, row) in self._rows:
                lines.append(self._encoded(number, name, row))
                self._named(name)
                held += len(lines[-1])
                self.count = number + 1
                if held >= _BLOCK_BYTES:
                    break
            self._left = memoryview(b"".join(lines))
        part, self._left = self._left[:size], self._left[size:]
        return bytes(part)

    def _encoded(self, number: int, name: str, row: Any) -> bytes:
        try:
            text = json.dumps(self._line(row), ensure_ascii=False, allow_nan=False)
        except (TypeError, ValueError) as error:
            raise ValueError(f"{self._where}{f': {name}' if name else f'[{number}]'}: {error}") from None
        return text.encode(errors="surrogatepass") + b"\n"


class RowFeed:
    """Feeds C++ with the bytes or rows of files: implements ChatFeed (src/data/chat_lines.h)."""

    def __init__(self, paths: list[str], reading: Reading) -> None:
        self._paths, self._reading = paths, reading
        self._open: list[Any] = []
        self._names: deque[tuple[int, int, str]] = deque(maxlen=_NAMES_KEPT)
        self._counted: dict[int, dict[str, dict[str, Any]]] = {}

    def begin(self, file: int) -> int:
        """Begins a file. Returns ChatFeed's kind: 0 C++ reads it itself, 1 read() gives text, 2 rows. Errors: those of look()."""
        self.close()
        self._file, self._named = file, 0
        self._counted[file] = {}
        path, reading = self._paths[file], self._reading
        sort = look(path, reading.governor)
        if sort.kind == "empty":
            self.count("empty_files", os.path.basename(path))
        if sort.encoding in ("", "utf-8-sig") and sort.kind in ("text", "empty") and sort.packed in ("", "gzip", "zstd"):
            return 0
        if sort.kind in ARROW:
            rows: Iterator[Row] = arrow_rows(path, sort.kind, reading.governor)
            self._open, self._position = [rows], lambda: os.path.getsize(path)
        else:
            source = open_bytes(path, sort.packed, reading.governor)
            self._open, self._position = [source], lambda: source.position
            if sort.kind == "tar":
                rows = tar_rows(_Raw(source), path, reading, self.count)
            elif sort.kind == "table":
                rows = _table(source, path, sort, reading.line_bytes_max)
            else:
                self._read = _Text(source, path, sort.encoding or "utf-8-sig").read
                return 1
            self._open.insert(0, rows)
        self._read = RowLines(rows, reading.line, path, self._name).read
        return 2

    def read(self, size: int) -> bytes:
        """Returns at most `size` bytes of the file begun; none at the end."""
        return self._read(size)

    def done(self) -> int:
        """Returns the number of bytes read from the file begun, packed."""
        return self._position()

    def name(self, file: int, line: int) -> str:
        """Returns the name of a row among the last 65,536; "" where it has none."""
        return next((name for at, number, name in reversed(self._names) if (at, number) == (file, line)), "")

    def close(self) -> None:
        """Closes the file begun."""
        for one in self._open:
            one.close()
        self._open = []

    def count(self, key: str, name: str) -> None:
        """Counts something in the file begun that is not used. name: an example."""
        one = self._counted[self._file].setdefault(key, {"count": 0, "first": []})
        one["count"] += 1
        one["first"] += [name] if len(one["first"]) < _EXAMPLES else []

    def odd(self) -> dict[str, dict[str, Any]]:
        """Returns the counts and examples of all files, by key."""
        all_: dict[str, dict[str, Any]] = {}
        for of_file in self._counted.values():
            for key, one in of_file.items():
                sum_ = all_.setdefault(key, {"count": 0, "first": []})
                sum_["count"] += one["count"]
                sum_["first"] = [*sum_["first"], *one["first"]][:_EXAMPLES]
        return all_

    def _name(self, name: str) -> None:
        self._named += 1
        if name:
            self._names.append((self._file, self._named, name))
