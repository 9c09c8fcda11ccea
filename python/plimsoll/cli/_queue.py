# SPDX-License-Identifier: Apache-2.0
"""A folder of jobs that any process adds to, and one runs (_queue_runner.py): docs/formats/queue.md.

Threads: a Queue is for one thread; any number of processes.   Memory: one job. On disk: what the constants say.
"""
from __future__ import annotations

import contextlib
import fcntl
import json
import os
import pathlib
import sqlite3
import struct
import time
import urllib.parse
import zlib
from collections.abc import Callable, Iterator
from typing import Any

from .. import _core
from ..core._folders import sync_folder
from ..errors import CorruptError, NotFoundError

WAITING_MOST, ENDED_MOST, COMMAND_BYTES_MOST = 1000, 200, 64 << 10
FORMAT = 2  # 1 was a file for each job.
OVER = ("done", "failed", "cancelled")
Job = dict[str, Any]
_NEW: Job = {"state": "waiting", "command": [], "directory": "", "memory_limit": "", "timeout_seconds": 0, "restarts_most": 0,
             "restarts": 0, "restart_progress": "", "cancel": False, "starts": 0, "deaths": 0, "added": 0, "not_before": 0,
             "started": 0, "ended": 0, "guard": 0, "guard_began": 0, "progress": "", "why": "", "ending": "", "status": 0,
             "seconds": 0.0, "limit_bytes": 0, "peak_bytes": 0, "stalled_seconds": 0.0, "advice": [], "incidents": []}
_LISTS = [key for key, value in _NEW.items() if isinstance(value, list)]
_FLOCK = "hhqqi0q"  # struct flock of Linux.


