# SPDX-License-Identifier: Apache-2.0
"""Ranks: the processes that train one run together, as torchrun starts them, on one machine or several that share its folder.

Everything that could go differently on one rank is done in agreed(). Each rank does its part and reports the outcome. If one
is refused or fails, all raise. So they stay at the same step.

    a batch        the order of one process, cut by position           RunLoader
    a step         gradients in a tree, by buckets of a fixed size, then the update: agreed() after each,
                   before the step counts                               RankSums, TrainingStep
    the limit      that of a machine, less its launcher's memory, in equal shares    share()
    a commit       each rank writes its part; then rank 0 publishes     _run_commit.save()
    requests       signals of any rank, files read by rank 0            settle(), Limits

Ranks exchange through memory that all of them map (src/memory/rank_memory.h); between machines, or where a system forbids
that, over gloo.

Threads: the thread that trains, and the one of _rank_watch.py.
Memory:  1 KiB per rank, and the exchange buffers of _rank_sums.py and _rank_rows.py.
"""
from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import os
import pathlib
import signal
import struct
import time
import uuid
import warnings
import zlib
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar

import numpy as np
import torch
import torch.distributed as dist

from .. import _core
from ..errors import BudgetExceeded, MemoryPressure
from ..memory._memory import Governor, format_bytes, limits
from ._group import Group, Solo
from ._chunks import by_chunks
from ._messages import Unweighted
from ._rank_sums import RankSums
from ._rank_watch import RankWatch, state_of

if TYPE_CHECKING:
    from .._core import LimitChange
    from ._crew import Leader
    from ._messages import Boundary, States, Table, Wanted
    from ._virtual_workers import Node

_THROUGH_MEMORY = True  # False in bench/scale and tests: exchange over gloo, as between machines.
_NUMBERS = 6
_FIGURES = ("requested_bytes", "available_bytes", "limit_bytes", "smallest_limit_bytes")  # The numbers of a refusal.
_TEXT = 960
_ROW = struct.Struct(f"<ii{_NUMBERS}d{_TEXT}s")  # The place of a rank, its outcome, numbers, text.
_FINE, _REFUSED, _UNWEIGHTED, _PRESSED, _FAILED = range(5)
_PLACES = ("the beginning", "the parts", "the next batch", "run.step()", "the boundary of a step", "a commit", "a lookup", "chunks of rows", "the tiles")
_MEET = {"run.step()", "a lookup"}  # A rank whose lookups are done serves the others'.
_ASKED = ("", "pause", "stop")
_JOINING = 1800.0  # Seconds within which all ranks must start; gloo's default.
_ASKS_EVERY = 0.01
_ENDING = 2.0  # Seconds that a rank's process may take to end after its connection closed.
_PR_SET_PDEATHSIG = 1
_END = object()
_T = TypeVar("_T")
_SHARED = (torch.nn.Module, torch.optim.Optimizer, torch.optim.lr_scheduler.LRScheduler,
           torch.optim.lr_scheduler.ReduceLROnPlateau, torch.amp.GradScaler)


@dataclasses.dataclass(frozen=True)
class Said:
    """The message of one rank to the others."""

    place: str
    how: int
    numbers: tuple[float, ...]
    text: str


def join(stopped_seconds: float, **same: Any) -> Group:
    """Returns the ranks that this process belongs to, or Solo for a process that trains alone.

    stopped_seconds: longest time that a rank may be stopped; 0: half an hour, gloo's time-out.
    same:            values that must be equal on all ranks. Errors: ValueError naming one that is not.
    """
    count = int(os.environ.get("WORLD_SIZE", "1")) if "RANK" in os.environ else 1
    if dist.is_available() and dist.is_initialized():
        count = dist.get_world_size()
    if count == 1:
        return Solo()
    ranks = Ranks(stopped_seconds)
    ranks.alike = same.get("virtual_workers") == 1
    try:
        ranks.must_be_same("the beginning", same, "give all ranks the same")
    except BaseException:
        ranks.close()
        raise
    return ranks


