# SPDX-License-Identifier: Apache-2.0
"""SetImport: makes one file from the rows of a source: starts it, resumes it, or finds it done (decision 0038).

import_chat() and import_vision() decide how a row is read and written. A part of the files becomes a set of its own
(_parts.py); such sets are joined into the same set that one import of all files would make.

Threads: one owner.   Memory: a reader's, a writer's.
"""
from __future__ import annotations

import contextlib
import copy
import hashlib
import json
from collections.abc import Callable, Collection, Sequence
from typing import Any

from ...errors import CorruptError, NotFoundError
from ...memory._memory import Governor
from ._chat_source import ChatFiles, ChatRows
from ._parts import Part, check_parts, how_to_make, part_path
from ._row_files import is_of_files
from ._row_reader import KeyCounts

_EXAMPLES = 3  # Most examples of one kind of oddity.
_ROWS_AT_ONCE = 64
_JOIN_COMMIT_BYTES = 256 << 20


class Again(Exception):
    """Raised to begin the import anew, from this position."""

    def __init__(self, position: dict[str, Any]) -> None:
        super().__init__()
        self.position = position


class SetImport:
    """One import of a set. A subclass opens readers and writers and does the work."""

    wanted = ""  # The content that a set must have: "an image".
    harmless: Collection[str]  # Oddities that are no errors.
    odd_order: Sequence[str] = ()  # Order of oddities in a report; empty: as they were found.

    def __init__(self, source: ChatFiles | ChatRows, out: str, work_name: str, governor: Governor,
                 progress: Callable[[int, int], object] | None) -> None:
        """Takes the parts of an import. work_name: fingerprint of inputs' names, options and version. The set's own fingerprint also
        covers the inputs' contents, which are known at the end."""
        self.source = source
        self.out = out
        self.work_name = work_name
        self.governor = governor
        self.progress = progress
        self._is_part = False

    def open_writer(self, fingerprint: str, rebuild: bool) -> Any:
        """Returns a TokenWriter or ImageWriter."""
        raise NotImplementedError

    def open_set(self) -> Any:
        """Opens the existing set. Errors: those of the set."""
        raise NotImplementedError

    def about(self) -> dict[str, Any]:
        """Returns the facts about the set that are known before any row is read: "options" and others."""
        raise NotImplementedError

    def count(self, writer: Any) -> int:
        """Returns the number of `wanted` things written."""
        raise NotImplementedError

    def open_reader(self) -> Any:
        """Returns a reader of the source, from its beginning."""
        raise NotImplementedError

    def skip_rest(self, reader: Any) -> None:
        """Reads the inputs to their end without using them, for their sums."""
        reader.skip_rest()

    def work(self, reader: Any, writer: Any, position: dict[str, Any]) -> None:
        """Makes the set, from `position` on. Errors: Again."""
        raise NotImplementedError

    def make(self, rebuild: bool, part: Part | None, join: int) -> tuple[str, bool]:
        """Makes the set of all files, of one part, or of `join` parts. Returns its path, and True where it was done already."""
        check_parts(part, join)
        if join:
            return self.out, self._join(join, rebuild)
        job = self if part is None else self._parts([part])[0]
        return job.out, job.run(rebuild)

    def run(self, rebuild: bool, position: dict[str, Any] | None = None) -> bool:
        """Makes the set; a new one begins from `position`. Returns True where it was done already."""
        again = self.source.can_be_asked_again
        made = self._made() if again and not rebuild else None
        writer = self.open_writer(made or self.work_name, rebuild or not again)
        try:
            if writer.whole:
                return True
            position = json.loads(writer.position) if writer.position else position or {}
            while True:
                try:
                    with contextlib.closing(self.open_reader()) as reader:
                        if "reader" in position and not reader.go_on(position["reader"]):
                            raise Again({})  # The inputs read before have changed.
                        self.work(reader, writer, position)
                    return False
                except Again as begun:
                    position = begun.position
                writer.close()
                writer = self.open_writer(self.work_name, rebuild=True)
        finally:
            writer.close()

    def inputs(self, reader: Any) -> list[dict[str, Any]]:
        """Returns name, unpacked bytes read and CRC-32C of each input."""
        return [{"name": name, "bytes": size, "crc32c": crc}
                for (name, _), (size, crc) in zip(self.source.identity(), reader.sums, strict=True)]

    def joined_inputs(self, inputs: list[list[dict[str, Any]]]) -> list[dict[str, Any]]:
        """Combines the parts' inputs() into those of all files."""
        return self.source.joined(inputs)

    def joined_alike(self, parts: list[SetImport], abouts: list[dict[str, Any]]) -> bool:
        """Whether all parts were made in the same way as one import of all files. Otherwise makes the differing parts anew."""
        return True

    def finish(self, reader: Any, writer: Any, about: dict[str, Any]) -> None:
        """Completes the set. Errors: ValueError where nothing of what is `wanted` was written."""
        said = json.loads(reader.report)
        said["odd"] |= self.source.odd()
        self._finish(writer, {"work": self.work_name, **about, "inputs": self.inputs(reader), **said})

    def _finish(self, writer: Any, about: dict[str, Any]) -> None:
        if self.count(writer) == 0 and not self._is_part:
            found = json.dumps({key: about[key] for key in ("lines", "rows", "odd", "keys")})
            raise ValueError(f"{self.out}: no row of these files has {self.wanted}: {found}")
        writer.finish(json.dumps(about, ensure_ascii=False), digest([self.work_name, about["inputs"]]))

    def _parts(self, parts: list[Part]) -> list[SetImport]:
        """Returns the import of each part."""
        all_ = digest([self.work_name, self.source.files()])
        jobs = [copy.copy(self) for _ in parts]
        for job, part in zip(jobs, parts, strict=True):
            job.source = self.source.part(part)
            job.out = part_path(self.out, part)
            job.work_name = digest([all_, *part])
            job._is_part = True
        return jobs

    def _join(self, count: int, rebuild: bool) -> bool:
        """Makes the set from its parts. Returns True where it was done already."""
        numbers = [(k, count) for k in range(1, count + 1)]
        parts = self._parts(numbers)
        while True:
            made = [self._made_part(*one) for one in zip(parts, numbers, strict=True)]
            abouts = [about for about, _ in made]
            if self.joined_alike(parts, abouts):
                break
        about = self._joined_about(abouts)
        with contextlib.closing(self.open_writer(digest([self.work_name, about["inputs"]]), rebuild)) as writer:
            if writer.whole:
                return True
            self._copy(writer, parts, [fingerprint for _, fingerprint in made])
            self._finish(writer, about)
        return False

    def _made_part(self, job: SetImport, part: Part) -> tuple[dict[str, Any], str]:
        """Returns a part's `about` and fingerprint. Errors: NotFoundError, ValueError, both naming the part's set."""
        try:
            with contextlib.closing(job.open_set()) as made:
                about, fingerprint = json.loads(made.about), made.counts[-1]
        except NotFoundError:
            raise NotFoundError(f"{job.out}: part {part[0]} of {part[1]} is missing: make it "
                                f"({how_to_make(part)})") from None
        if about.get("work") != job.work_name:
            differ = [key for key, value in self.about()["options"].items()
                      if about.get("options", {}).get(key, value) != value]
            what = f"another {', '.join(differ)}" if differ else "other files, options or another tokenizer"
            raise ValueError(f"{job.out}: made with {what}: make it anew ({how_to_make(part)})")
        return about, fingerprint

    def _joined_about(self, abouts: list[dict[str, Any]]) -> dict[str, Any]:
        """Combines the parts' `about` into that of the whole set. Errors: ValueError past errors_max."""
        odd: dict[str, dict[str, Any]] = {}
        lines = 0
        keys = KeyCounts()
        for about in abouts:
            part = about["keys"]
            keys.add(part["used"], part["refused"], ((name, *counts) for name, counts in part["counted"].items()))
            for key, one in about["odd"].items():
                all_ = odd.setdefault(key, {"count": 0, "first": []})
                all_["count"] += one["count"]
                all_["first"] = [*all_["first"], *one["first"]][:_EXAMPLES]
            lines += about["lines"]
        errors = {key: one for key, one in odd.items() if not (key in self.harmless or is_of_files(key))}
        left_out, most = sum(one["count"] for one in errors.values()), abouts[0]["options"]["errors_max"]
        if left_out > most:
            raise ValueError(f"{self.out}: {left_out} lines were left out of its parts for an error: {json.dumps(errors)}: "
                             f"correct them, or have more left out with errors_max (--errors-max), which is {most}")
        return {**abouts[0], "work": self.work_name, "inputs": self.joined_inputs([about["inputs"] for about in abouts]),
                "lines": lines, "rows": sum(about["rows"] for about in abouts),
                "odd": {key: odd[key] for key in dict.fromkeys([*self.odd_order, *odd]) if key in odd}, "keys": keys.said()}

    def _copy(self, writer: Any, parts: list[SetImport], fingerprints: list[str]) -> None:
        """Copies the parts' rows, from the last commit on."""
        begin, row = json.loads(writer.position) if writer.position else (0, 0)
        since = 0
        for number in range(begin, len(parts)):
            with contextlib.closing(parts[number].open_set()) as made:
                if made.counts[-1] != fingerprints[number]:
                    raise ValueError(f"{parts[number].out}: it was made anew meanwhile: join again")
                while row < made.rows:
                    end = min(made.rows, row + _ROWS_AT_ONCE)
                    since += writer.append_rows(made, row, end)
                    row = end
                    if since >= _JOIN_COMMIT_BYTES:
                        writer.commit(json.dumps([number, row]))
                        since = 0
            row = 0
            if self.progress is not None:
                self.progress(number + 1, len(parts))

    def _made(self) -> str | None:
        """Returns the existing set's fingerprint if it was made from these inputs and options, else None."""
        try:
            with contextlib.closing(self.open_set()) as made:
                about, fingerprint = json.loads(made.about), made.counts[-1]
        except (NotFoundError, CorruptError, ValueError, OSError):
            return None  # The writer's error says what is there.
        if about.get("work") != self.work_name:
            return None
        with contextlib.closing(self.open_reader()) as reader:
            self.skip_rest(reader)
            return fingerprint if self.inputs(reader) == about["inputs"] else None


def digest(of: list[Any]) -> str:
    """Returns a fingerprint of values that JSON can represent: 32 hexadecimal digits."""
    return hashlib.sha256(json.dumps(of).encode()).hexdigest()[:32]
