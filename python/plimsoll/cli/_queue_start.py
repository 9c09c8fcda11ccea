# SPDX-License-Identifier: Apache-2.0
"""One start of a job, in two children: its guard, which is `plimsoll run`, and a process that takes what it prints.

All memory that they and the job took returns to the system with them. When the runner dies, the guard has the job end; the other process
ends with the last who writes, so that the job may still print then.

Threads: of a process with no others.   Memory: four descriptors; of the process that takes what is printed 64 KiB, and a line.
"""
from __future__ import annotations

import contextlib
import ctypes
import json
import os
import pathlib
import re
import signal
import time
from collections.abc import Callable, Sequence
from typing import Any

from .. import _core
from ._queue import Job
from ._queue_rules import Rule

LOG_BYTES_MOST, LINE_BYTES_MOST, EVIDENCE_BYTES_MOST = 1 << 20, 4096, 200
SIGNALS = {signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGCHLD}  # A runner blocks them, and waits for them.
_KILLED_MOST_S = 5.0  # For the kernel to end what was killed, and for what it printed to be read.
_CANNOT_START = 126
_IGNORED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGPIPE, signal.SIGXFSZ)  # By who ends with the last who writes.
_DIES_WITH_PARENT = 1  # PR_SET_PDEATHSIG
_libc = ctypes.CDLL(None)


class Start:
    """Its children wait for go(): when the runner dies before, nothing runs. Errors: OSError."""

    def __init__(self, job: Job, log: str, rules: Sequence[Rule], mask: set[int]) -> None:
        """Starts the job. mask: signals that are blocked in it."""
        self.asked, self._deadline, runner = False, 0.0, os.getpid()
        self._found, self._note, self._report = (os.memfd_create(f"plimsoll-{name}") for name in ("incidents", "progress", "report"))
        source, sink = os.pipe()
        self._taker = _child(lambda: _take(source, log, rules, self._found), sink)
        go, self._go = os.pipe()
        self.guard = _child(lambda: _guard(job, sink, go, runner, mask, self._note, self._report), source, self._go)
        for one in (source, sink, go):
            os.close(one)

    def go(self) -> None:
        """Lets the job begin: who runs it has been written down."""
        with contextlib.suppress(BrokenPipeError):  # It was killed, as look() finds.
            os.write(self._go, b"g")

    def progress(self) -> str:
        """Returns the last progress of a run in the job: "runs/a: step 400"."""
        return os.pread(self._note, 4096, 0).rstrip(b"\0").decode(errors="replace")

    def ask(self, grace: float) -> None:
        """Asks it to end; after `grace` seconds look() kills it. More calls change nothing."""
        if not self.asked:
            self.asked, self._deadline = True, time.monotonic() + grace
            os.kill(self.guard, signal.SIGTERM)

    def look(self) -> dict[str, Any] | None:
        """Returns the result of a start that has ended, else None: that of `plimsoll run --json`, with `told`, `status`, and `lines` that rules matched."""
        pid, waited = os.waitpid(self.guard, os.WNOHANG)
        if not pid:
            if self.asked and time.monotonic() >= self._deadline:
                kill_below(self.guard)
            return None
        self.guard, report, status = 0, {}, os.waitstatus_to_exitcode(waited)
        with contextlib.suppress(ValueError):  # It was killed before it told.
            report = json.loads(os.pread(self._report, 1 << 20, 0))
        return {"status": 128 - status if status < 0 else status, **report, "told": bool(report), "lines": self._lines()}

    def _lines(self) -> list[str]:
        deadline = time.monotonic() + _KILLED_MOST_S
        while not os.waitpid(self._taker, os.WNOHANG)[0]:
            if time.monotonic() >= deadline:
                os.kill(self._taker, signal.SIGKILL)
            time.sleep(0.01)
        self._taker = 0
        return json.loads(os.pread(self._found, 1 << 20, 0) or b"[]")

    def kill(self) -> None:
        """Ends what still runs, at once."""
        if self._go:
            os.close(self._go)  # It may not have begun.
        self._go, deadline = 0, time.monotonic() + _KILLED_MOST_S
        while self.guard and not os.waitpid(self.guard, os.WNOHANG)[0]:
            kill_below(self.guard)
            if time.monotonic() >= deadline:
                os.kill(self.guard, signal.SIGKILL)
            time.sleep(0.05)
        self.guard = 0
        if self._taker:
            self._lines()

    def close(self) -> None:
        """Lets go of it; what still runs is ended."""
        self.kill()
        for one in (self._found, self._note, self._report):
            os.close(one)


def _child(work: Callable[[], int], *not_its: int) -> int:
    pid = os.fork()
    if pid == 0:
        status = _CANNOT_START
        try:
            os.setpgid(0, 0)  # Ctrl-C is the runner's: it hands on what it is told.
            for one in not_its:
                os.close(one)
            status = work()
        finally:
            os._exit(status)
    return pid


