# SPDX-License-Identifier: Apache-2.0
"""TarRows: rows of WebDataset's archives, as import_vision() takes them.

A sample is the members that follow one another and have one name up to the first dot: an image (.jpg, .jpeg, .png,
.webp), text (.txt), and what is else of the row (.json). Names that begin with a dot are left out.

Threads: one owner.   Memory: a sample, none of its members longer than a bound.
"""
from __future__ import annotations

import bz2
import gzip
import json
import lzma
import os
import re
import tarfile
import zlib
from collections.abc import Iterator
from typing import IO, Any, cast

from ._vision_row import Fields

_PACKED = {b"\x1f\x8b\x08": gzip.open, b"BZh": bz2.open, b"\xfd7z": lzma.open}  # By what a file begins with.
_DAMAGE = (tarfile.TarError, EOFError, zlib.error, lzma.LZMAError)
_TAR = re.compile(r"\.tar(\.|$)")  # And not train.target.jsonl.
_IMAGES = (".jpg", ".jpeg", ".png", ".webp")


class _Member(tarfile.TarInfo):
    """A member whose header is sound: at a damaged one, or a part of one, tarfile would end without a word."""

    @classmethod
    def fromtarfile(cls, archive: tarfile.TarFile) -> _Member:
        try:
            return super().fromtarfile(archive)
        except (tarfile.InvalidHeaderError, tarfile.TruncatedHeaderError) as error:
            raise tarfile.ReadError(f"{error} at byte {archive.offset}") from None


class TarRows:
    """An iterable that can be asked again. Errors, as rows are asked for: ValueError naming archive and member; OSError."""

    def __init__(self, paths: list[str], fields: Fields, bytes_max: int) -> None:
        """bytes_max: of a member, unpacked."""
        self.paths = paths
        self._fields = fields
        self._bytes_max = bytes_max

    def some(self, which: slice) -> TarRows:
        """Of some of the archives."""
        return TarRows(self.paths[which], self._fields, self._bytes_max)

    def __iter__(self) -> Iterator[dict[str, Any]]:
        for path in self.paths:
            try:
                with _opened(path) as stream:
                    with tarfile.open(fileobj=stream, mode="r|", tarinfo=_Member) as archive:
                        yield from self._rows(archive, path)
                    while stream.read(1 << 20):  # The checksum of what is packed comes last.
                        pass
            except _DAMAGE as error:
                raise ValueError(f"{path}: damaged archive: {error}") from None
            except OSError as error:
                if error.errno is not None:
                    raise
                raise ValueError(f"{path}: damaged archive: {error}") from None  # Of gzip and bz2.

    def _rows(self, archive: tarfile.TarFile, path: str) -> Iterator[dict[str, Any]]:
        name, row, more = "", {}, {}  # type: tuple[str, dict[str, Any], dict[str, Any]]
        while (member := archive.next()) is not None:
            archive.members = []  # It would keep them all.
            folder, base = os.path.split(member.name)
            if not member.isfile() or base.startswith("."):  # As macOS puts ._0.jpg beside 0.jpg.
                continue
            stem, _, kind = base.partition(".")
            if os.path.join(folder, stem) != name:
                if row or more:
                    yield more | row
                name, row, more = os.path.join(folder, stem), {}, {}
            where = f"{path}: {member.name}"
            if member.size > self._bytes_max:
                raise ValueError(f"{where}: {member.size} bytes, longer than image_bytes_max (--image-bytes-max)")
            self._add(row, more, f".{kind}".lower(), cast("IO[bytes]", archive.extractfile(member)).read(), where)
        if row or more:
            yield more | row

    def _add(self, row: dict[str, Any], more: dict[str, Any], kind: str, data: bytes, where: str) -> None:
        """Adds a member to a row; what only JSON says of it, to `more`."""
        try:
            if kind.endswith(_IMAGES):
                row.setdefault(self._fields.image, []).append({"bytes": data})
            elif kind == ".txt":
                row[self._fields.text] = data.decode().strip()
            elif kind == ".json":
                said = json.loads(data)
                if not isinstance(said, dict):
                    raise ValueError("not a JSON object")
                more.update(said)
        except ValueError as error:
            raise ValueError(f"{where}: {error}") from None


def _opened(path: str) -> IO[bytes]:
    """The archive, unpacked. Errors: OSError."""
    with open(path, "rb") as file:
        begins = file.read(3)
    return cast("IO[bytes]", _PACKED.get(begins, open)(path, "rb"))


def tar_rows(given: Any, fields: Fields, bytes_max: int) -> Any:
    """TarRows where these are paths of archives, else what was given. Errors: ValueError where they are mixed."""
    paths = [given] if isinstance(given, (str, os.PathLike)) else given
    if not isinstance(paths, (list, tuple)) or not paths:
        return given
    tars = [isinstance(one, (str, os.PathLike)) and _TAR.search(os.path.basename(os.fspath(one))) is not None
            for one in paths]
    if any(tars) and not all(tars):
        raise ValueError("files: archives (.tar) and others are mixed")
    return TarRows([os.fspath(one) for one in paths], fields, bytes_max) if any(tars) else given
