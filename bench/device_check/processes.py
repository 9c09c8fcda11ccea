# SPDX-License-Identifier: Apache-2.0
"""Calls a function in a forked process, within a time: a context of a device, and its end, are that process's own.

Forked from a process that has imported torch, and used nothing of it, a check begins in a moment.

Threads: none: the caller has one.   Memory: a copy of the caller's, as far as it is written.
"""
from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import pathlib
import select
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from typing import Any

_LAST_LINES = 30


@dataclasses.dataclass
class Called:
    """How a call went: what it returned, or None and why; the seconds that it took."""

    told: dict[str, Any] | None
    why: str
    seconds: float


def called(function: Callable[[], dict[str, Any]], most: float) -> Called:
    """Calls `function` in a process and a process group of its own. One that takes longer than `most` seconds is ended."""
    with tempfile.TemporaryDirectory(prefix="plimsoll-") as folder:
        file, log = pathlib.Path(folder, "result.json"), pathlib.Path(folder, "log")
        sys.stdout.flush()
        began = time.monotonic()
        over, end = os.pipe()
        process = os.fork()
        if process == 0:
            _call(function, file, log, end)
        os.close(end)  # The process says when it is done, and so does its death.
        with contextlib.suppress(PermissionError, ProcessLookupError):  # It does so itself; whoever is first.
            os.setpgid(process, process)
        in_time = bool(select.select([over], [], [], most)[0])
        if not in_time:
            os.killpg(process, signal.SIGKILL)
        _, status = os.waitpid(process, 0)
        os.close(over)
        seconds = time.monotonic() - began
        if not in_time:
            return Called(None, f"not done after {most:.0f} s", seconds)
        if file.exists():
            return Called(json.loads(file.read_text("utf-8")), "", seconds)
        last = [line for line in log.read_text("utf-8", errors="replace").splitlines() if line.strip()][-_LAST_LINES:]
        return Called(None, "\n".join(last) or f"its process ended with status {os.waitstatus_to_exitcode(status)}", seconds)


def _call(function: Callable[[], dict[str, Any]], file: pathlib.Path, log: pathlib.Path, end: int) -> None:
    """The process's life; it does not return."""
    try:
        os.setpgid(0, 0)
        with open(log, "wb") as out:
            os.dup2(out.fileno(), 1)
            os.dup2(out.fileno(), 2)
        told = json.dumps(function())
        part = file.with_suffix(".part")
        part.write_text(told, encoding="utf-8")
        part.rename(file)  # Whole, or not there.
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os.write(end, b".")
        os._exit(0)
