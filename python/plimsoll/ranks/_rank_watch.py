# SPDX-License-Identifier: Apache-2.0
"""Ranks that are stopped (SIGSTOP, a debugger) for too long are killed, and the run ends on all ranks (decision 0032).

The sockets of a stopped rank stay open, so gloo would wait for its time-out. A thread reads each rank's process state from
/proc. A rank that computes or waits is never in the stopped state, however long it takes.

Threads: one of its own, named plimsoll-ranks, beside the one that trains.
Memory:  one file descriptor per rank.
"""
from __future__ import annotations

import contextlib
import os
import pathlib
import signal
import threading
import time

_LOOKS_EVERY = 1.0  # Seconds, or a quarter of the time allowed if that is less.


def state_of(pid: int) -> str:
    """Returns the process state in /proc, as one letter; "X" if there is no such process."""
    try:
        return pathlib.Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return "X"


class RankWatch:
    """A watch over the other ranks of one machine, from construction to close()."""

    def __init__(self, pids: dict[int, int], seconds: float) -> None:
        """Starts the watch. pids: process ids by rank, all alive. seconds: longest time that a rank may be stopped."""
        self._pids, self._seconds = pids, seconds
        self.stopped: dict[int, float] = {}
        """Ranks that are stopped, or were when they ended, with the time it was first seen. Written by the thread, read by any."""
        # A PID may be reused by another process; a descriptor is not.
        self._handles = {rank: os.pidfd_open(pid) for rank, pid in pids.items()}
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._look, name="plimsoll-ranks", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Ends the watch; a second close does nothing."""
        if not self._closed.is_set():
            self._closed.set()
            self._thread.join()
            for handle in self._handles.values():
                os.close(handle)

    def _look(self) -> None:
        every, before = min(_LOOKS_EVERY, self._seconds / 4), time.monotonic()
        while not self._closed.wait(every):
            now = time.monotonic()
            if now - before > 2 * every:  # This process was itself stopped or delayed: the others may have resumed meanwhile.
                self.stopped.clear()
            before = now
            for rank, pid in self._pids.items():
                state = state_of(pid)
                if state not in "TtZX":
                    self.stopped.pop(rank, None)
                elif state in "Tt" and now - self.stopped.setdefault(rank, now) >= self._seconds - every:
                    with contextlib.suppress(OSError):
                        signal.pidfd_send_signal(self._handles[rank], signal.SIGKILL)