class Ranks:
    """The ranks of one run, for a process that has RANK and WORLD_SIZE, or a default group of torch.distributed."""

    commits_alone = False
    others_may_fail = True
    crew: Leader | None = None

    def __init__(self, stopped_seconds: float = 0.0) -> None:
        if not dist.is_initialized():
            _make_default_group()
        self.rank, self.count = dist.get_rank(), dist.get_world_size()
        self.group: Any = dist.new_group(backend="gloo")  # The default one may be for other devices.
        self._board = torch.zeros(self.count * _ROW.size, dtype=torch.uint8)  # Allocated before any limit.
        self._bytes = self._board.numpy().data
        self._next = torch.zeros_like(self._board)
        self._coming: list[Any] = []  # Receives of rank 0, posted before the others send.
        self._await_rows()
        self._pids: dict[int, int] = {}  # Process ids of the ranks of this machine.
        self.tables: list[Table] = []
        """Tables whose rows are divided among ranks, in the same order on all ranks."""
        self._over = False
        self._watch: RankWatch | None = None
        self._governor: Governor | None = None
        self.memory: _core.RankMemory | None = None
        """Memory that all ranks map; None: gloo exchanges messages, rows and gradients."""
        self.alike = False
        """Whether each rank makes every step whole (virtual_workers=1), so that gradients are not exchanged."""
        self.sums = RankSums(self)
        self.undisturbed: Callable[[], contextlib.AbstractContextManager[None]] = contextlib.nullcontext
        """Makes a context in which the watcher raises no stop: an interrupted exchange would leave the others waiting."""
        if "TORCHELASTIC_RUN_ID" in os.environ:
            # Ranks of a killed launcher must not train on beside those of the next one.
            ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        said = self.say("the beginning", os.getpid(), text=_machine())
        self._pids = {rank: int(one.numbers[0]) for rank, one in enumerate(said) if one.text == said[self.rank].text}
        if _THROUGH_MEMORY and len(self._pids) == self.count:
            self._open_memory()
        others = {rank: pid for rank, pid in self._pids.items() if rank != self.rank}
        if stopped_seconds and others:
            try:
                self._watch = RankWatch(others, stopped_seconds)
            except OSError as error:  # Old kernels, and sandboxes.
                warnings.warn(f"Run: a rank that is stopped is noticed by gloo's time-out alone: {error}", RuntimeWarning, stacklevel=2)

    def _open_memory(self) -> None:
        """Maps the memory of all ranks, on all of them or on none."""
        memory, why = None, ""
        try:
            memory = _core.RankMemory(self.rank, self.count, _ROW.size)
        except OSError as error:
            why = f"{type(error).__name__}: {error}"
        said = self.say("the beginning", memory is not None, text=why if memory is None else memory.address)
        refused = [one.text for one in said if not one.numbers[0]]
        if memory is not None and not refused:
            try:
                memory.open([one.text for one in said])
            except OSError as error:
                why = f"{type(error).__name__}: {error}"
            refused = [one.text for one in self.say("the beginning", text=why) if one.text]
        if not refused:
            self.memory = memory
            return
        if memory is not None:
            memory.close()
        if self.first:
            warnings.warn(f"Run: ranks exchange by sockets, and not by memory: {refused[0]}", RuntimeWarning, stacklevel=4)

    @property
    def core_governor(self) -> _core.Governor | None:
        """The core's governor of this rank's share; None before it is made."""
        return None if self._governor is None else self._governor._core

    @property
    def first(self) -> bool:
        """Whether this is rank 0, which writes the run's folder."""
        return self.rank == 0

    def either(self, alone: Callable[[], _T], together: Callable[[Ranks], _T]) -> _T:
        """Returns together(self). Solo, a process that trains alone, returns alone()."""
        return together(self)

    # ---- Agreement ----

    def on_all(self, place: str, work: Callable[[], Any]) -> Any:
        """Returns work(), done on all ranks or on none. Errors: those of agreed()."""
        return self.agreed(place, work)[0]

    def agreed(self, place: str, work: Callable[[], Any],
               says: Callable[[Any], tuple[float, ...]] = lambda _: (),
               words: Callable[[Any], str] = lambda _: "") -> tuple[Any, list[Said]]:
        """Returns (work(), the messages of all ranks), once it is done on all of them.

        Meanwhile this rank serves the lookups of other ranks.

        Errors: those of work(), here or on another rank. Another rank's error is raised as BudgetExceeded, MemoryPressure,
                ValueError, or RuntimeError for all others; ConnectionError when a rank has ended.
        """
        numbers: tuple[float, ...]
        value, numbers, text, error = None, (), "", None
        try:
            value = work()
            numbers, text = says(value), words(value)
        except BaseException as one:
            error, numbers, text = one, _figures(one), f"{type(one).__name__}: {one}"
        if getattr(error, "_told_to_ranks", False):
            assert error is not None
            raise error
        try:
            said = self._told(place, _how(error), numbers, text)
            while all(one.how == _FINE for one in said) and any(one.place == "a lookup" != place for one in said):
                self._served(said, None)
                said = self._told(place, _FINE, numbers, text)
        except (ConnectionError, RuntimeError):
            if error is None:
                raise
            raise error from None
        try:
            self._raise_worst(said, error)
            return value, said
        finally:
            error = None  # Its frames keep the objects of work() alive.

    def look_up(self, table: Table, wanted: Wanted) -> torch.Tensor:
        """Returns the rows of `table` that this rank wants, and serves the other ranks' lookups. Errors: those of agreed()."""
        numbers: tuple[float, ...]
        numbers, text, error = (), "", None
        try:
            text = self.counts_as_text(wanted.counts)
            numbers = table.index, 0 if self.memory is None else table.lay(self.memory, wanted)
        except BaseException as one:
            error, numbers, text = one, _figures(one), f"{type(one).__name__}: {one}"
        try:
            while True:
                said = self._told("a lookup", _how(error), numbers, text)
                self._raise_worst(said, error)
                rows = self._served(said, (table.index, wanted))
                if rows is not None:
                    return rows
        finally:
            error = None

    @staticmethod
    def counts_as_text(counts: Sequence[int]) -> str:
        """Writes the number of rows wanted from each rank as text. Errors: ValueError where it exceeds a message."""
        text = ",".join(map(str, counts))
        if len(text) > _TEXT:
            raise ValueError(f"run.embedding: {sum(counts)} rows of {len(counts)} ranks in one lookup: their counts are {len(text)} "
                             f"bytes, and a word of ranks has {_TEXT}; start fewer ranks, or look up fewer rows at a time")
        return text

    def _raise_worst(self, said: list[Said], own: BaseException | None) -> None:
        """Raises the gravest error of any rank, if there is one. own: this rank's error."""
        worst = max(said, key=lambda one: one.how)
        if own is not None and _how(own) == worst.how:
            own._told_to_ranks = True  # type: ignore[attr-defined]
            try:
                raise own
            finally:
                own = None  # Its frames keep the objects of work() alive, as would this frame.
        if worst.how != _FINE:
            self._raise_for(said.index(worst), worst)

    def _served(self, said: list[Said], own: tuple[int, Wanted] | None) -> torch.Tensor | None:
        """Makes one lookup: that of the first table that any rank looks up. Returns this rank's rows; None if it only served."""
        table = int(min(one.numbers[0] for one in said if one.place == "a lookup"))
        asked_by = [list(map(int, one.text.split(","))) if one.place == "a lookup" and one.numbers[0] == table
                    else [0] * self.count for one in said]
        mine = own is not None and own[0] == table
        begins = [int(one.numbers[1]) for one in said]
        rows = self.tables[table].exchanged(self, own[1] if own is not None and mine else None, asked_by, begins)
        return rows if mine else None

    def all_to_all(self, got: torch.Tensor, given: torch.Tensor, got_of: list[int], given_to: list[int]) -> None:
        """Exchanges entries with all ranks: `got_of[rank]` are received from each, `given_to[rank]` are sent."""
        self.exchange(lambda: dist.all_to_all_single(got, given, got_of, given_to, group=self.group))

    def say(self, place: str, *numbers: float, text: str = "") -> list[Said]:
        """Exchanges one message per rank. Returns those of all ranks, in order of rank."""
        said = self._told(place, _FINE, numbers, text)
        for rank, one in enumerate(said):
            if one.how != _FINE:
                self._raise_for(rank, one)
        return said

    def first_says(self, place: str, work: Callable[[], float]) -> float:
        """Runs work() on rank 0 alone. Returns its result on all ranks."""
        _, said = self.agreed(place, lambda: work() if self.first else 0, lambda number: (number,))
        return said[0].numbers[0]

    def alone(self, work: Callable[[], Any]) -> Any:
        """Returns work(), in a step, without waiting for other ranks. If it fails, they fail at their next message."""
        try:
            return work()
        except BaseException as error:
            with contextlib.suppress(ConnectionError, RuntimeError):
                self._told("run.step()", _FAILED, (), f"{type(error).__name__}: {error}")
            raise

    def all(self, place: str, yes: bool) -> bool:
        """Whether all ranks say yes."""
        return all(one.numbers[0] for one in self.say(place, yes))

    def any(self, place: str, yes: bool) -> bool:
        """Whether any rank says yes."""
        return any(one.numbers[0] for one in self.say(place, yes))

    def least(self, place: str, number: int) -> int:
        """Returns the least `number` of any rank, by which all ranks decide alike."""
        return int(min(one.numbers[0] for one in self.say(place, number)))

    def must_be_same(self, place: str, values: dict[str, Any], advice: str) -> None:
        """Raises ValueError on all ranks, naming a value that differs between them."""
        for name, rank in self.differing(place, values):
            raise ValueError(f"Run: {name} of rank {rank} is not that of rank 0: {advice}")

    def differing(self, place: str, values: dict[str, Any]) -> Iterator[tuple[str, int]]:
        """Yields (name, rank) for each value that differs between ranks, in rank 0's order. rank: the first whose value is not rank 0's.

        Errors: ValueError where ranks have different numbers of values.
        """
        names = list(values)
        for begin in range(0, len(names) or 1, _NUMBERS - 1):
            some = names[begin:begin + _NUMBERS - 1]
            sums = [float(_checksum(values[name])) for name in some]
            said = self.say(place, len(names), *sums)
            for k, name in enumerate(["the number of parts", *some]):
                other = [rank for rank, one in enumerate(said) if one.numbers[k] != said[0].numbers[k]]
                if other and k == 0:  # The ranks would make different numbers of exchanges below.
                    raise ValueError(f"Run: {name} of rank {other[0]} is not that of rank 0: track the same on all ranks")
                if other:
                    yield name, other[0]

    def _told(self, place: str, how: int, numbers: Sequence[float], text: str) -> list[Said]:
        if self._over:
            raise ConnectionError("Run: its ranks have parted")
        padded = [*map(float, numbers), *[0.0] * (_NUMBERS - len(numbers))]
        words = text.encode(errors="replace")[:_TEXT]
        _ROW.pack_into(self._bytes, self.rank * _ROW.size, _PLACES.index(place), how, *padded, words)
        self.exchange(self._pass_on)
        said = []
        for row in _ROW.iter_unpack(self._bytes):
            where, went, *rest = row
            said.append(Said(_PLACES[where], went, tuple(rest[:-1]),
                             rest[-1].rstrip(b"\0").decode(errors="replace")))
        apart = [rank for rank, one in enumerate(said) if one.place != place]
        if apart and not {one.place for one in said} <= _MEET:
            self._over = True
            bad = next((one for one in said if one.how != _FINE), None)
            why = f"; {bad.text}" if bad is not None else ""
            raise RuntimeError(
                f"Run: rank {apart[0]} is at {said[apart[0]].place} and rank {self.rank} at {place}: all ranks must do the same steps{why}")
        return said

    def _pass_on(self) -> None:
        """Sends each rank's message to all. Over gloo rank 0 passes them on, in a third of an all-reduce's time."""
        row = _ROW.size
        work: Any
        if self.memory is not None:
            self._bytes[:] = self.memory.word(self._bytes[self.rank * row:(self.rank + 1) * row])
        elif self.first:
            for work in self._coming:
                work.wait()
            self._board[row:] = self._next[row:]
            self._await_rows()
            for work in [dist.isend(self._board, rank, group=self.group) for rank in range(1, self.count)]:
                work.wait()
        else:
            dist.send(self._board[self.rank * row:(self.rank + 1) * row], 0, group=self.group)
            dist.recv(self._board, 0, group=self.group)

    def _await_rows(self) -> None:
        """Posts rank 0's receives before the messages are sent: gloo spins on a core while data has arrived without a receive."""
        if self.first:
            rows = self._next.view(self.count, _ROW.size)
            self._coming = [dist.irecv(rows[rank], rank, group=self.group) for rank in range(1, self.count)]

    def _raise_for(self, rank: int, one: Said) -> NoReturn:
        text = f"rank {rank}: {one.text}"
        kind: type[Exception] = Unweighted if one.how == _UNWEIGHTED else MemoryPressure if one.how == _PRESSED else \
            ValueError if one.text.startswith("ValueError") else RuntimeError
        error: Exception = kind(text)
        if one.how == _REFUSED:
            requested, available, limit, smallest = map(int, one.numbers[:len(_FIGURES)])
            error = BudgetExceeded(text, "tensors", requested, available, limit, smallest_limit_bytes=smallest)
        error._told_to_ranks = True  # type: ignore[attr-defined]
        raise error

    def exchange(self, collective: Callable[[], Any]) -> None:
        """Calls collective(), which exchanges over gloo or memory. Errors: ConnectionError naming the rank that has ended; an exception that
        interrupts the wait, such as MemoryPressure, after which the other ranks fail too.
        """
        try:
            with self.undisturbed():
                collective()
        except (RuntimeError, OSError) as error:
            self._over = True
            gone: list[str] = []
            until = time.monotonic() + _ENDING
            while not gone and self._pids and time.monotonic() < until:
                gone = [f"rank {rank} (process {pid})" for rank, pid in self._pids.items() if state_of(pid) in "ZX"]
                time.sleep(0.01)
            stopped = [] if self._watch is None else list(self._watch.stopped)
            self.close()  # Ranks that wait for this one fail, too.
            said = str(error).splitlines()[0].split(". ")[0]
            elsewhere = " of another machine" if 0 < len(self._pids) < self.count else ""
            who = " and ".join(gone) + " ended" if gone else f"a rank{elsewhere} does not answer"
            who += "".join(f"; rank {rank} had been stopped (SIGSTOP) for as long as rank_stopped_seconds allows"
                           for rank in stopped)
            raise ConnectionError(
                f"Run: {who}, and the others end with it. The last commit stands: start all again, or have "
                f"torchrun do it with --max-restarts ({said})") from None
        except BaseException:  # Raised by the watcher or a signal's handler: the exchange is incomplete on other ranks.
            self.close()
            raise

    @property
    def over(self) -> bool:
        """Whether the ranks have parted, so that no exchange is possible."""
        return self._over

    def close(self) -> None:
        """Leaves the other ranks. A second close does nothing."""
        if self._watch is not None:
            self._watch.close()
        if self.memory is not None:
            self.memory.close()
        self._coming.clear()  # They keep the connections open.
        if self.group is not None and dist.is_initialized():
            dist.destroy_process_group(self.group)
        self.group, self._over = None, True

    # ---- Parts ----

    @staticmethod
    def shares(part: Any) -> bool:
        """Whether a part is the same on all ranks and written by rank 0; any other part belongs to each rank."""
        return isinstance(part, _SHARED)

    def check_parts(self, parts: dict[str, Any]) -> None:
        """Raises ValueError for a module that averages gradients itself."""
        for name, part in parts.items():
            if isinstance(part, torch.nn.parallel.DistributedDataParallel):
                raise ValueError(f"track: {name} is a DistributedDataParallel, and the run averages the gradients of "
                                 f"its ranks itself: run.track({name}={name}.module), and call that")

    def check_shared(self, parts: States) -> None:
        """Raises ValueError naming a part that must be the same on all ranks, and is not."""
        self.must_be_same("the parts", parts.states(self.shares), "make it after the run, whose seed is the same on all ranks, and load "
                          "the same files")

    def own_states(self, parts: States, live: dict[str, Any], more: dict[str, Any]) -> tuple[dict[str, Any], list[str]]:
        """Returns (the states that this rank writes at a commit, names of states and of values in `more` that differ between ranks).

        live: states of all parts. Errors: ValueError naming a part that must be the same on all ranks.
        """
        self.must_be_same("a commit", parts.states(self.shares),
                          "step with run.step() only, and change nothing by the rank")
        others = parts.states(lambda part: not self.shares(part))
        differ = [name for name, _ in self.differing("a commit", {**others, **more})]
        return (live if self.first else {name: others[name] for name in differ if name in others}), differ

    # ---- A step ----

    def next(self, batches: Iterator[Any]) -> Any:
        """Returns this rank's next batch. Errors: StopIteration, on all ranks at once."""
        batch = self.agreed("the next batch", lambda: next(batches, _END))[0]
        if batch is _END:
            raise StopIteration
        return batch

    def check_made(self, made: bool) -> None:
        """Raises ValueError if a step's body made no run.step(), where ranks would then differ."""
        if not made and not self.alike:
            raise ValueError("steps: a body of several ranks makes its step by run.step(), which averages their "
                             "gradients; a backward and an optimizer of your own are for one process")

    def gradients(self, graded: Callable[[], tuple[float, float, float]], parameters: Callable[[], list[Any]],
                  models: list[Any], sums: bool) -> Node:
        """Returns RankSums.gradients() for the parameters that parameters() returns."""
        return self.sums.same(graded) if self.alike else self.sums.gradients(graded, parameters(), models, sums)

    def by_chunks(self, rows: int, chunk: int, work: Callable[[int, int], np.ndarray], look: Callable[[], object] = lambda: None) -> np.ndarray:
        """Returns the rows that work(begin, end) makes for every `chunk` of `rows` rows, in order. Each chunk is made by one rank.

        A row must have the same bits whoever makes it. look: called by all ranks before each turn; may raise, on all of them alike.
        Errors: those of agreed().
        """
        return by_chunks(self, rows, chunk, work, look)

    def write_last(self, write: Callable[[], None], undo: contextlib.ExitStack) -> contextlib.ExitStack:
        """Calls write() on all ranks: it writes rows of tables, after an update that `undo` would take back. Returns the rest of `undo`.

        If it fails on one rank, the rows of others have changed. Then nothing is undone or committed any more.
        """
        written = undo.pop_all()
        try:
            self.on_all("run.step()", write)
        except BaseException:
            self._over = True
            raise
        return written

    # ---- The limit ----

    def share(self, memory_limit: int | str) -> int:
        """Returns one rank's share of the limit, in bytes. The limit covers all ranks of a machine and their launcher."""
        said = self.agreed("the beginning", lambda: (float(limits(memory_limit).limit_bytes), float(_launcher_bytes())),
                           lambda both: both)[1]
        whole, launcher = map(int, said[min(self._pids)].numbers[:2])
        self._launcher_bytes = launcher
        return max((whole - launcher) // len(self._pids), 1 << 20)

    def whole(self, share_bytes: int) -> int:
        """Returns the limit of a machine whose ranks have this share."""
        return share_bytes * len(self._pids) + self._launcher_bytes

    def governor(self, memory_limit: int | str, **options: Any) -> Governor:
        """Makes the governor of this rank's share. Errors: BudgetExceeded naming the rank and its share."""
        share = self.share(memory_limit)
        try:
            self._governor = Governor(share, **options)
            return self._governor
        except BudgetExceeded as error:
            own = "" if error.tag in options.get("devices", ()) else f", whose share of memory_limit is {format_bytes(share)}"
            error.args = (f"rank {self.rank} of {self.count}{own}: {error}",)
            raise

    # ---- The folder, and what is asked ----

    def open_folder(self, root: str, opened: Callable[[], tuple[Any, bool, int, str]]) -> tuple[Any, bool, int, str]:
        """Opens the folder on rank 0 by opened(). Returns (folder, whether it is a run already, threads, text of run.toml)."""
        made, said = self.agreed("the beginning", lambda: opened() if self.first else (Beside(root), False, 0, ""),
                                 lambda made: made[1:3])
        return made[0], bool(said[0].numbers[0]), int(said[0].numbers[1]), made[3]

    def limits(self, governor: Governor, root: str) -> Limits:
        return Limits(self, governor, root)

    def settle(self, own: Boundary, limits: Limits) -> Boundary:
        """Combines the requests of all ranks between two steps, so that all act alike. Applies a new limit on the way."""
        said = self.say("the boundary of a step", _ASKED.index(own.asked), own.pressure is not None, own.due,
                        self.first and limits.asked(), own.wanted, text=str(own.pressure or own.why))
        if said[0].numbers[3]:
            limits.move()
        most = max(said, key=lambda one: one.numbers[0])
        pressure, there = own.pressure, [rank for rank, one in enumerate(said) if one.numbers[1]]
        if there and pressure is None:
            pressure = MemoryPressure(f"rank {there[0]}: {said[there[0]].text}")
        return dataclasses.replace(own, asked=_ASKED[int(most.numbers[0])], why=most.text, pressure=pressure,
                                   due=bool(said[0].numbers[2]), wanted=any(one.numbers[4] for one in said))


_OF_DEVICES = "devices "  # The same as in limit_requests.cpp.


class Limits:
    """The requests of `plimsoll limit` for several ranks, read between two steps; _core.LimitRequests is for one process."""

    def __init__(self, ranks: Ranks, governor: Governor, run: str) -> None:
        self._ranks, self._governor, self._request = ranks, governor, pathlib.Path(run) / ".limit"
        self._outcomes: list[tuple[str, LimitChange | None, str, bool]] = []

    def asked(self) -> bool:
        return self._request.exists()

    def move(self) -> None:
        """Takes the request on rank 0 and applies it on all ranks, each to its share."""
        text = ""
        if self._ranks.first:
            taken = self._request.with_name(".limit.taken")
            os.replace(self._request, taken)  # A request written meanwhile is kept as the next one.
            text = taken.read_text(encoding="utf-8", errors="replace").strip()
            taken.unlink()
        text = self._ranks.say("the boundary of a step", text=text)[0].text
        if text.startswith(_OF_DEVICES):
            self._outcomes.append((text.removeprefix(_OF_DEVICES), None, "", True))  # Each rank applies it to its devices.
            return
        try:
            share = self._ranks.share(text)
            change = self._ranks.agreed("the boundary of a step", lambda: self._governor.set_limit(share))[0]
            self._outcomes.append((text, change, "", False))
        except ValueError as error:
            self._outcomes.append((text, None, str(error), False))

    def take(self) -> list[tuple[str, LimitChange | None, str, bool]]:
        outcomes, self._outcomes = self._outcomes, []
        return outcomes

    def close(self) -> None:
        pass


class Beside:
    """The run's folder for ranks that do not write it: methods of _core.RunFolder do nothing, except to wait for room."""

    def __init__(self, root: str) -> None:
        self._root, self._room = pathlib.Path(root), _core.RunRoom(root)

    @property
    def waits_for_room(self) -> bool:
        return self._room.waits_for_room

    def wait_for_room(self) -> bool:
        return self._room.wait_for_room()

    def checkpoint_path(self, step: int) -> str:
        return str(self._root / "checkpoints" / f"step-{step:09}")

    def __getattr__(self, _: str) -> Callable[..., None]:
        return lambda *_, **__: None


def _make_default_group() -> None:
    """Makes torch's default group, which cannot be made twice. It stays open, as the program may use it too."""
    store, rank, count = next(dist.rendezvous("env://"))
    store = dist.PrefixStore(f"plimsoll/{_name_of_start(store, rank, count)}", store)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=count)


