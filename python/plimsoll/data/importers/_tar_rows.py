# SPDX-License-Identifier: Apache-2.0
"""tar_rows(): reads rows from archives in WebDataset's format.

A member's key is its name up to the first dot after the last slash; the rest is its extension. A sample is a series of
neighbouring members with one key: images (.jpg, .jpeg, .png, .webp), a text (.txt, .text, .caption, .cap or .cls), and
the row's other columns (.json). The last part of an extension decides a member's kind. Members that are not used are
counted by their extension; a member that occurs twice is refused.

Threads: one owner.   Memory: a sample, bounded as a line is, and the last 65,536 keys.
"""
from __future__ import annotations

import codecs
import dataclasses
import io
import json
import lzma
import os
import tarfile
import zlib
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, cast


if TYPE_CHECKING:
    from ._row_files import Reading

_TAR: Any = tarfile  # The type stubs lack the errors of headers.
_DAMAGE = (tarfile.TarError, EOFError, zlib.error, lzma.LZMAError)
_IMAGES = ("jpg", "jpeg", "png", "webp")
_TEXTS = ("txt", "text", "caption", "cap")
_CAPTIONS = ("caption", "captions", "text", "txt")  # Columns of .json with the text, if no member is a text.
_CHATS = ("messages", "conversations")
_KEYS_KEPT = 1 << 16


@dataclasses.dataclass(frozen=True)
class Fields:
    """Column names in a row without messages."""

    text: str
    image: str
    response: str


class _Member(tarfile.TarInfo):
    """A member whose header is sound. At a damaged or truncated header tarfile would end silently; this class raises.

    It sets two attributes of the archive: `ended`, after an end-of-archive mark, and `number`, which counts the archives
    joined to it before this member.
    """

    @classmethod
    def fromtarfile(cls, archive: Any) -> _Member:
        try:
            member = super().fromtarfile(archive)
        except (_TAR.InvalidHeaderError, _TAR.TruncatedHeaderError) as error:
            raise tarfile.ReadError(f"{error} at byte {archive.offset}") from None
        except _TAR.EOFHeaderError:
            archive.ended = True
            raise
        except _TAR.EmptyHeaderError:
            if not getattr(archive, "ended", False):
                raise tarfile.ReadError(f"it ends without an archive's end at byte {archive.offset}") from None
            raise
        archive.number = getattr(archive, "number", 0) + getattr(archive, "ended", False)
        archive.ended = False
        return member


@dataclasses.dataclass
class _Sample:
    """The members of one key that have been read so far."""

    key: str = ""
    size: int = 0
    names: set[str] = dataclasses.field(default_factory=set)
    images: list[dict[str, bytes]] = dataclasses.field(default_factory=list)
    texts: dict[str, str] = dataclasses.field(default_factory=dict)  # Texts by extension.
    said: dict[str, Any] = dataclasses.field(default_factory=dict)


