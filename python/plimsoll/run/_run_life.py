# SPDX-License-Identifier: Apache-2.0
"""Life: one process's time with a run: its folder, limit, signals, requests and commits.

It knows no models or data: its owner, plimsoll.Run, supplies the content of a commit.

A stop of the watcher (Governor) is raised at once or waits for the next boundary, depending on the place of the loop:

    the program, around its loops     raised
    waiting for a batch               raised; all steps are complete, and are committed
    the body of a loop                raised if the next boundary would come too late; the last one is committed
    the gradients of run.step()       the same, after the step was undone
    a boundary, a commit, an update   not raised: the boundary obeys

Reading order: _run_settings.py, _run_commit.py, _run_kept.py, _run_report.py, this file, _run.py.

Threads: the thread that trains; one that writes a commit; one of the core that reads changed limits.
Memory:  a commit is copied if there is room (_run_writer.py), or streams tensors in place.
"""
from __future__ import annotations

import contextlib
import dataclasses
import enum
import os
import pathlib
import shutil
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

from .. import _core
from ..core._numbers import real, whole
from ..core._random_states import RandomStates
from ..core._room import is_full
from ..core._torch_settings import torch_settings
from ..errors import BudgetExceeded, MemoryPressure
from ..memory import _workers
from ..ranks._messages import Boundary
from ..rows._embedding import EmbeddingStore
from ._run_commit import Position, load, save, save_beside, save_together
from ._run_kept import Keeper, Near
from ._run_report import Report
from ._run_writer import Writer

if TYPE_CHECKING:
    from .._core import PressureReport
    from ..ranks._group import Group

_PAUSE_LOOKS_EVERY = 0.1  # Seconds.
_COMMIT_SECONDS = 0.25  # A commit that takes less is made at each boundary when the end is near.
_SHORT = (MemoryPressure, BudgetExceeded, KeyboardInterrupt, SystemExit)  # The status is then "stopped", not "failed".

Content = Callable[[], tuple[dict[str, Any], list[EmbeddingStore]]]


def is_evaluation(phase: str) -> bool:
    """Whether the name of a phase says that the loop evaluates."""
    return phase.lower().startswith(("eval", "valid", "test"))


def _cause_of(error: BaseException) -> str:
    """Returns the cause that status.json names for an exception that ended a run."""
    if isinstance(error, MemoryPressure):
        return "memory"
    if isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError":  # torch's.
        return "refused"
    if isinstance(error, OSError) and is_full(error):
        return "disk"
    return "asked" if isinstance(error, (KeyboardInterrupt, SystemExit)) else "error"


class Where(enum.Enum):
    """The place of the thread that trains, which decides how a stop of the watcher acts."""

    OUTSIDE = "around its loops"
    WAITS = "waiting for a batch"
    BODY = "in the body of a loop"
    STEP = "in the gradients of run.step()"
    BUSY = "at a boundary, in a commit or an update"


@dataclasses.dataclass(frozen=True)
class Failure:
    """An exception that ended a run, as status.json reports it."""

    status: str
    message: str
    cause: str

    @classmethod
    def of(cls, error: BaseException) -> Failure:
        return cls("stopped" if isinstance(error, _SHORT) else "failed", f"{type(error).__name__}: {error}", _cause_of(error))

    @property
    def of_memory(self) -> bool:
        """Whether memory ended the run, so that the steps made before are whole."""
        return self.cause in ("memory", "refused")


@dataclasses.dataclass(frozen=True)
class Intervals:
    """Intervals of work between two steps; 0: not by that interval."""

    commit_steps: int
    commit_seconds: float
    cleanup_steps: int

    @classmethod
    def of(cls, who: str, *, commit_every_steps: int, commit_every_minutes: float,
           cleanup_every_n_steps: int) -> Intervals:
        """Makes the intervals from options of Run.steps(). Errors: ValueError naming the option."""
        return cls(whole(f"{who}: commit_every_steps", commit_every_steps, 0),
                   60 * real(f"{who}: commit_every_minutes", commit_every_minutes, 0),
                   whole(f"{who}: cleanup_every_n_steps", cleanup_every_n_steps, 0))

    def clean_up_between(self, before: int, step: int) -> bool:
        """Whether a clean-up falls on a step after `before`, up to `step`."""
        return _falls_between(self.cleanup_steps, before, step)

    def commits_between(self, before: int, step: int) -> bool:
        """Whether a commit falls on a step after `before`, up to `step`."""
        return _falls_between(self.commit_steps, before, step)


