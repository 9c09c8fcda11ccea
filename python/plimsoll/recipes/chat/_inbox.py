# SPDX-License-Identifier: Apache-2.0
"""Inbox: trains on the files of chats that are dropped into a folder, one after another.

    INBOX/chats.jsonl          waits until two looks find it unchanged; the oldest is next
    RUN/inbox/000003-….tokens  its token set, while it is trained on
    INBOX/done/ failed/ skipped/  its place afterwards: no file is trained on twice, and a broken one is not tried again
    RUN/inbox.json             the ledger: the outcome of the last _KEPT files, and its cause
    RUN/.skip                  makes the training skip the current file; anyone may create it

Threads: the thread that trains.   Memory: a look at the folder keeps one name; the ledger has a bound.
"""
from __future__ import annotations

import json
import os
import pathlib
import zlib
from typing import TYPE_CHECKING, Any, cast

from ...core._folders import replaced
from ...data._token_set import TokenSet
from ...data.importers._chat_import import import_chat
from ...errors import CorruptError, NotFoundError

if TYPE_CHECKING:
    from ..tuning._train import Training
    from . import Options

_LOOKS_EVERY = 0.5  # Seconds.
_KEPT = 1000
_KINDS = (".jsonl", ".json", ".csv", ".tsv", ".parquet", ".arrow", ".tar", ".tgz")
_PACKED = (".gz", ".zst", ".bz2", ".xz")


class _Skipped(Exception):
    """Raised when the file is to be skipped while it is imported."""


class _Stopped(Exception):
    """Raised when the run is asked to stop while a file is imported."""