def _name_of_start(store: Any, rank: int, count: int) -> str:
    """Returns the name of this start, the same on all ranks. Launchers keep their store when they restart ranks. Without a new name
    gloo would find addresses of ranks that ended. Launchers count their restarts separately, so a count cannot be the name.

    Each rank asks with a unique word. Rank 0 makes the name and answers. All go on when all have acknowledged it.
    Errors: ConnectionError where a rank has not answered after _JOINING seconds.
    """
    until = time.monotonic() + _JOINING

    def there(key: str) -> bool:
        if time.monotonic() > until:
            raise ConnectionError(f"Run: not all of its {count} ranks have started in {_JOINING / 60:.0f} minutes")
        return bool(store.check([key]))

    own = name = uuid.uuid4().hex
    if rank == 0:
        silent = set(range(1, count))
        while silent:
            for one in sorted(silent):
                if there(f"plimsoll/answered/{name}/{one}"):
                    silent.remove(one)
                elif there(f"plimsoll/asked/{one}"):  # Maybe by a process that has ended; its successor asks again.
                    store.set(f"plimsoll/told/{store.get(f'plimsoll/asked/{one}').decode()}", name)
            time.sleep(_ASKS_EVERY)
        store.set(f"plimsoll/begun/{name}", "")
    else:
        store.set(f"plimsoll/asked/{rank}", own)
        while name == own or not there(f"plimsoll/begun/{name}"):
            if there(f"plimsoll/told/{own}"):  # Maybe by a rank 0 that has ended; its successor tells again.
                name = store.get(f"plimsoll/told/{own}").decode()
                store.set(f"plimsoll/answered/{name}/{rank}", "")
            time.sleep(_ASKS_EVERY)
    return name