def _guard(job: Job, sink: int, go: int, runner: int, mask: set[int], note: int, report: int) -> int:
    for at, descriptor in enumerate((os.open(os.devnull, os.O_RDONLY), sink, sink)):
        os.dup2(descriptor, at)
    os.close(sink)
    _libc.prctl(_DIES_WITH_PARENT, signal.SIGTERM)
    if os.getppid() != runner or os.read(go, 1) != b"g":
        return _CANNOT_START
    try:
        os.chdir(job["directory"])
    except OSError:
        os.write(2, f"plimsoll queue: {job['directory']}: cannot be entered\n".encode())
        return _CANNOT_START
    for name in ("PYTHONPATH", "PYTHONSAFEPATH"):  # As they were before the built program handed over to this one.
        before = os.environ.pop(f"PLIMSOLL_{name}", None)
        if before is not None:
            os.environ.pop(name, None)
        if before:
            os.environ[name] = before
    os.environ["PLIMSOLL_PROGRESS"] = f"/proc/{runner}/fd/{note}"
    for ignored in (signal.SIGPIPE, signal.SIGXFSZ):  # By Python, and so would the job.
        signal.signal(ignored, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_SETMASK, mask)
    words = ["plimsoll", "run", "--memory-limit", job["memory_limit"], "--json-file", f"/proc/{runner}/fd/{report}", "--", *job["command"]]
    return _core.run_program([word.encode() for word in words])


def _take(source: int, path: str, rules: Sequence[Rule], found: int) -> int:
    """Writes a log of bounded size, and looks for incidents, until all who write are gone. A full disk loses lines."""
    for ignored in _IGNORED:
        signal.signal(ignored, signal.SIG_IGN)
    nothing = os.open(os.devnull, os.O_RDWR)
    for one in (0, 1, 2):  # Who reads what the runner says must not wait for this one, too.
        os.dup2(nothing, one)
    patterns = [(at, rule.pattern) for at, rule in enumerate(rules) if rule.pattern]
    lines, line, number, size, file = [""] * len(rules), b"", 1, 0, _new_log(path, -1)

    def match() -> None:
        for at, pattern in patterns:
            if line and not lines[at] and pattern.search(line):
                lines[at] = f"line {number}: {line[:EVIDENCE_BYTES_MOST].replace(bytes(1), b' ').decode(errors='replace')}"

    while part := os.read(source, 64 << 10):
        if size + len(part) > LOG_BYTES_MOST:
            size, file = 0, _new_log(path, file)
        size += len(part)
        with contextlib.suppress(OSError):
            left = part
            while left:
                left = left[os.write(file, left):]
        for piece in re.split(rb"(?<=[\n\r])", part) if patterns else []:  # A bar begins its line anew.
            line += piece.rstrip(b"\r\n")[:LINE_BYTES_MOST - len(line)]
            if piece.endswith((b"\n", b"\r")):
                match()
                line, number = b"", number + piece.endswith(b"\n")
    match()
    os.pwrite(found, json.dumps(lines).encode(), 0)
    return 0


def _new_log(path: str, before: int) -> int:
    with contextlib.suppress(OSError):
        os.close(before)
    with contextlib.suppress(OSError):
        os.rename(path, f"{path}.old")
    with contextlib.suppress(OSError):
        return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW, 0o666)
    return -1


def stat_of(pid: int | str) -> list[str]:
    """Returns the state, the parent and the further fields of /proc/PID/stat; [] for a process that has ended."""
    with contextlib.suppress(OSError):
        fields = pathlib.Path(f"/proc/{pid}/stat").read_text(errors="replace").rsplit(")", 1)[1].split()
        return [] if fields[0] == "Z" else fields
    return []


def began(pid: int) -> int:
    """Returns the time at which a process began, in the kernel's ticks; 0 if it has ended."""
    return int((stat_of(pid) or ["0"] * 20)[19])


def kill_below(guard: int) -> None:
    """Kills all processes of a job but those that guard it, which then end by themselves, and tell."""
    parents = {int(pid): int(stat[1]) for pid in os.listdir("/proc") if pid.isdecimal() and (stat := stat_of(pid))}
    more = {pid for pid, parent in parents.items() if parent == guard}
    while more := {pid for pid, parent in parents.items() if parent in more}:
        for pid in more:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


def end_leftover(job: Job, grace: float, wait: Callable[[], bool]) -> bool:
    """Ends what a runner that died has left: asked, and killed `grace` seconds later. False where wait() says that there is no time."""
    guard, deadline = job["guard"], time.monotonic() + grace

    def there() -> bool:
        return guard > 0 and began(guard) == job["guard_began"]

    with contextlib.suppress(ProcessLookupError):
        if there():
            os.kill(guard, signal.SIGTERM)
        while there():
            if time.monotonic() >= deadline:
                kill_below(guard)
            if time.monotonic() >= deadline + _KILLED_MOST_S:
                os.kill(guard, signal.SIGKILL)
            if not wait():
                return False
    return True
