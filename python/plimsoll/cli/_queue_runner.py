# SPDX-License-Identifier: Apache-2.0
"""Takes the jobs of a queue one after another, each under `plimsoll run` in a child.

What was running when a runner was killed is ended, and queued again: a job may so be started more than once, and a `plimsoll.Run` in it
goes on from its last commit. A job that was killed or failed is started again as `plimsoll run --restarts` has it, unless an incident
rule has it otherwise; while it waits the next one runs.

Reading order: _queue.py, _queue_start.py, _queue_rules.py, this file.

Threads: one Runner at a time, in a process with no other threads or children. SIGINT, SIGTERM and SIGHUP end it: the job is asked to end
and queued again; a second one kills it.   Memory: one job, the rules, and what _queue_start.py has.
"""
from __future__ import annotations

import contextlib
import os
import signal
import sqlite3
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from .. import _core
from ..errors import CorruptError, NotFoundError
from ._queue import Job, Queue
from ._queue_rules import USUAL, Rule, find_incident
from ._queue_start import SIGNALS, Start, began, end_leftover

Hours = tuple[int, int]  # From one minute of the day up to another; past midnight where the second comes first.
_TICK_S, _IDLE_TICK_S, _LOOK_EVERY_S, _LEFTOVER_TICK_S = 0.25, 0.5, 1.0, 0.05
_PAUSE_MOST_S, _INCIDENTS_MOST = 60, 8
_FULL = ("full", "disk I/O error", "unable to open database file")  # How SQLite says that there is no room, by what it wanted.


def minute_of_day() -> int:
    """Returns the minute of the local day now, from 0 to 1439."""
    now = time.localtime()
    return 60 * now.tm_hour + now.tm_min


def within(hours: Hours, minute: int) -> bool:
    """Whether a minute of the day is one of these hours."""
    begin, end = hours
    return begin <= minute < end if begin <= end else minute >= begin or minute < end


