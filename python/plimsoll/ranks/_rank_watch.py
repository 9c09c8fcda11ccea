# SPDX-License-Identifier: Apache-2.0
"""A rank that is stopped (SIGSTOP, a debugger): the others end it, and with it themselves (decision 0032).

Its sockets stay open, so gloo would wait for its time-out. A thread looks what state the kernel says it is in; one that
computes, or waits, for however long is not stopped.

Threads: one of its own, named plimsoll-ranks, beside the one that trains.
Memory:  a descriptor a rank.
"""
from __future__ import annotations

import contextlib
import os
import pathlib
import signal
import threading
import time

_LOOKS_EVERY = 1.0  # Seconds, and four times within the bound at least.


def state_of(pid: int) -> str:
    """One letter, as /proc has it; X: there is no such process."""
    try:
        return pathlib.Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return "X"


class RankWatch:
    """Over the other ranks of one machine, from its making to close()."""

    def __init__(self, pids: dict[int, int], seconds: float) -> None:
        """pids: by rank, all alive. seconds: longest that one may be stopped."""
        self._pids, self._seconds = pids, seconds
        self.stopped: dict[int, float] = {}
        """Ranks that are, or were when they ended, and when it was first seen. Written by the thread, read by any."""
        # A number may become another process's; a descriptor does not.
        self._handles = {rank: os.pidfd_open(pid) for rank, pid in pids.items()}
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._look, name="plimsoll-ranks", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """A second close does nothing."""
        if not self._closed.is_set():
            self._closed.set()
            self._thread.join()
            for handle in self._handles.values():
                os.close(handle)

    def _look(self) -> None:
        every, before = min(_LOOKS_EVERY, self._seconds / 4), time.monotonic()
        while not self._closed.wait(every):
            now = time.monotonic()
            if now - before > 2 * every:  # This one was stopped itself, or kept from looking: others may just have gone on.
                self.stopped.clear()
            before = now
            for rank, pid in self._pids.items():
                state = state_of(pid)
                if state not in "TtZX":
                    self.stopped.pop(rank, None)
                elif state in "Tt" and now - self.stopped.setdefault(rank, now) >= self._seconds - every:
                    with contextlib.suppress(OSError):
                        signal.pidfd_send_signal(self._handles[rank], signal.SIGKILL)