def tar_rows(stream: io.RawIOBase, path: str, reading: Reading, count: Callable[[str, str], None]
             ) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yields (key, row) of each sample. count: called with a reason and a member's name for each member not used.

    Errors: ValueError naming archive and member; those of the stream.
    """
    try:
        with tarfile.open(fileobj=io.BufferedReader(stream, 1 << 16), mode="r|", tarinfo=_Member, ignore_zeros=True) as archive:
            yield from _Archive(archive, path, reading, count).rows()
    except _DAMAGE as error:
        raise ValueError(f"{path}: damaged archive: {error}") from None


class _Archive:
    """The samples of an archive, and of archives joined to it."""

    def __init__(self, archive: Any, path: str, reading: Reading, count: Callable[[str, str], None]) -> None:
        self._archive, self._path, self._reading, self._count = archive, path, reading, count
        self._keys: dict[str, None] = {}

    def rows(self) -> Iterator[tuple[str, dict[str, Any]]]:
        sample, number = _Sample(), 0
        while (member := self._archive.next()) is not None:
            self._archive.members = []  # tarfile would keep all members.
            if self._archive.number != number:
                number = self._archive.number
                yield from self._row(sample)
                sample = _Sample()
                self._keys.clear()  # Another archive, whose samples may have the same keys.
            named = self._named(member)
            if named is None:
                continue
            key, extension = named
            if key != sample.key:
                yield from self._row(sample)
                sample = _Sample(key)
                self._new_key(key, member.name)
            self._add(sample, member, extension)
        yield from self._row(sample)

    def _named(self, member: tarfile.TarInfo) -> tuple[str, str] | None:
        """Returns (key, extension) of a member; counts one that belongs to no sample and returns None."""
        folder, base = os.path.split(member.name)
        stem, dot, extension = base.partition(".")
        if member.isdir():
            return None
        if not member.isfile():
            self._count("member that is a link", member.name)
        elif not stem:  # macOS puts ._0.jpg beside 0.jpg.
            self._count("hidden member", member.name)
        elif not dot:
            self._count("member without an extension", member.name)
        else:
            return os.path.join(folder, stem), extension.lower()
        return None

    def _new_key(self, key: str, name: str) -> None:
        if key in self._keys:
            raise self._error(name, f"its sample {key!r} was there before, and a sample's members follow one another: sort "
                                    "the archive by name (tar --sort=name), or give samples names of their own")
        self._keys[key] = None
        if len(self._keys) > _KEYS_KEPT:
            del self._keys[next(iter(self._keys))]

    def _add(self, sample: _Sample, member: tarfile.TarInfo, extension: str) -> None:
        if member.name in sample.names:
            raise self._error(member.name, "it is there twice")
        sample.names.add(member.name)
        front, _, kind = extension.rpartition(".")
        fields = self._reading.fields
        column = next((one for one in (fields.text, fields.response) if one in (front, extension)), "")
        if not (kind in _IMAGES and self._reading.images) and kind not in (*_TEXTS, "cls", "json") and not column:
            self._count(f"member .{extension if len(extension) <= 32 else kind[:32]}", member.name)
            return
        if member.size > self._reading.member_bytes_max:
            raise self._error(member.name, f"{member.size} bytes, longer than image_bytes_max (--image-bytes-max)")
        sample.size += member.size
        if sample.size > self._reading.line_bytes_max:
            raise self._error(member.name, f"its sample {sample.key!r} is longer than line_bytes_max (--line-bytes-max); a key is "
                                           "the name up to its first dot")
        data = cast("io.BufferedReader", self._archive.extractfile(member)).read()
        try:
            if kind in _IMAGES and self._reading.images:
                sample.images.append({"bytes": data})
            elif kind == "json":
                self._add_json(sample, data)
            else:
                self._add_text(sample, column or kind, _text(data))
        except ValueError as error:
            raise self._error(member.name, str(error)) from None

    def _add_text(self, sample: _Sample, kind: str, text: str) -> None:
        if kind in sample.texts:
            raise ValueError(f"a second text of sample {sample.key!r}: a key is the name up to its first dot, so a name with a "
                             "dot in it joins samples: rename them")
        sample.texts[kind] = text

    def _add_json(self, sample: _Sample, data: bytes) -> None:
        said = json.loads(_text(data))
        if not isinstance(said, dict):
            raise ValueError("not a JSON object")
        twice = [key for key, value in said.items() if sample.said.get(key, value) != value]
        if twice:
            raise ValueError(f"a second {twice[0]!r} of sample {sample.key!r}: a key is the name up to its first dot, so a name "
                             "with a dot in it joins samples: rename them")
        sample.said.update(said)

    def _row(self, sample: _Sample) -> Iterator[tuple[str, dict[str, Any]]]:
        """Yields the row of a sample; nothing if none of its members is used."""
        row, texts = dict(sample.said), dict(sample.texts)
        if not (sample.images or texts or row):
            return
        named = {column: texts.pop(column) for column in (self._reading.fields.text, self._reading.fields.response) if column in texts}
        label = texts.pop("cls", None)
        row.update(named)
        chat = any(key in row for key in _CHATS)
        self._put_text(sample, row, texts, chat or self._reading.fields.text in named)
        if label is not None:
            self._put_text(sample, row, {"cls": label}, chat or self._reading.fields.text in row)
        if sample.images:
            self._put_images(sample, row)
        yield sample.key, row

    def _put_text(self, sample: _Sample, row: dict[str, Any], texts: dict[str, str], told: bool) -> None:
        """Puts the text of members into the row, or that of .json where no member is a text.

        told: the row has its text from elsewhere; members that say otherwise are counted.
        """
        column = self._reading.fields.text
        found = ""
        for kind, text in texts.items():
            if told and row.get(column) != text:
                self._count(f"member .{kind}", f"{sample.key}.{kind}")
            elif found and row[column] != text:
                raise self._error(f"{sample.key}.{kind}", f"another text than that of .{found}: say which one is the text with "
                                                          f"text_field (--text-field {kind})")
            elif not told:
                if row.get(column, text) != text:
                    self._count(f"{column} of .json, beside a text", f"{sample.key}.json")
                row[column], found = text, kind
        if column != "caption" and column in row and row.get("caption") == row[column]:
            del row["caption"]
        if not told and column not in row:
            caption = next((one for one in _CAPTIONS if isinstance(row.get(one), (str, list))), None)
            if caption is not None:
                row[column] = row.pop(caption)

    def _put_images(self, sample: _Sample, row: dict[str, Any]) -> None:
        column = self._reading.fields.image
        bases = {os.path.basename(name) for name in sample.names}
        for key in {column, "images"} & row.keys():
            said = row.pop(key)
            for one in said if isinstance(said, list) else [said]:
                if not (isinstance(one, str) and os.path.basename(one) in bases):
                    self._count(f"{key} of .json, beside an image", f"{sample.key}.json")
        row[column] = sample.images

    def _error(self, name: str, what: str) -> ValueError:
        return ValueError(f"{self._path}: {name}: {what}")


def _text(data: bytes) -> str:
    """Decodes a text, UTF-8 or UTF-16 with a byte-order mark. Errors: ValueError."""
    utf16 = data.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE))
    try:
        return data.decode("utf-16" if utf16 else "utf-8-sig").strip()
    except UnicodeDecodeError:
        raise ValueError("not UTF-8") from None