def _how(error: BaseException | None) -> int:
    if error is None:
        return _FINE
    if isinstance(error, (BudgetExceeded, torch.OutOfMemoryError)):
        return _REFUSED
    return _UNWEIGHTED if isinstance(error, Unweighted) else _PRESSED if isinstance(error, MemoryPressure) else \
        _FAILED


def _figures(error: BaseException) -> tuple[float, ...]:
    return tuple(getattr(error, name, 0) for name in _FIGURES) if isinstance(error, BudgetExceeded) else ()


def _machine() -> str:
    """Returns a text that is equal on ranks that see one another's processes and share a limit: kernel, PID namespace, torchrun's node."""
    boot = pathlib.Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return f"{boot} {os.readlink('/proc/self/ns/pid')} {os.environ.get('GROUP_RANK', '0')}"


def _launcher_bytes() -> int:
    """Returns the anonymous and shared memory of the parent process, in bytes; 0 if torchrun did not start this one."""
    if "TORCHELASTIC_RUN_ID" not in os.environ:
        return 0
    with contextlib.suppress(OSError):
        lines = pathlib.Path(f"/proc/{os.getppid()}/status").read_text().splitlines()
        return sum(int(line.split()[1]) << 10 for line in lines if line.startswith(("RssAnon:", "RssShmem:")))
    return 0


def _checksum(value: Any, before: int = 0) -> int:
    """Computes the CRC-32 of a state: tensors by their bytes, other values by their text. before: the checksum to continue."""
    if isinstance(value, torch.Tensor):
        flat = value.detach().cpu().contiguous().view(-1)
        text = f"{value.dtype} {list(value.shape)}".encode()
        return zlib.crc32(flat.view(torch.uint8).numpy().data, zlib.crc32(text, before)) if flat.numel() \
            else zlib.crc32(text, before)
    if isinstance(value, dict):
        for key, inner in value.items():
            before = _checksum(inner, zlib.crc32(repr(key).encode(), before))
        return before
    if isinstance(value, (list, tuple)):
        for inner in value:
            before = _checksum(inner, zlib.crc32(b"[", before))
        return before
    return zlib.crc32(repr(value).encode(), before)