def _falls_between(every: int, before: int, step: int) -> bool:
    return every > 0 and step // every > before // every


class Life:
    """One process's time with a run. The arguments are Run's. `content` returns the content of the next commit, and the tables of the run;
    `here` the same for this process alone, without random states and without asking other ranks.
    """

    def __init__(self, path: pathlib.Path, content: Content, here: Content, group: Group, workers: int, *,
                 compute_threads: int | None, accept: Iterable[str], of_recipe: Any, keep_checkpoints: int, tensorboard: bool,
                 **options: Any) -> None:
        self.path, self._content, self.group, self._workers = path, content, group, workers
        self._keeps, self._tensorboard, self._of_recipe = keep_checkpoints, tensorboard, of_recipe
        self.stopped = ""
        """The reason for the stop, "": no stop was asked for."""
        self.closed = False
        self.where = Where.OUTSIDE
        self.end_workers: Callable[[], None] = lambda: None
        """Ends the loaders' workers, whose batches are no longer needed."""
        self._ending = False  # Whether a stop of the watcher was raised or obeyed.
        self._asked_to_end = False  # Whether the watcher has asked for a stop since the last boundary.
        self._raised: MemoryPressure | None = None  # The watcher's exception; if a body catches it, its boundary obeys.
        self._held = contextlib.ExitStack()  # Closed in reverse order.
        self._held.callback(group.close)
        self.saved_step = -1
        """The step of the last commit; −1: none."""
        self._writer: Writer | None = None
        self.committed: Callable[[], None] = lambda: None
        """Called after a commit, by the process that writes the folder."""
        self._is_new = False  # A recipe's run that this start began.
        self._lost: BaseException | None = None  # The error after which no commit can be made.
        is_run, began = False, False
        try:
            self.folder, is_run, threads, toml = self._open(compute_threads, of_recipe.run_toml if of_recipe else None, options)
            self._held.callback(self.folder.close)
            began, self._is_new = True, of_recipe is not None and not is_run
            group.on_all("the beginning", lambda: self._begin(is_run, threads, toml, list(accept), **options))
        except BaseException as error:
            if began:
                self.folder.abandon() if not is_run else self._say_failed(error)
            self._held.close()
            raise
        self.keeper = Keeper(self.governor, here)
        self._held.callback(self.keeper.close)
        self.governor._before_retry = self._make_room
        self.governor._hears = self._hear
        group.undisturbed = lambda: self.at_place(Where.BUSY)
        self._control = _core.RunControl(os.fspath(path))
        self._signals: _core.StopSignals | None = None
        self._committed_at = time.monotonic()
        self._commit_seconds = 0.0  # Duration of the last commit.
        self.drawn: RandomStates | None = None  # With several ranks: the random states of the last boundary.
        self._looked_at = self.at.step  # The step of the last boundary().

    def _open(self, threads: int | None, run_toml: str | None,
              options: dict[str, Any]) -> tuple[Any, bool, int, str]:
        """Opens the folder. Returns (folder, whether it is a run already, threads, text of run.toml)."""
        from . import _run_settings as settings  # Imports torch.

        root = os.fspath(self.path)

        def opened() -> tuple[Any, bool, int, str]:
            is_run = _core.RunFolder.is_run(root)
            if is_run and run_toml is None and not settings.is_ours(root):
                raise ValueError(f"{root} is a run of `plimsoll train`, and `plimsoll resume` goes on with it: "
                                 "name another folder")
            these = threads or settings.threads_of(root)
            toml = run_toml or settings.to_toml(
                {"seed": options["seed"], "memory_limit": options["memory_limit"], "compute_threads": these},
                options["options"], self.group.count)
            folder = _core.RunFolder.open(root) if is_run else _core.RunFolder.create(root, toml)
            return folder, is_run, these, toml

        return self.group.open_folder(root, opened)

    def _begin(self, is_run: bool, threads: int, toml: str, accept: list[str], *, memory_limit: int | str,
               seed: int, options: dict[str, Any], foreign_bytes: int | str, devices: Mapping[str, int | str],
               disk_limit: int | str, deterministic: bool) -> None:
        from . import _run_settings as settings

        group, root = self.group, os.fspath(self.path)
        if is_run:
            self.saved_step = int(group.first_says("the beginning", self._published))
        self._held.enter_context(torch_settings())
        settings.settle(seed, threads, deterministic)
        identity = settings.identity_of(seed, threads, deterministic, options, self._workers)
        if "virtual_workers" in accept:
            raise ValueError("accept: a run goes on with as many virtual_workers as it began with")
        if self._of_recipe and not self._of_recipe.threads_decide_bits:
            del identity["compute_threads"]
        self.folder.check_identity(identity, accept, list(settings.OF_PROCESSOR) if self._of_recipe else [])
        if is_run:
            self.folder.write_config(toml)
        self.governor = group.governor(memory_limit, disk_limit=disk_limit, directory=root, foreign_bytes=foreign_bytes, devices=devices)
        self._held.callback(self.governor.close)
        if group.first:
            self.folder.record(self.governor._core)
            self._held.callback(self.folder.end_record)
        self.saved: dict[str, Any] = {} if self.saved_step < 0 else load(self.folder, self.saved_step, group.rank, group.count)
        self.at: Position = self.saved.get("position", Position())
        metrics = str(self.path / "metrics") if self._tensorboard else ""
        self.report = Report(self.folder, self.governor, metrics if group.first else None, self.saved_step)
        self._limits: Any = group.limits(self.governor, root)
        self._held.callback(self._limits.close)

    def phase(self, name: str) -> None:
        """Records the loop's work from now on; "": training. With several ranks, only rank 0 records it."""
        if self.group.first:
            self.folder.phase(name)
        self.report.phase("evaluating" if is_evaluation(name) else "")

    def _say_failed(self, error: BaseException) -> None:
        """Writes the status "failed" for a run that cannot start."""
        status = _core.RunStatus()
        status.status, status.step = "failed", max(self.saved_step, 0)
        status.message, status.cause = f"{type(error).__name__}: {error}", _cause_of(error)
        with contextlib.suppress(OSError):
            self.folder.write_status(status, True)

    def _published(self) -> int:
        """Returns the step to resume from, or −1 if nothing was committed. Unpublished files of an earlier start are deleted."""
        published = self.folder.published_step()
        self.folder.discard_unpublished()
        if published is None:
            self.folder.discard_rows()
            for left in self.path.glob("embeddings-*"):  # Tables of several ranks.
                shutil.rmtree(left)
            (self.path / "identity.json").unlink(missing_ok=True)
        return -1 if published is None else published

    @contextlib.contextmanager
    def signals(self) -> Iterator[None]:
        """Makes SIGINT, SIGTERM and SIGUSR1 ask for a stop inside the block."""
        self._signals = _core.StopSignals()
        try:
            yield
        finally:
            self._signals = None
            self.report.clear()

    # ---- Stops of the watcher ----

    @contextlib.contextmanager
    def at_place(self, where: Where) -> Iterator[None]:
        before, self.where = self.where, where
        try:
            yield
        finally:
            self.where = before

    def begins(self) -> None:
        """Resets the stop of the watcher when a loop begins: one that was caught around an earlier loop is over."""
        self._ending = self._asked_to_end = False
        self._raised = None

    def _hear(self, late: bool, report: PressureReport) -> None:
        """Acts on the watcher's stop, between two instructions. Errors: MemoryPressure, at the places that this file's first lines name."""
        if self._ending or self.closed:
            return
        if self.where is Where.BUSY or (not late and self.where in (Where.BODY, Where.STEP)):
            self._asked_to_end = True
            self.governor._watcher.defer()
            return
        still = self.governor._still_asks(report)
        if still is None:
            return
        pressure = self._raised = self.governor._pressure(still)  # Before the workers end, as the text names them.
        self._ending = True
        _workers.end_workers_waited_for()
        self.end_workers()
        raise pressure

    def _make_room(self) -> None:
        """Frees copies of the state for a request that memory refused."""
        self.keeper.give_way()
        self.end_writing()

    def stops(self) -> bool:
        """Commits if the run was asked to stop. Returns whether it was."""
        now = self._settled()
        if now.asked == "stop":
            self._stop(now.why)
        return now.asked == "stop"

    def ended(self) -> None:
        """Obeys a stop that was asked for since the last boundary of a loop that has ended. Everything is committed already.

        A signal before the end of signals() still counts; later ones belong to the program.
        """
        if not self.stopped:
            self.stops()

    def ended_waiting(self, error: Exception, *, workers: bool, place_known: bool = True) -> bool:
        """Handles an exception from waiting for a batch: the last step is complete, and the next has not begun.

        Returns True if it is no failure: a signal that asks for a stop ended a worker, and everything is committed.
        Otherwise the caller raises the exception. For a stop of the watcher everything is committed, if the position in
        the data is known and this rank has not left the others.
        """
        if isinstance(error, MemoryPressure):
            if not place_known:
                self.save_last()
            elif not self.group.over:
                self.commit()
            return False
        return workers and self.stops()

    def asked(self) -> bool:
        """Whether this rank or another one is asked to stop."""
        return self.group.any("the boundary of a step", bool(self._control.poll() == "stop"))

    def idle(self, seconds: float) -> bool:
        """Waits between two loops, with everything committed. Returns True if the run was asked to stop meanwhile."""
        until = time.monotonic() + seconds
        with self.signals():
            while True:
                self._tell_limits()
                self.governor.step_boundary()
                now = self._settled(due=time.monotonic() >= until)  # With several ranks, rank 0's clock decides.
                if now.asked == "stop":
                    self.stopped = now.why
                    return True
                if now.asked != "pause" and now.due:
                    return False
                time.sleep(_PAUSE_LOOKS_EVERY)

    def _settled(self, pressure: MemoryPressure | None = None, due: bool = False, wanted: bool = False) -> Boundary:
        """Returns the requests to serve now. With several ranks they are the same for all."""
        asked = self._control.poll()
        own = Boundary(asked, self._control.reason if asked == "stop" else "", pressure, due, wanted)
        return self.group.settle(own, self._limits)

    def boundary(self, every: Intervals, *, precaution: bool = False) -> bool:
        """Does the work between two steps. Returns True if the run was asked to stop, and has committed. precaution: commits, as
        the work after the next step needs an unknown amount of memory.

        Errors: MemoryPressure after a commit; OSError when a commit failed.
        """
        if self._writer is not None and (self._writer.done or self.folder.waits_for_room):
            self.end_writing()
        self.folder.wait_for_room()  # Also for a table's writes. A stop ends the wait, and is obeyed below.
        self._tell_limits()
        self.governor._at_step(self.at.step)
        asked, self._asked_to_end = self._asked_to_end, False
        seen = self.governor.step_boundary() if asked else self.governor._look()
        if seen is not None:
            self.report.pressure(self.at.step, seen)
        looked_at, self._looked_at = self._looked_at, self.at.step
        if every.clean_up_between(looked_at, self.at.step):
            self.clean_up("step")
        since = time.monotonic() - self._committed_at
        near = self.keeper.near(self.at.step, seen)
        pressure = self.governor._pressure(seen) if seen is not None and seen.stop else self._raised
        now = self._settled(pressure, self._writer is None and 0 < every.commit_seconds <= since, precaution or self._wants_commit(near, since))
        if now.pressure is not None:
            self._end(now.pressure)
        if now.asked == "stop":
            self._stop(now.why)
            return True
        if now.asked == "pause" or every.commits_between(looked_at, self.at.step) or now.due or now.wanted:
            self.commit(beside=now.asked != "pause")
        else:
            self._keep(near)
        return now.asked == "pause" and self._pause()

    def clean_up(self, when: str) -> None:
        """Frees unused memory, and records the result."""
        self.report.cleanup(self.at.step, self.governor.clean_up(), when)

    def _wants_commit(self, near: Near, since: float) -> bool:
        """Whether to commit now, while it is possible: for ranks, tables, and state without room for a copy, no copy of a boundary
        is kept.
        """
        kept = self.group.commits_alone and not self.keeper.tables and self.keeper.fits
        return near is not Near.CALM and not kept and (
            self._commit_seconds <= near.value * max(since, _COMMIT_SECONDS if near is Near.END else 0.0))

    def _end(self, pressure: MemoryPressure) -> None:
        """Commits, and raises the exception."""
        self._ending = True
        self.end_workers()
        self.commit()
        raise pressure

    def _keep(self, near: Near) -> None:
        """Keeps the content of a commit of this boundary without committing, as far as that costs little."""
        if self.group.commits_alone:
            self.keeper.keep(self.at, near)
        else:
            self.drawn = RandomStates()

    def save_last(self) -> None:
        """Commits the last boundary, if every step since was undone, or a copy of it is kept."""
        self.end_writing()
        made = self.keeper.last()
        if made is None or made[1].step <= self.saved_step or self._lost:
            return
        content, position, tables = made
        began = time.monotonic()
        try:
            with self._stoppable(keeps=False):
                size = save(self.folder, content, position, tables, again=False, keep=self._keeps)
        except Exception as error:  # Reported beside the error that ends the run.
            self._lost = error
            self.report.text(f"step {position.step} could not be committed: {type(error).__name__}: {error}")
            return
        spent = time.monotonic() - began
        self._committed(position.step, spent, spent, size)

    def _stop(self, why: str) -> None:
        """Commits, and reports the reason for the stop."""
        self.commit()
        self.stopped = why
        self.report.text(f"stopped at step {self.at.step} ({self.stopped}); the same command goes on")

    def _pause(self) -> bool:
        """Waits while the run is paused. Returns True if it was asked to stop meanwhile."""
        with self.report.aside():
            while (now := self._settled()).asked == "pause":
                self._tell_limits()
                seen = self.governor.step_boundary()
                if seen.stop and self.group.commits_alone:
                    self._end(self.governor._pressure(seen))
                self.report.phase("paused")
                time.sleep(_PAUSE_LOOKS_EVERY)
        if now.asked == "stop":
            self._stop(now.why)
        return now.asked == "stop"

    def _tell_limits(self) -> None:
        for asked, change, why, of_devices in self._limits.take():
            if of_devices:
                self._limit_devices(asked)
            else:
                self.report.limit(self.at.step, asked, change, why)

    def _limit_devices(self, asked: str) -> None:
        if not self.governor.devices:
            self.report.limit(self.at.step, asked, None, "no device of this process has a limit: device_memory_limit of Run(…) sets one")
        for name, device in self.governor.devices.items():
            before = device.limit_bytes
            try:
                device.set_limit(asked)
            except (ValueError, BudgetExceeded) as error:
                self.report.limit(self.at.step, asked, None, str(error))
            else:
                self.report.device_limit(self.at.step, asked, name, before, device.limit_bytes)

    def commit(self, moved: bool = False, *, beside: bool = False) -> None:
        """Commits the current step, unless it is committed. moved: the position has changed since, though not the step.

        beside: publishes it in a thread during the next steps; until then it is not `saved_step`.
        Errors: OSError, of this commit or of the one that was being written; the commit before it stands.
        """
        self.end_writing()
        again = self.at.step == self.saved_step
        if again and not moved:
            return
        if self._lost:
            raise self._lost
        began = time.monotonic()
        with self.report.aside(), self._stoppable(), self._uncommitted(self.at.step):
            content, tables = self._content()
            self.report.flush()
            try:
                if beside and not again and self.group.commits_alone:
                    self.keeper.give_way()  # One copy at a time.
                    self._writer = save_beside(self.folder, content, self.at, tables, self.governor, self._keeps)
                if self._writer is None:
                    size = self.group.either(lambda: save(self.folder, content, self.at, tables, again, self._keeps),
                                             lambda ranks: save_together(ranks, self.folder, content, self.at, tables, again, self._keeps))
            except BaseException as error:
                self._lost = error if tables else None  # Tables may be ahead of the published step.
                raise
            if self._writer is not None:
                self._writer.start()  # If this is interrupted, end_writing() still completes the commit.
                return
        spent = time.monotonic() - began
        self._committed(self.at.step, spent, spent, size)

    def end_writing(self) -> None:
        """Waits for the commit that is being written. Errors: OSError; then no other commit can be made, as the
        tables may be ahead of the published step.
        """
        writer = self._writer
        if writer is None:
            return
        try:
            with self._uncommitted(writer.step):
                writer.wait()
        finally:
            self._writer, self._lost = None, writer.error
            if writer.error is None:
                self._committed(writer.step, writer.seconds, writer.stall_seconds, writer.size)

    @contextlib.contextmanager
    def _stoppable(self, keeps: bool = True) -> Iterator[None]:
        """Lets a stop end a commit's wait for room. keeps: a signal that a loop has not obeyed yet counts as a stop; otherwise a
        signal during the commit is passed on to the program.
        """
        if self._signals is not None:
            yield
            return
        held = _core.StopSignals(keeps)
        try:
            yield
        finally:
            del held
            if not keeps:
                _core.StopSignals.pass_on()

    @contextlib.contextmanager
    def _uncommitted(self, step: int) -> Iterator[None]:
        """Adds the uncommitted steps to the OSError of a full disk, when the wait for free space has ended."""
        try:
            yield
        except OSError as error:
            if not is_full(error):
                raise
            first = max(self.saved_step, 0) + 1
            lost = f"step {step} is" if first >= step else f"steps {first} to {step} are"
            why = f", and the run was asked to stop ({self._control.reason})" if self._control.poll() == "stop" else ""
            stands = "nothing was committed before" if self.saved_step < 0 else f"the commit of step {self.saved_step} stands"
            raise OSError(error.errno, f"{error.strerror}{why}: {lost} not committed; {stands}. Free some space, and start again",
                          error.filename) from error

    def _committed(self, step: int, seconds: float, stall_seconds: float, size: int) -> None:
        self.saved_step, self._committed_at, self._commit_seconds = step, time.monotonic(), seconds
        if self.group.first:
            self.committed()
        self.report.commit(step, seconds, stall_seconds, size)

    def close(self, failure: Failure | None, step: int) -> None:
        """Writes the last status and event; then closes the governor and the folder, and restores torch's settings.

        step: the step in or after which the run ended.
        """
        self.where = Where.BUSY
        try:
            try:
                with self._stoppable(keeps=False) if self._writer is not None else contextlib.nullcontext():
                    self.end_writing()
            except BaseException as error:
                if failure is None:
                    failure = Failure.of(error)
                    raise
            finally:
                self._tell_the_end(failure or Failure(*("stopped", self.stopped, "asked") if self.stopped else ("finished", "", "finished")), step)
        finally:
            self.closed, self._signals = True, None
            self.governor._hears = None
            self._held.close()

    def _tell_the_end(self, last: Failure, step: int) -> None:
        """Writes the last status, event and report; removes the folder of a recipe that failed, or was given up, before its first step."""
        given_up = last.cause == "asked" and not self.stopped  # By Ctrl-C around its loops.
        leaves_nothing = self._is_new and self.at.step == 0 and (last.status == "failed" or last.cause == "refused" or given_up)
        if not leaves_nothing:
            epoch = None if self.at.ended == "left" else self.at.epoch  # After `break`: the epoch of the last step.
            self.report.end(last.status, step, epoch, last.message, last.cause)
        if self.group.first:
            self.folder.end_record()
            if leaves_nothing:
                self.folder.abandon()
                return
            with contextlib.suppress(OSError):  # A report that cannot be written is no failure.
                _core.run_report(os.fspath(self.path), "")

    def leave_in_child(self) -> None:
        """Closes the run in a forked child, which has no part in its lock and signals."""
        self.closed, self._signals, self._writer = True, None, None
        self.folder.close()