class Runner:
    """Runs a queue. Errors: sqlite3.Error, OSError. It tells of what a full disk does not take of a job that runs, and tries again."""

    def __init__(self, queue: Queue, *, wait: bool = False, pause: Sequence[Hours] = (), rules: Sequence[Rule] = tuple(USUAL),
                 grace: float = 30, tell: Callable[[str], None] = print, minute: Callable[[], int] = minute_of_day) -> None:
        """Takes the options. wait: goes on when no job is left. pause: hours in which no job starts. grace: seconds between asking a job to
        end and killing it.
        """
        self.queue, self.wait, self.pause, self.rules, self.grace, self.tell, self.minute = queue, wait, pause, rules, grace, tell, minute
        self.report: dict[str, Any] = {"done": 0, "failed": 0, "cancelled": 0, "left": 0, "asked": False}
        self._running: _Running | None = None
        self._passed: set[int] = set()  # Jobs that are damaged, and told of.
        self._in_pause, self._problem = False, ""

    def run(self) -> dict[str, Any]:
        """Returns how many jobs ended so, how many are left, and whether it was asked to end. Errors: ValueError where another runs it."""
        self._mask: set[int] = set(signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS))
        lock = self.queue.lock_runner()
        self._take_over()
        while True:
            with self._endured():
                if self._running:
                    self._look(self._running)
                if not self._running and (self.report["asked"] or (not self._start_next() and not self.wait)):
                    break
            self._hear(_TICK_S if self._running else _IDLE_TICK_S)
        self.report["left"] = len(self.queue.waiting())
        os.close(lock)
        return self.report

    @contextlib.contextmanager
    def _endured(self) -> Iterator[None]:
        try:
            yield
        except sqlite3.OperationalError as error:
            if self.report["asked"] or not str(error).endswith(_FULL):
                raise
            if self._problem != str(error):
                self.tell(f"{self.queue.file}: {error}; it is tried again")
            self._problem = str(error)

    def _hear(self, most: float) -> None:
        got = signal.sigtimedwait(SIGNALS, most)
        if got is None or got.si_signo == signal.SIGCHLD:
            return
        one = self._running if self._running and not self._running.end else None
        if one and self.report["asked"]:
            self.tell("asked twice: the job is killed")
            one.start.kill()
            one.end = {"status": 128 + signal.SIGKILL, "told": False, "lines": []}
        elif one:
            self.tell(f"asked to end: job {one.job['id']} is asked to, and queued again")
            one.start.ask(self.grace)
        self.report["asked"] = True

    def _change(self, number: int, how: Callable[[Job], None]) -> Job:
        job = self.queue.change(number, how)
        self._problem = ""  # There is room again.
        return job

    def _take_over(self) -> None:
        """Jobs of a runner that was killed."""
        def wait() -> bool:
            self._hear(_LEFTOVER_TICK_S)
            return not self.report["asked"]

        def ended(job: Job) -> None:
            state, why = ("cancelled", "cancelled") if job["cancel"] else ("waiting", "its runner ended: queued again")
            job.update(guard=0, guard_began=0, state=state, why=why)

        for number in self.queue.numbers():
            if (job := self._read(number)) and job["state"] == "running":
                if not end_leftover(job, self.grace, wait):
                    return
                job = self._change(number, ended)
                self.report["cancelled"] += job["state"] == "cancelled"
                self.tell(f"job {number}: {job['why']}")

    def _read(self, number: int) -> Job | None:
        """Reads a job. Returns None if it is damaged, and then skipped, or was removed meanwhile."""
        try:
            return self.queue.read(number)
        except CorruptError as error:
            self.tell(f"job {number} is passed over: {error}")
            self._passed.add(number)
        except NotFoundError:
            pass
        return None

    def _paused(self) -> bool:
        return any(within(hours, self.minute()) for hours in self.pause)

    def _start_next(self) -> bool:
        """Starts the first job that may start now; whether any waits."""
        if (now := self._paused()) != self._in_pause:
            self._in_pause = now
            self.tell("hours of pause: no job starts" if now else "the hours of pause are over")
        waiting = [(number, begins - time.time()) for number, begins in self.queue.waiting() if number not in self._passed]
        for number, pause in waiting if not now else []:
            if not 0 < pause <= _PAUSE_MOST_S and (job := self._read(number)):  # A longer one: the clock was set back.
                self._begin(job)
                break
        return bool(waiting)

    def _begin(self, job: Job) -> None:
        start = Start(job, self.queue.log_of(job["id"]), self.rules, self._mask)

        def runs(one: Job) -> None:
            if one["state"] == "waiting":  # Or it was cancelled just now.
                one.update(state="running", started=int(time.time()), starts=one["starts"] + 1, why="runs", guard=start.guard,
                           guard_began=began(start.guard))

        try:
            job = self._change(job["id"], runs)
            if job["state"] == "running":
                self._running = _Running(job, start)
                start.go()
                self.tell(f"job {job['id']} runs: {' '.join(job['command'])}")
        finally:
            if not self._running:
                start.close()

    def _look(self, one: _Running) -> None:
        one.end = one.end or one.start.look()
        if one.end:
            self._over(one, one.end)
            return
        now = time.monotonic()
        if now < one.looked + _LOOK_EVERY_S:
            return
        one.looked = now
        progress, most = one.start.progress(), one.job["timeout_seconds"]
        self._pause_run(one, progress)
        stands = self.queue.read(one.job["id"])
        if stands["cancel"] and not one.start.asked:
            self.tell(f"job {one.job['id']} is cancelled: asked to end")
            one.start.ask(self.grace)
        if 0 < most <= now - one.began - one.paused_for and not one.start.asked:
            self.tell(f"job {one.job['id']} has run for {most} s, its time: asked to end")
            one.late = True
            one.start.ask(self.grace)
        if stands["progress"] != progress:
            self._change(one.job["id"], lambda job: job.update(progress=progress))

    def _pause_run(self, one: _Running, progress: str) -> None:
        """Pauses a run of the job in hours of pause, as `plimsoll pause` does; its time stands still."""
        one.paused_for += _LOOK_EVERY_S if one.paused else 0
        if self._paused() and not one.paused and progress:
            run = os.path.join(one.job["directory"], progress.rpartition(": ")[0])
            with contextlib.suppress(NotFoundError, OSError):
                if _core.run_pause(run):
                    one.paused = run
                    self.tell(f"hours of pause: job {one.job['id']} pauses its run {run}")
        elif one.paused and not self._paused():
            run, one.paused = one.paused, ""
            self.tell(f"job {one.job['id']} goes on")
            _core.run_continue(run)

    def _over(self, one: _Running, end: dict[str, Any]) -> None:
        """Writes down what came of a start, and what follows from it."""
        def ended(job: Job) -> None:
            job.update({key: end[key] for key in ("ending", "seconds", "limit_bytes", "stalled_seconds", "advice") if key in end},
                       guard=0, guard_began=0, ended=int(time.time()), status=end["status"],
                       progress=one.start.progress(), peak_bytes=max(job["peak_bytes"], end.get("peak_bytes", 0)),
                       why=end.get("summary") or f"ended with status {end['status']}")
            if one.late:
                job["ending"] = "timeout"
            self._decide(job, one, end)

        job = self._change(one.job["id"], ended)
        one.start.close()
        self._running = None
        if job["state"] in self.report:
            self.report[job["state"]] += 1
        self.tell(f"job {job['id']} {job['state']}: {job['why']}")

    def _decide(self, job: Job, one: _Running, end: dict[str, Any]) -> None:
        """Decides the state of a job whose start has ended. A run that is asked to end commits and ends with status 0, which does not end the job."""
        status, stopped = end["status"], one.late or end.get("ending") == "stopped"
        if job["cancel"] and (one.start.asked or stopped or status):
            job.update(state="cancelled", why=f"cancelled; {job['why']}")
        elif one.start.asked and not one.late:
            job.update(state="waiting", why="asked to end with its runner: queued again")
        elif not stopped and not status:
            job["state"] = "done"
        else:
            found = find_incident(self.rules, status, job["ending"], end["lines"])
            job.update(state="failed", deaths=job["deaths"] + 1, incidents=[*job["incidents"], *([found] if found else [])][-_INCIDENTS_MOST:])
            then = found["then"] if found else ""
            # Nothing told: it could not be started, and another time it could not either.
            if then == "fail" or (not end["told"] and status < 128 and not one.late):
                return
            again, pause, why = _core.decide_restart(1 if then == "retry" else status, stopped, job["progress"], job["restarts_most"],
                                                     job["restarts"], job["restart_progress"])
            job["why"] += f"; {why}" if why else ""
            if again:
                job.update(state="waiting", not_before=int(time.time()) + pause, restarts=job["restarts"] + 1, restart_progress=job["progress"])


class _Running:
    def __init__(self, job: Job, start: Start) -> None:
        self.job, self.start = job, start  # The job as it was when it started.
        self.began, self.looked = time.monotonic(), 0.0
        self.end: dict[str, Any] | None = None  # To be written down.
        self.late, self.paused, self.paused_for = False, "", 0.0  # The run that was asked to pause, and for how long.