class Inbox:
    """A folder of dropped files that a training trains on. The training's notes record the current file."""

    def __init__(self, training: Training) -> None:
        self._training, self._run, self._notes = training, training.run, training.notes
        self._options = cast("Options", training.options)
        self._folder = pathlib.Path(self._options.inbox)
        if not self._folder.is_dir():
            raise NotFoundError(f"inbox: {self._folder} is no folder")
        self._sets = self._run.path / "inbox"
        self._ledger = self._run.path / "inbox.json"
        self._skip = self._run.path / ".skip"
        self._skipping = False
        training.leaves = self._leaves  # type: ignore[method-assign]

    def train(self) -> None:
        """Trains on dropped files until the run is asked to stop, or no file has come for inbox_wait_seconds."""
        run, notes = self._run, self._notes
        for _ in range(notes["number"]):  # Loops that have ended.
            run.steps((), epochs=self._options.epochs)
        waited = 0.0
        while not run.stopped:
            if notes["file"]:
                self._loop()
                continue
            name = self._next()
            if name and self._begin(name):
                waited = 0.0
            elif not name:
                if 0 < self._options.inbox_wait_seconds <= waited:
                    break
                run.idle(_LOOKS_EVERY)
                waited += _LOOKS_EVERY
        self._training.said.update({f"files_{what}": notes[what] for what in ("trained", "failed", "skipped")})

    # ---- A file ----

    def _next(self) -> str:
        """Returns the name of the oldest file if a second look finds it unchanged, so that it is probably whole; else ""."""
        oldest = ""
        least: tuple[int, str] | None = None
        with os.scandir(self._folder) as entries:
            for entry in entries:
                stem = entry.name
                for packed in _PACKED:
                    stem = stem.removesuffix(packed)
                if entry.name.startswith(".") or not stem.endswith(_KINDS) or not entry.is_file():
                    continue
                rank = (entry.stat().st_mtime_ns, entry.name)
                if least is None or rank < least:
                    least, oldest = rank, entry.name
        if not oldest:
            return ""
        before = self._stamp(oldest)
        self._run.idle(_LOOKS_EVERY)
        return oldest if not self._run.stopped and before and before == self._stamp(oldest) else ""

    def _stamp(self, name: str) -> list[int]:
        try:
            stat = os.stat(self._folder / name)
        except FileNotFoundError:
            return []
        return [stat.st_size, stat.st_mtime_ns]

    def _begin(self, name: str) -> bool:
        """Imports a file. Returns True if it was imported and is in the notes."""
        notes, options = self._notes, self._options
        self._skip.unlink(missing_ok=True)  # Made for a file before.
        stamp = self._stamp(name)
        out = self._set_of(name, stamp)
        self._sets.mkdir(exist_ok=True)
        for old in self._sets.iterdir():  # The one before may be what the last commit speaks of.
            if old.name[:6].isdigit() and int(old.name[:6]) < notes["number"] - 1:
                old.unlink()
        try:
            with self._run.phase("import"):
                import_chat(self._folder / name, out, tokenizer=options.model, train=options.train_on,
                            errors_max=options.errors_max, ignore_keys=options.ignore_keys.split(","),
                            governor=self._run.governor, progress=self._look)
        except _Skipped:
            self._end(name, stamp, "skipped", "while it was imported")
            return False
        except _Stopped:
            self._run.idle(0)
            return False
        except (ValueError, CorruptError, NotFoundError, ImportError) as error:
            self._end(name, stamp, "failed", str(error))
            return False
        notes.update(file=name, stamp=stamp)
        return True

    def _set_of(self, name: str, stamp: list[int]) -> pathlib.Path:
        number = zlib.crc32(f"{name} {stamp}".encode())
        return self._sets / f"{self._notes['number']:06}-{number:08x}.tokens"

    def _look(self, *_: int) -> None:
        if self._run.stop_asked:
            raise _Stopped
        if self._skip.exists():
            raise _Skipped

    def _loop(self) -> None:
        """Trains on the rest of the file in the notes."""
        run, notes = self._run, self._notes
        name, stamp, began = notes["file"], notes["stamp"], run.steps_made
        self._skipping = False
        out = self._set_of(name, stamp)
        try:
            with TokenSet(out) as tokens:
                rows = len(tokens)
                self._training.loop(tokens)
        except ValueError as error:  # A set with another vocabulary, or with too few rows.
            if run.steps_made != began:
                raise
            run.steps((), epochs=self._options.epochs)
            self._done("failed", str(error), 0, 0)
            return
        if not run.stopped:
            self._done("skipped" if self._skipping else "trained", "", rows, run.steps_made - began)

    def _leaves(self) -> bool:
        """Whether the current file is to be skipped: RUN/.skip exists."""
        self._skipping = self._skipping or self._skip.exists()
        return self._skipping

    def _done(self, outcome: str, why: str, rows: int, steps: int) -> None:
        notes = self._notes
        name, stamp = notes["file"], notes["stamp"]
        notes.update(number=notes["number"] + 1, file="", stamp=[])
        notes["due"] = False
        self._skip.unlink(missing_ok=True)
        self._end(name, stamp, outcome, why, rows=rows, steps=steps, number=notes["number"])

    # ---- The ledger ----

    def _end(self, name: str, stamp: list[int], outcome: str, why: str, **more: Any) -> None:
        """Moves the file, then writes the ledger. After a crash in between the file is gone and only the ledger is written."""
        self._notes[outcome] += 1
        entries = self._entries()
        if any(one["name"] == name and one["stamp"] == stamp for one in entries):
            return  # A life before did it, and had not committed.
        if self._stamp(name) == stamp:
            place = self._folder / ("done" if outcome == "trained" else outcome)
            place.mkdir(exist_ok=True)
            target, copies = place / name, 0
            while target.exists():
                copies += 1
                target = place / f"{name}.{copies}"
            os.rename(self._folder / name, target)
        entry = {"name": name, "stamp": stamp, "outcome": outcome, "why": why, "step": self._run.steps_made, **more}
        with replaced(self._ledger) as partial:
            partial.write_text(json.dumps({"files": [*entries, entry][-_KEPT:]}, ensure_ascii=False, indent=1), encoding="utf-8")
        self._run.event("inbox", **{key: value for key, value in entry.items() if key != "stamp"})

    def _entries(self) -> list[dict[str, Any]]:
        try:
            return list(json.loads(self._ledger.read_text(encoding="utf-8"))["files"])
        except FileNotFoundError:
            return []
        except (ValueError, TypeError, KeyError):
            raise CorruptError(f"{self._ledger}: no ledger of an inbox; remove it: files that were done are in "
                               f"{self._folder}/done, failed and skipped") from None
