# SPDX-License-Identifier: Apache-2.0
"""Life: one process's time with a run: its folder, limit, signals, requests and commits.

Knows nothing of models and data: what a commit holds is asked of its owner, plimsoll.Run.

A stop of the watcher (Governor) is raised where it finds the loop, or waits for the next boundary:

    the program, around its loops     raised
    waiting for a batch               raised; all steps are whole, and are committed
    the body of a loop                raised where the next boundary would come too late; the last one is committed
    the gradients of run.step()       the same, after the step was put back
    a boundary, a commit, an update   not raised: the boundary obeys

Reading order: _run_settings.py, _run_commit.py, _run_kept.py, _run_report.py, this file, _run.py.

Threads: the thread that trains; one that writes a commit; one of the core looks for changed limits.
Memory:  a commit is copied where there is room (_run_writer.py), or streams tensors from where they are.
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
_SHORT = (MemoryPressure, BudgetExceeded, KeyboardInterrupt, SystemExit)  # It goes on from the last commit.

Content = Callable[[], tuple[dict[str, Any], list[EmbeddingStore]]]


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
    """Where the thread that trains is, as a stop of the watcher finds it."""

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
    """How often something is done between two steps; 0: never by that."""

    commit_steps: int
    commit_seconds: float
    cleanup_steps: int

    @classmethod
    def of(cls, who: str, *, commit_every_steps: int, commit_every_minutes: float,
           cleanup_every_n_steps: int) -> Intervals:
        """Errors: ValueError naming the option."""
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
    """The arguments are Run's. `content` gives what the next commit holds, and the tables of the run; `here` the same of
    this process, without random states, and asks no other rank."""

    def __init__(self, path: pathlib.Path, content: Content, here: Content, group: Group, workers: int, *,
                 compute_threads: int | None, accept: Iterable[str], run_toml: str | None, **options: Any) -> None:
        self.path, self._content, self.group, self._workers = path, content, group, workers
        self.stopped = ""
        """The reason for the stop: who asked for it; "": nobody."""
        self.closed = False
        self.where = Where.OUTSIDE
        self.end_workers: Callable[[], None] = lambda: None
        """Ends the workers of loaders, whose further growth nobody would see."""
        self._ending = False  # A stop of the watcher was raised, or obeyed.
        self._asked_to_end = False  # By the watcher, since the last boundary.
        self._raised: MemoryPressure | None = None  # By the watcher; where a body catches it, its boundary obeys.
        self._held = contextlib.ExitStack()  # Closed in the reverse order.
        self._held.callback(group.close)
        self.saved_step = -1
        """The step that is committed; −1: none."""
        self._writer: Writer | None = None
        self.committed: Callable[[], None] = lambda: None
        """Called after a commit, by the process that writes the folder."""
        self._lost: BaseException | None = None  # Why no commit can be made any more.
        is_run, began = False, False
        try:
            self.folder, is_run, threads, toml = self._open(compute_threads, run_toml, options)
            self._held.callback(self.folder.close)
            began = True
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
        self._commit_seconds = 0.0  # That the last one took.
        self.drawn: RandomStates | None = None  # At the last boundary, of several ranks.
        self._looked_at = self.at.step  # By boundary().

    def _open(self, threads: int | None, run_toml: str | None,
              options: dict[str, Any]) -> tuple[Any, bool, int, str]:
        """(the folder, whether it is a run already, threads, run.toml)."""
        from . import _run_settings as settings  # It needs torch.

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
        self.folder.check_identity(identity, accept)
        if is_run:
            self.folder.write_config(toml)
        self.governor = group.governor(memory_limit, disk_limit=disk_limit, directory=root, foreign_bytes=foreign_bytes, devices=devices)
        self._held.callback(self.governor.close)
        if group.first:
            self.folder.record(self.governor._core)
            self._held.callback(self.folder.end_record)
        self.saved: dict[str, Any] = {} if self.saved_step < 0 else load(self.folder, self.saved_step, group.rank, group.count)
        self.at: Position = self.saved.get("position", Position())
        self.report = Report(self.folder, self.governor, str(self.path / "metrics") if group.first else "",
                             self.saved_step)
        self._limits: Any = group.limits(self.governor, root)
        self._held.callback(self._limits.close)

    def phase(self, name: str) -> None:
        """Records what the loop does from now on; "": it trains. Of several ranks only the first one's is kept."""
        if self.group.first:
            self.folder.phase(name)

    def _say_failed(self, error: BaseException) -> None:
        """Writes the status "failed" for a run that cannot go on."""
        status = _core.RunStatus()
        status.status, status.step = "failed", max(self.saved_step, 0)
        status.message, status.cause = f"{type(error).__name__}: {error}", _cause_of(error)
        with contextlib.suppress(OSError):
            self.folder.write_status(status, True)

    def _published(self) -> int:
        """Returns the step to go on from. −1: nothing was committed; what an earlier start left is deleted, and all begins anew."""
        published = self.folder.published_step()
        self.folder.discard_unpublished()
        if published is None:
            self.folder.discard_rows()
            for left in self.path.glob("embeddings-*"):  # Of several ranks.
                shutil.rmtree(left)
            (self.path / "identity.json").unlink(missing_ok=True)
        return -1 if published is None else published

    @contextlib.contextmanager
    def signals(self) -> Iterator[None]:
        """Inside, SIGINT, SIGTERM and SIGUSR1 ask for a stop."""
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
        """A loop does: an end that was caught around another is over."""
        self._ending = self._asked_to_end = False
        self._raised = None

    def _hear(self, late: bool, report: PressureReport) -> None:
        """Acts on the watcher's stop, between two instructions. Errors: MemoryPressure, where this file's first lines say so."""
        if self._ending or self.closed:
            return
        if self.where is Where.BUSY or (not late and self.where in (Where.BODY, Where.STEP)):
            self._asked_to_end = True
            self.governor._watcher.defer()
            return
        still = self.governor._still_asks(report)
        if still is None:
            return
        pressure = self._raised = self.governor._pressure(still)  # While those are there of whom it tells.
        self._ending = True
        _workers.end_workers_waited_for()
        self.end_workers()
        raise pressure

    def _make_room(self) -> None:
        """For what memory refused: copies go."""
        self.keeper.give_way()
        self.end_writing()

    def stops(self) -> bool:
        """True: it was asked to stop, and has committed."""
        now = self._settled()
        if now.asked == "stop":
            self._stop(now.why)
        return now.asked == "stop"

    def ended(self) -> None:
        """A loop has, and all is committed: a stop that was asked for since its last boundary ends the run.

        A signal that came before signals() was left is still seen; whatever comes after it is the program's own.
        """
        if not self.stopped:
            self.stops()

    def ended_waiting(self, error: Exception, *, workers: bool, place_known: bool = True) -> bool:
        """The loop waited for data when `error` came: a step was made, and the next has not begun.

        True: it is no failure. The signal that asks for a stop had ended a worker; all is committed.
        Otherwise it is to be raised; where it is the watcher's, all is committed, if the place in the data
        is known, and this rank did not leave the others by it.
        """
        if isinstance(error, MemoryPressure):
            if not place_known:
                self.save_last()
            elif not self.group.over:
                self.commit()
            return False
        return workers and self.stops()

    def asked(self) -> bool:
        """Whether it is asked to stop, or another rank is."""
        return self.group.any("the boundary of a step", bool(self._control.poll() == "stop"))

    def idle(self, seconds: float) -> bool:
        """Waits between two loops, all being committed. True: it was asked to stop meanwhile."""
        until = time.monotonic() + seconds
        with self.signals():
            while True:
                self._tell_limits()
                self.governor.step_boundary()
                now = self._settled(due=time.monotonic() >= until)  # Of several ranks by the first one's clock.
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
        """Between two steps. True: the run was asked to stop, and has committed. precaution: it commits, as what comes
        after the next step has an unknown need of memory.

        Errors: MemoryPressure after a commit; OSError when a commit failed.
        """
        if self._writer is not None and (self._writer.done or self.folder.waits_for_room):
            self.end_writing()
        self.folder.wait_for_room()  # A table's writes, too; given up by a stop, which is obeyed below.
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
        """Gives back what nobody uses, and says what that was."""
        self.report.cleanup(self.at.step, self.governor.clean_up(), when)

    def _wants_commit(self, near: Near, since: float) -> bool:
        """Whether one is made while it can be: of ranks, of tables, and of what there is no room for, no copy of a
        boundary is kept."""
        kept = self.group.commits_alone and not self.keeper.tables and self.keeper.fits
        return near is not Near.CALM and not kept and (
            self._commit_seconds <= near.value * max(since, _COMMIT_SECONDS if near is Near.END else 0.0))

    def _end(self, pressure: MemoryPressure) -> None:
        """Commits, and raises it."""
        self._ending = True
        self.end_workers()
        self.commit()
        raise pressure

    def _keep(self, near: Near) -> None:
        """Nothing is committed: what a commit of this boundary would hold is kept, as far as that costs little."""
        if self.group.commits_alone:
            self.keeper.keep(self.at, near)
        else:
            self.drawn = RandomStates()

    def save_last(self) -> None:
        """Commits the last boundary, where no step has been made since that could not be put back, or a copy of it is kept."""
        self.end_writing()
        made = self.keeper.last()
        if made is None or made[1].step <= self.saved_step or self._lost:
            return
        content, position, tables = made
        began = time.monotonic()
        try:
            with self._stoppable(keeps=False):
                size = save(self.folder, content, position, tables, again=False)
        except Exception as error:  # What ends the run is told, and this beside it.
            self._lost = error
            self.report.text(f"step {position.step} could not be committed: {type(error).__name__}: {error}")
            return
        spent = time.monotonic() - began
        self._committed(position.step, spent, spent, size)

    def _stop(self, why: str) -> None:
        """Commits, and says why."""
        self.commit()
        self.stopped = why
        self.report.text(f"stopped at step {self.at.step} ({self.stopped}); the same command goes on")

    def _pause(self) -> bool:
        """Waits while it is asked to. True: it was asked to stop meanwhile."""
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
        """Commits what is not committed yet. moved: the position has changed since, if not the step.

        beside: the next steps may be made before it is published; until then it is not `saved_step`.
        Errors: OSError, of this commit or of the one that was being written: the one before it stands.
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
                    self._writer = save_beside(self.folder, content, self.at, tables, self.governor)
                if self._writer is None:
                    size = self.group.either(lambda: save(self.folder, content, self.at, tables, again),
                                             lambda ranks: save_together(ranks, self.folder, content, self.at, tables, again))
            except BaseException as error:
                self._lost = error if tables else None  # They may be ahead of what is published.
                raise
            if self._writer is not None:
                self._writer.start()  # Whatever interrupts it, end_writing() has the commit written.
                return
        spent = time.monotonic() - began
        self._committed(self.at.step, spent, spent, size)

    def end_writing(self) -> None:
        """Waits for the commit that is being written. Errors: OSError; then no other can be made, for the
        tables may be ahead of what is published."""
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
        """Inside, a commit may wait for room: who asks for a stop ends the wait. keeps: a signal that a loop has not obeyed yet
        counts; else one that comes now is handed on to the program."""
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
        """Adds to a full disk's OSError which steps are not committed, when nobody waits for free space any more."""
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
        """The last word in status and events; then the governor, torch's settings and the folder.

        step: that the end came in, or after.
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
                last = failure or (Failure("stopped", self.stopped, "asked") if self.stopped else Failure("finished", "", "finished"))
                epoch = None if self.at.ended == "left" else self.at.epoch  # After `break`: that it was left in.
                self.report.end(last.status, step, epoch, last.message, last.cause)
                if self.group.first:
                    self.folder.end_record()
                    with contextlib.suppress(OSError):  # A page that cannot be written ends nothing.
                        _core.run_report(os.fspath(self.path), "")
        finally:
            self.closed, self._signals = True, None
            self.governor._hears = None
            self._held.close()

    def leave_in_child(self) -> None:
        """In a forked child: it has no part in the lock, which ends with its process, nor in signals."""
        self.closed, self._signals, self._writer = True, None, None
        self.folder.close()
