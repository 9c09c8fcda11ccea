# SPDX-License-Identifier: Apache-2.0
"""SetImport: rows of a source become one file, begun, gone on with, or found done (decision 0038).

What a row is, and what becomes of it, is for import_chat() and import_vision() to say.

Threads: one owner.   Memory: a reader's, a writer's.
"""
from __future__ import annotations

import contextlib
import hashlib
import json
from collections.abc import Callable
from typing import Any

from ._chat_source import ChatFiles, ChatRows
from ._memory import Governor
from .errors import CorruptError, NotFoundError


class Again(Exception):
    """The import begins anew, from this position."""

    def __init__(self, position: dict[str, Any]) -> None:
        super().__init__()
        self.position = position


class SetImport:
    """One import. A subclass opens readers and writers and does the work."""

    def __init__(self, source: ChatFiles | ChatRows, out: str, work_name: str, governor: Governor,
                 progress: Callable[[int, int], object] | None) -> None:
        """work_name: of the work; the set's own name has the contents of the inputs, too, known at the end."""
        self.source = source
        self.out = out
        self.work_name = work_name
        self.governor = governor
        self.progress = progress

    def open_writer(self, fingerprint: str, rebuild: bool) -> Any:
        """A TokenWriter or ImageWriter."""
        raise NotImplementedError

    def open_set(self) -> tuple[str, str]:
        """`about` and fingerprint of the set that is there. Errors: those of the set."""
        raise NotImplementedError

    def open_reader(self) -> Any:
        """A reader of the source, from its beginning."""
        raise NotImplementedError

    def skip_rest(self, reader: Any) -> None:
        """Reads the inputs to their end, and makes nothing of them."""
        reader.skip_rest()

    def work(self, reader: Any, writer: Any, position: dict[str, Any]) -> None:
        """Makes the set, from where `position` says. Errors: Again."""
        raise NotImplementedError

    def run(self, rebuild: bool) -> bool:
        """Makes the set; True when it was there."""
        again = self.source.can_be_asked_again
        made = self._made() if again and not rebuild else None
        writer = self.open_writer(made or self.work_name, rebuild or not again)
        try:
            if writer.whole:
                return True
            position = json.loads(writer.position) if writer.position else {}
            while True:
                try:
                    with contextlib.closing(self.open_reader()) as reader:
                        if "reader" in position and not reader.go_on(position["reader"]):
                            raise Again({})  # What was read before is no longer what it was.
                        self.work(reader, writer, position)
                    return False
                except Again as begun:
                    position = begun.position
                writer.close()
                writer = self.open_writer(self.work_name, rebuild=True)
        finally:
            writer.close()

    def inputs(self, reader: Any) -> list[dict[str, Any]]:
        """Names, and what was read of each, unpacked."""
        return [{"name": name, "bytes": size, "crc32c": crc}
                for (name, _), (size, crc) in zip(self.source.identity(), reader.sums, strict=True)]

    def finish(self, reader: Any, writer: Any, about: dict[str, Any], wanted: str, count: int) -> None:
        """Makes the set of what is written. Errors: ValueError where that has none of what is wanted."""
        if count == 0:
            raise ValueError(f"{self.out}: no row of these files has {wanted}: {reader.report}")
        inputs = self.inputs(reader)
        about = {"work": self.work_name, **about, "inputs": inputs, **json.loads(reader.report)}
        writer.finish(json.dumps(about, ensure_ascii=False), digest([self.work_name, inputs]))

    def _made(self) -> str | None:
        """The fingerprint of the set that is there, when it is of these inputs and options."""
        try:
            text, fingerprint = self.open_set()
            about = json.loads(text)
        except (NotFoundError, CorruptError, ValueError, OSError):
            return None  # The writer says what is there instead.
        if about.get("work") != self.work_name:
            return None
        with contextlib.closing(self.open_reader()) as reader:
            self.skip_rest(reader)
            return fingerprint if self.inputs(reader) == about["inputs"] else None


def digest(of: list[Any]) -> str:
    """A fingerprint of what JSON can say."""
    return hashlib.sha256(json.dumps(of).encode()).hexdigest()[:32]