class Queue:
    """Jobs by number. Errors of all calls: sqlite3.Error, OSError; CorruptError naming a job that was damaged."""

    def __init__(self, folder: str | os.PathLike[str], *, make: bool = False) -> None:
        """Opens a queue; with `make`, makes it where there is none. Errors: NotFoundError; ValueError for one of another format."""
        self.folder = pathlib.Path(folder)
        self.file = self.folder / "queue.db"
        if (self.folder / "jobs").is_dir():
            raise self._other(1)
        if make:
            for one in (*reversed(self.folder.absolute().parents), self.folder, self.folder / "logs"):
                if not one.is_dir():
                    one.mkdir(exist_ok=True)
                    sync_folder(one.parent)
        elif not self.file.is_file():
            raise self._none()
        name = f"file:{urllib.parse.quote(str(self.file))}?mode={'rwc' if make else 'rw'}"
        self._db = sqlite3.connect(name, uri=True, timeout=60, isolation_level=None)
        self._db.text_factory = lambda text: text.decode(errors="replace")  # Damage is found by the checksum.
        self._db.execute("PRAGMA synchronous = EXTRA")  # FULL, and the end of the journal is synced too.
        if make:
            with self._writing():
                self._db.execute(f"CREATE TABLE IF NOT EXISTS job (id INTEGER PRIMARY KEY, {', '.join(_NEW)}, crc32)")
                self._db.execute(f"PRAGMA user_version = {FORMAT}")
        [(found,)] = self._db.execute("PRAGMA user_version")
        if found != FORMAT:
            raise self._other(found) if found else self._none()  # 0: whoever made it was killed meanwhile.

    def _none(self) -> NotFoundError:
        return NotFoundError(f"{self.folder}: no queue there\n  `plimsoll queue add DIR` makes it")

    def _other(self, found: int) -> ValueError:
        return ValueError(f"{self.folder}: a queue of format {found}, and this release has {FORMAT}\n"
                          "  run it to its end by the release that made it, or add its jobs to a new folder")

    @contextlib.contextmanager
    def _writing(self) -> Iterator[None]:
        self._db.execute("BEGIN IMMEDIATE")
        try:
            yield
            self._db.execute("COMMIT")
        except BaseException:
            with contextlib.suppress(sqlite3.Error):  # The next who opens the file does it.
                self._db.execute("ROLLBACK")
            raise

    def add(self, job: Job) -> int:
        """Takes a job in, durably; returns its number. Errors: ValueError when WAITING_MOST wait, or when it is too large."""
        size = sum(len(word.encode()) + 1 for word in job["command"]) + len(job["directory"].encode())
        if size > COMMAND_BYTES_MOST:
            raise ValueError(f"the command has {size} bytes, and may have {COMMAND_BYTES_MOST}\n  write a long command as a script")
        with self._writing():
            [(waiting,)] = self._db.execute("SELECT count(*) FROM job WHERE state NOT IN (?, ?, ?)", OVER)
            if waiting >= WAITING_MOST:
                raise ValueError(f"{self.folder}: {waiting} jobs wait already\n  a queue takes {WAITING_MOST:,}: run it, or cancel some")
            old = "SELECT id FROM job WHERE state IN (?, ?, ?) ORDER BY id DESC LIMIT -1 OFFSET ?"
            for number, in self._db.execute(old, (*OVER, ENDED_MOST)).fetchall():
                self._remove(number)
            [(number,)] = self._db.execute("SELECT coalesce(max(id), 0) + 1 FROM job")
            self._write({**_NEW, **job, "id": number, "added": int(time.time())})
        return number

    def _write(self, job: Job) -> None:
        job = {**job, "cancel": int(job["cancel"]), **{key: json.dumps(job[key]) for key in _LISTS}}
        values = [job[key] for key in ("id", *_NEW)]
        self._db.execute(f"REPLACE INTO job VALUES (?{', ?' * len(values)})", (*values, _checksum(values)))

    def _remove(self, number: int) -> None:
        for log in (self.log_of(number), f"{self.log_of(number)}.old"):
            pathlib.Path(log).unlink(missing_ok=True)
        self._db.execute("DELETE FROM job WHERE id = ?", (number,))

    def numbers(self) -> list[int]:
        """Numbers of all jobs, smallest first."""
        return [number for number, in self._db.execute("SELECT id FROM job ORDER BY id")]

    def waiting(self) -> list[tuple[int, int]]:
        """Numbers of those that wait, smallest first, and when they may start."""
        return self._db.execute("SELECT id, not_before FROM job WHERE state = 'waiting' ORDER BY id").fetchall()

    def read(self, number: int) -> Job:
        """Returns one job. Errors: NotFoundError."""
        found = self._db.execute("SELECT * FROM job WHERE id = ?", (number,)).fetchone()
        if found is None:
            raise NotFoundError(f"{self.folder}: no job {number}\n  `plimsoll queue list DIR` shows them")
        *values, checksum = found
        if _checksum(values) != checksum:
            raise CorruptError(f"{self.file}: job {number}: its checksum does not match: it was damaged, or edited by hand\n"
                               f"  remove it (plimsoll queue cancel {self.folder} {number}), and add the job again")
        job = dict(zip(["id", *_NEW], values))
        return {"format": FORMAT, **job, "cancel": bool(job["cancel"]), **{key: json.loads(job[key]) for key in _LISTS}}

    def change(self, number: int, how: Callable[[Job], None]) -> Job:
        """Reads, changes and writes a job while nobody else does; returns it as written. Errors: as read()."""
        with self._writing():
            job = self.read(number)
            how(job)
            self._write(job)
        return job

    def cancel(self, number: int) -> bool:
        """Cancels a job that waits, has one that runs asked to end, removes one that is damaged. False: it was over."""
        with self._writing():
            try:
                job = self.read(number)
            except CorruptError:
                self._remove(number)
                return True
            if job["state"] == "waiting":
                self._write({**job, "state": "cancelled", "ended": int(time.time()), "why": "cancelled while it waited"})
            elif job["state"] == "running":
                self._write({**job, "cancel": True, "why": "cancelled, asked to end"})
        return job["state"] not in OVER

    def log_of(self, number: int) -> str:
        """Returns the path of the file with a job's output."""
        return str(self.folder / "logs" / f"{number}.log")

    def lock_runner(self) -> int:
        """Returns a descriptor with the lock that lets this process alone run the queue. Errors: ValueError naming the process that holds it."""
        lock = os.open(self.folder / ".lock", os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o666)
        try:
            fcntl.lockf(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)  # A child that outlives this process has no part in it.
        except BlockingIOError:
            raise ValueError(f"{self.folder}: process {_holder(lock)} runs this queue\n  one process at a time runs a queue") from None
        return lock

    def runs(self) -> bool:
        """Whether another process runs it."""
        with contextlib.suppress(FileNotFoundError), open(self.folder / ".lock", "rb") as file:
            return _holder(file.fileno()) is not None
        return False


def _holder(lock: int) -> int | None:
    wanted = struct.pack(_FLOCK, fcntl.F_WRLCK, os.SEEK_SET, 0, 0, 0)
    kind, _, _, _, pid = struct.unpack(_FLOCK, fcntl.fcntl(lock, fcntl.F_GETLK, wanted))
    return None if kind == fcntl.F_UNLCK else pid


def _checksum(values: list[Any]) -> int:
    return zlib.crc32(json.dumps(values).encode())


def health_of(job: Job) -> tuple[int, list[str]]:
    """Returns the health of a job, from 0 to 100, and what it lost points for (docs/guide/jobs.md)."""
    peak, limit, deaths, rules = job["peak_bytes"], job["limit_bytes"], job["deaths"], [one["rule"] for one in job["incidents"]]
    peaked = f"{'passed' if peak > limit else 'came near'} its limit: {_core.format_bytes(peak)} at its peak, of {_core.format_bytes(limit)}"
    lost = [(50 * (job["state"] == "failed"), "failed"),
            (min(10 * deaths, 40), f"died {deaths} {'time' if deaths == 1 else 'times'}"),
            (20 * bool(rules), f"incident: {rules[-1] if rules else ''}"),
            (10 * (0 < limit - limit // 20 < peak), peaked),
            (20 * (job["stalled_seconds"] > job["seconds"] / 10), f"waited {job['stalled_seconds']:.0f} s for memory")]
    return max(100 - sum(points for points, _ in lost), 0), [why for points, why in lost if points]
