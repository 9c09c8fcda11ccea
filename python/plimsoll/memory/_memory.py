# SPDX-License-Identifier: Apache-2.0
"""Governor: the one memory limit of the process and its children, and who holds what of it.

Threads: a Governor may be used from any thread; create and close it while no torch operator runs.
"""
from __future__ import annotations

import functools
import gc
import os
import signal
import threading
import time
import warnings
import weakref
from collections.abc import Callable, Mapping
from typing import Any, Protocol, TypeVar, cast

from .. import _core
from .._core import Ledger, LimitChange, LimitReport, PressureReport
from ..core import _torch_gate
from ..core._arrays import byte_size
from ..core._devices import empty_device_caches
from ..errors import BudgetExceeded, MemoryPressure, PressureWarning
from . import _workers
from ._device_memory import DeviceMemory, limited
from ._garbage import clean_up
from ._growth import Growth, what_helps

_MIB = 1 << 20
_BOUNDARY_EVERY = 0.01  # Seconds between the boundaries that steps make by themselves: a look takes 50 µs.

_TAGS = {
    "tensors": _core.Tag.TENSORS,
    "rows": _core.Tag.ROWS,
    "features": _core.Tag.FEATURES,
    "loader": _core.Tag.LOADER,
    "pinned": _core.Tag.PINNED,
    "weights": _core.Tag.WEIGHTS,
    "foreign": _core.Tag.FOREIGN,
    "other": _core.Tag.OTHER,
}


class _Closes(Protocol):
    def close(self) -> None: ...


class _GivesBack(Protocol):
    def give_back(self) -> None: ...


class Lease:
    """The right to hold a number of bytes, until it is closed; a context manager."""

    def __init__(self, lease: _core.Lease) -> None:
        self._core = lease

    @property
    def bytes(self) -> int:
        """Bytes held now; 0 after close()."""
        return self._core.bytes

    @property
    def tag(self) -> str:
        """Whose bytes they are: "other", …"""
        return self._core.tag

    def grow(self, size: int | str) -> None:
        """Raises the lease to `size`, never lowering it. Errors: BudgetExceeded; then unchanged."""
        self._core.grow(byte_size(size, "size"))

    def shrink(self, size: int | str) -> None:
        """Lowers the lease to `size`, never raising it."""
        self._core.shrink(byte_size(size, "size"))

    def close(self) -> None:
        """Returns every byte."""
        self._core.close()

    def __enter__(self) -> Lease:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"<Lease of {_core.format_bytes(self.bytes)} for {self.tag}>"


_Made = TypeVar("_Made", bound=Callable[..., Any])


def with_governor(function: _Made) -> _Made:
    """`function`, with a Governor of its own for the time of the call where it is given no `governor`."""
    @functools.wraps(function)
    def called(*arguments: Any, governor: Governor | None = None, **options: Any) -> Any:
        if governor is not None:
            return function(*arguments, governor=governor, **options)
        if _core.Governor.current().valid:
            raise ValueError("governor: this process has a governor already; pass it on with governor=...")
        with Governor() as own:
            return function(*arguments, governor=own, **options)

    return cast(_Made, called)


class Governor:
    """The one memory limit of this process and its children. Everything else leases its bytes from it.

        with plimsoll.Governor("6GiB") as governor:
            users = plimsoll.EmbeddingStore.open(governor, "data/users", rows=1_000_000, dim=64)

    Leaving the block closes every store and loader opened from it. Where plimsoll._torch was built,
    tensors are leased as well, from here on or from the moment that the program imports torch.

    What cannot be leased is measured: NumPy's arrays, worker processes, shared memory, weights mapped from a
    file. A thread watches it. When it comes near the limit, caches are given back, then there is a
    PressureWarning, and where nothing else is left MemoryPressure is raised: by TrainingStep between two
    steps, in any other loop as `on_pressure` says. One allocation that is larger than what is left goes
    past all that; `plimsoll run` has the kernel hold the limit.

    A device's memory has a limit of its own, which torch imposes (DeviceMemory):

        with plimsoll.Governor("24GiB", devices={"cuda": "20GiB"}) as governor:
            print(governor.devices["cuda"].explain())

    Units:    `memory_limit`, `disk_limit`, `foreign_bytes` are bytes (an int) or text: "6GiB", "512MB", "25%" (of the
              machine's memory; of disk_limit, of what is free).
    Requires: one governor at a time. A governor that holds nothing is replaced, so that a notebook
              cell may run twice.
    Forks:    a forked child makes a governor of its own. In the one that it inherited, what would change
              something raises ValueError, properties and ledger() are as at the fork, and close() does
              nothing.
    Errors:   ValueError (bad size; another governor still holds leases, naming the holders);
              BudgetExceeded when what is resident already passes the limit.
    """

    def __init__(self, memory_limit: int | str = "", *, disk_limit: int | str = "",
                 directory: str = ".", foreign_bytes: int | str = "64MiB", pressure_fraction: float = 0.85,
                 on_pressure: str | Callable[[PressureReport], Any] = "raise",
                 devices: Mapping[str, int | str] | None = None) -> None:
        """Finds the limit and measures what is resident now (the baseline).

        memory_limit: the limit; "" is 80 % of what cgroups, SLURM and the machine leave.
        disk_limit: most a table, or a run with its checkpoints, may come to hold on disk; what could
                   exceed it is refused when it is opened. "" for no bound.
        directory: whose file system the disk limit speaks of.
        foreign_bytes: set aside for what cannot be leased: Python objects, NumPy, code, and what worker
                   processes hold beside this one, about as much for each of them; ledger() has the
                   line "children". With torch, what is imported later counts: its first optimizer
                   alone imports 70 MiB of modules, so make that before the governor, or say "128MiB".
        on_pressure: of a plimsoll.Run its loop decides (docs/guide/resume.md); for a loop that calls neither step_boundary() nor TrainingStep, or waits for what
                   grows meanwhile. "raise": the main thread gets MemoryPressure as KeyboardInterrupt
                   comes, by SIGURG where it waits; "warn": only PressureWarning; or a function, called
                   in the main thread with the PressureReport, once as a warning and once with `.stop`.
        devices: limits of devices by their names in torch: {"cuda": "20GiB"}; "80%" is of the device's memory, "" is 95 % of
                   what is free there. Torch is imported, and contexts are made before the baseline is measured.
        """
        global _newest
        if not (callable(on_pressure) or on_pressure in ("raise", "warn")):
            raise ValueError(f'on_pressure: {on_pressure!r} is neither "raise", "warn" nor a function')
        self.directory = str(directory)
        """Whose file system the disk limit speaks of."""
        self._on_pressure = on_pressure
        self._next_boundary = 0.0
        self._row_ways: dict[Any, Any] = {}  # By device: of rows/_device_rows.py.
        self._growth, self._steps, self._steps_told = Growth(), 0, False
        self._before_retry: Callable[[], None] = lambda: None  # Ends what holds memory for a moment only.
        self._hears: Callable[[bool, PressureReport], None] | None = None  # Of a Run: takes a stop of the watcher.
        self._arena: Any = None
        self._parts: weakref.WeakSet[_Closes] = weakref.WeakSet()
        self._on_their_way: weakref.WeakSet[_GivesBack] = weakref.WeakSet()  # To a device, before anybody needs them.
        machine = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
        foreign_size = byte_size(foreign_bytes, "foreign_bytes", machine)
        self.devices: dict[str, DeviceMemory] = limited(devices) if devices else {}
        """Devices whose memory is limited, by name."""
        # Before the baseline is measured: torch's libraries belong to it.
        extension = _torch_gate.load_if_torch_imported()
        if extension is not None:
            extension.purge()  # A cache alone must not keep a governor from being replaced.
        options = (_size_text(memory_limit, "memory_limit"), "memory_limit",
                   _size_text(disk_limit, "disk_limit"), str(directory), foreign_size, float(pressure_fraction))
        try:
            self._core = _created(options)
        except BaseException:
            self._lift_limits()
            raise
        _newest = weakref.ref(self)
        try:
            self._watcher = _core.Watcher(_wake_signal())
            weakref.finalize(self, self._watcher.close)  # At exit, too: its thread calls the interpreter.
            if extension is not None:
                self._attach(extension)
        except BaseException:
            self._core.close()  # Nobody has it.
            self._lift_limits()
            raise
        if extension is None:
            _torch_gate.when_torch_comes(_attach_to_torch)

    @staticmethod
    def current() -> Governor | None:
        """The process's governor; None before one is made, after it was closed and in a forked child."""
        one = _newest()
        return one if one is not None and _core.Governor.current().valid else None

    def _attach(self, extension: Any) -> None:
        global _attached_in, _attached_to
        if _attached_in not in (0, os.getpid()):
            return  # A forked worker: the arena is its parent's, and new tensors here have no lease.
        extension.attach(self._core)
        self._arena = extension
        _attached_in = os.getpid()
        _attached_to = weakref.ref(self)

    def _torch_came(self) -> None:
        """Attaches to the torch that was just imported, whose libraries belong to the baseline."""
        extension = _torch_gate.load_if_torch_imported()
        if extension is None or self.arena_attached:
            return
        before = self.ledger().baseline_bytes
        if self._core.rebaseline() <= before:
            warnings.warn("torch was imported while the governor had leases out, so that its libraries "
                          "count as foreign memory: import torch before the governor, or before "
                          "stores are opened", PressureWarning, stacklevel=2)
        elif (free := self.ledger().free_bytes) < 0:
            warnings.warn(f"with torch's libraries the process holds {format_bytes(-free)} more than "
                          f"its limit of {format_bytes(self.limit_bytes)}: a limit of "
                          f"{-(-(self.limit_bytes - free) // _MIB)} MiB is the smallest that would do",
                          PressureWarning, stacklevel=2)
        self._attach(extension)

    @property
    def arena_attached(self) -> bool:
        """Whether new torch tensors are leased from this governor; not in a forked worker."""
        return self._arena is not None and _attached_to() is self and _attached_in == os.getpid()

    @property
    def limit(self) -> LimitReport:
        """The limit, where it comes from and what else was considered; str() is one line."""
        return self._core.limit()

    @property
    def limit_bytes(self) -> int:
        """The limit in force, in bytes."""
        return self._core.ledger().limit_bytes

    @property
    def disk_limit_bytes(self) -> int:
        """The disk limit in bytes: `disk_limit`, or the free space where that is less."""
        return self._core.disk_limit_bytes

    def ledger(self) -> Ledger:
        """Returns a consistent copy of who holds how many bytes now; str() is a table.

        `.measured` is the memory without a lease, as last measured: children, shared memory, mapped weights.
        """
        return self._core.ledger()

    def reserve(self, size: int | str, tag: str = "other") -> Lease:
        """Leases bytes for memory of your own. Errors: BudgetExceeded; ValueError."""
        if tag not in _TAGS:
            raise ValueError(f"tag: {tag!r} is none of {', '.join(_TAGS)}")
        return Lease(self._core.reserve(_TAGS[tag], byte_size(size, "size")))

    def promise(self, size: int | str, tag: str = "tensors") -> None:
        """Keeps so much more of the limit for a tag from now on, before it is leased.

        Nobody else gets these bytes. Errors: BudgetExceeded when they are not free; ValueError.
        """
        if tag not in _TAGS:
            raise ValueError(f"tag: {tag!r} is none of {', '.join(_TAGS)}")
        self._core.admit(_TAGS[tag], byte_size(size, "size"))

    def step_boundary(self) -> PressureReport:
        """Reads what is held and, under pressure, gives memory back; `.stop` asks you to end.

        Held is what this process and its children have resident, shared memory included.
        TrainingStep does this by itself. The watcher leaves a loop alone that has called this within ten
        seconds, until the limit itself is about to be passed.
        Requires: call it between steps, from the thread that trains.
        """
        self._steps += not self._steps_told
        return self._boundary()

    def _boundary(self) -> PressureReport:
        report = self._core.step_boundary()
        self._growth.add(self._steps, report.resident.total)
        return report

    def _at_step(self, step: int) -> None:
        """A run counts its steps itself."""
        self._steps, self._steps_told = step, True

    def set_limit(self, memory_limit: int | str) -> LimitChange:
        """Moves the limit while everything is in use; nothing that is computed changes.

        Lower: caches and queues are smaller when this returns. What is in use follows at the next
        step_boundary() calls; where it cannot, `.settled` is False, the limit in force stays at what
        is needed, and a second later step_boundary() says `.stop`, with `.needed_bytes`. Higher:
        caches and queues take again what they had been admitted.

        Threads:  any; from a thread that watches, say, while another one trains.
        Errors:   ValueError (bad size, closed governor); then nothing has changed.
        """
        text = _size_text(memory_limit, "memory_limit")
        if not text.strip():
            raise ValueError("memory_limit: a size is wanted, such as '6GiB'")
        return self._core.set_limit(text, "set_limit")

    def log_memory_state(self, label: str = "") -> str:
        """Prints one line, and returns it: how much of the limit is used and how much is left.

            Memory usage after epoch 3: 61.2% of 6.0 GiB (2.3 GiB available; peak 4.1 GiB; leased
            rows 2.0 GiB, tensors 1.1 GiB)

        Used is what the operating system charges this process; available, the rest of the limit.
        """
        now, ledger = _core.resident(), self.ledger()
        held = ", ".join(f"{name} {format_bytes(pool.leased_bytes)}"
                         for name, pool in ledger.pools.items() if pool.leased_bytes > 0)
        line = (f"Memory usage{' ' if label else ''}{label}: "
                f"{100 * now.total / ledger.limit_bytes:.1f}% of {format_bytes(ledger.limit_bytes)} "
                f"({format_bytes(max(ledger.limit_bytes - now.total, 0))} available; "
                f"peak {format_bytes(now.peak)}; leased {held or 'nothing'})")
        print(line, flush=True)
        return line

    def clean_up(self) -> dict[str, Any]:
        """Gives back what nobody uses: objects in reference cycles, the arena's free pages and the heap's.
        Changes no result.

        Returns what plimsoll.clean_up() returns, which does the same without a Governor. Pressure gives pages
        back by itself; call this after an evaluation, so that the steps that follow begin where training stood.
        Requires: tensors are leased from this governor (arena_attached).
        """
        if not self.arena_attached:
            raise ValueError("clean_up: no tensors are leased from this governor; import torch first, and "
                             "none are in a forked process")
        return clean_up()

    def rebaseline(self) -> int:
        """Measures the baseline again, in bytes; only while nothing is leased."""
        return self._core.rebaseline()

    def close(self) -> None:
        """Closes every store and loader opened from this governor, then the governor.

        Tensors still alive keep their bytes, in an orphan account. A second close does nothing.
        """
        self._watcher.close()
        for part in list(self._parts):
            part.close()
        if self.arena_attached:
            self._arena.detach()
        self._arena = None
        self._core.close()
        self._lift_limits()

    def _lift_limits(self) -> None:
        """Lifts those of devices, which are none of this governor's any more."""
        devices, self.devices = self.devices, {}
        for one in devices.values():
            one.close()

    def device_memory(self, device: Any) -> DeviceMemory | None:
        """Returns the limit of a torch.device that has a number; None: it has none of this governor's."""
        return next((one for one in self.devices.values() if one.is_of(device)), None)

    def device_refusal(self, text: str, needed_bytes: int | None = None) -> BudgetExceeded:
        """Makes the exception for something that a device refused, the fullest one; the caller raises it. It names a limit to try.

        needed_bytes: what has to be reserved for it; None where nobody knows. Requires: a device is limited.
        """
        return min(self.devices.values(), key=lambda one: one.free_bytes).refusal(text, needed_bytes)

    def _adopt(self, part: _Closes) -> None:
        """Remembers something to close with the governor, without keeping it alive."""
        self._parts.add(part)

    def tensor_room(self) -> int:
        """Bytes that tensors hold or may still take under the limit, promised bytes among them.

        What workers and arrays hold beyond their allowance is taken off.
        """
        ledger = self.ledger()
        pool = ledger.pools["tensors"]
        return max(0, ledger.free_bytes - ledger.crowded_bytes
                   + max(pool.floor_bytes, pool.leased_bytes))

    def _look(self) -> PressureReport | None:
        """step_boundary(), at most every 10 ms; None where it was not time."""
        now = time.monotonic()
        self._steps += not self._steps_told
        if now < self._next_boundary:
            return None
        self._next_boundary = now + _BOUNDARY_EVERY
        return self._boundary()

    def _pressure(self, report: PressureReport) -> MemoryPressure:
        """Makes the exception that ends a loop, from a report that says stop."""
        needed = -(-max(report.needed_bytes, self.limit_bytes + _MIB) // _MIB) * _MIB
        return MemoryPressure(
            f"memory is short, and nothing is left to give back: {self.ledger().explain()}. A limit of "
            f"{needed // _MIB} MiB would do just now{self._lasting(needed - report.resident.total)}; or hold less: "
            f"{what_helps() or 'fewer workers, fewer batches in flight, smaller caches'}", report.resident.total, self.limit_bytes, needed)

    def _lasting(self, room_bytes: int) -> str:
        """For how many steps so much more does, where what is held grows from step to step; "" where it does not."""
        rate = self._growth.bytes_per_step
        return (f", and for some {max(int(room_bytes / rate), 0):,} steps more, as what is held grows by {format_bytes(int(rate))} "
                "a step: no limit lasts if that goes on" if rate > 0 else "")

    def _hear(self) -> None:
        """Acts on the watcher's report, in the main thread, between two instructions of the program."""
        news = self._watcher.take()
        if news is None:
            return
        stop, late, report = news
        if stop and self._hears is not None:
            self._hears(late, report)
            return
        if stop and (still := self._still_asks(report)) is not None:
            report = still
        else:
            stop = False
        if callable(self._on_pressure):
            self._on_pressure(report)
        elif stop and self._on_pressure == "raise":
            pressure = self._pressure(report)  # While those are there of whom it tells.
            _workers.end_workers_waited_for()
            raise pressure
        else:
            warnings.warn(f"memory is short: {self.ledger().explain()}", PressureWarning, stacklevel=3)

    def _still_asks(self, report: PressureReport) -> PressureReport | None:
        """Gives back caches that have to be written first. Returns the report that asks for a stop even so, or None."""
        now = self._core.before_stop()
        if now.stop:
            return now
        if report.stop or now.purged_bytes or now.shrunk_bytes:
            self._watcher.avert()
            return None
        return report  # It grows fast, and nobody has given anything.

    def _refusal(self, tag: str, requested_bytes: int, text: str) -> BudgetExceeded:
        """Makes the exception of our own calls from a refusal by torch's allocator."""
        ledger = self.ledger()
        held = {name: pool.leased_bytes for name, pool in ledger.pools.items()}
        return BudgetExceeded(text, tag, requested_bytes, ledger.free_bytes, ledger.limit_bytes,
                              held, "raise the limit or make batches smaller")

    def _room_to_try(self) -> int:
        """How much more to try where nobody can tell what is needed."""
        return max(self.limit_bytes // 8, 16 * _MIB)

    def refusal(self, tag: str, requested_bytes: int, text: str, *, limit_bytes: int = 0,
                whole: Callable[[int], int] = int) -> BudgetExceeded:
        """Makes the exception for something that does not fit; the caller raises it.

        tag:             the pool that refused, a name in `ledger().pools`.
        requested_bytes: what was asked of it; 0 where nobody knows.
        text:            what did not fit.
        limit_bytes:     a limit that would do, which `text` names; 0: the message gets one to try, with room to go on.
        whole:           returns the limit of all ranks, given that of this one.
        """
        if not limit_bytes:
            limit_bytes = whole(self.limit_bytes + max(self._room_to_try(), 2 * requested_bytes))
            limit_bytes = -(-limit_bytes // _MIB) * _MIB
            text += f"; try a limit of {limit_bytes // _MIB} MiB"
        error = self._refusal(tag, requested_bytes, text)
        error.smallest_limit_bytes = limit_bytes
        return error

    def __enter__(self) -> Governor:
        if not self.arena_attached:
            extension = _torch_gate.load_if_torch_imported()
            if extension is not None:
                self._attach(extension)
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"<Governor of {self.limit.explain()}>"


def _created(options: tuple[Any, ...]) -> Any:
    """The core's governor."""
    try:
        return _core.Governor.create(*options)
    except ValueError:
        # Stores of an earlier cell may be alive in a reference cycle only.
        if not _core.Governor.current().valid or gc.collect() == 0:
            raise
        return _core.Governor.create(*options)


def _deliver() -> None:
    """Called by the interpreter for the watcher."""
    governor = Governor.current()
    if governor is not None:
        governor._hear()


def _wake_signal() -> int:
    """The signal by which the watcher wakes a main thread that waits in a system call; 0: none.

    SIGURG: ignored where nobody handles it, and one may come for no reason. Not taken from a program that
    uses it, nor from outside its main thread: there a stop waits for the next instruction.
    """
    if threading.current_thread() is not threading.main_thread():
        return 0
    if signal.getsignal(signal.SIGURG) not in (signal.SIG_DFL, _woken):
        return 0
    signal.signal(signal.SIGURG, _woken)
    return signal.SIGURG


def _woken(*_: object) -> None:
    _deliver()


def _attach_to_torch() -> None:
    governor = Governor.current()
    if governor is not None:
        governor._torch_came()


def pressure_between_steps() -> MemoryPressure | None:
    """A step boundary, at most every 10 ms; what to raise when memory asks for the end."""
    governor = Governor.current()
    if governor is None:
        return None
    report = governor._look()
    return governor._pressure(report) if report is not None and report.stop else None


def _no_governor() -> Governor | None:
    return None


# The governor whose leases new tensors take; written by Governor._attach() only.
_attached_to: Any = _no_governor
# The process in which tensors were first leased; 0: none yet. Written by Governor._attach() only.
_attached_in = 0
# The governor made last; written by Governor.__init__() only.
_newest: Any = _no_governor


def _size_text(size: int | str, option: str) -> str:
    """The text the core parses: percentages are of the machine, which it knows."""
    if isinstance(size, str):
        return size
    return str(byte_size(size, option))


def limits(memory_limit: int | str = "") -> LimitReport:
    """Every bound on this process's memory, and the one that holds. Errors: ValueError."""
    return _core.limits(_size_text(memory_limit, "memory_limit"))


def refused_by_device(governor: Governor, what: str, error: RuntimeError) -> Exception:
    """Returns what to raise for torch's refusal: of a limited device the limit to try is named."""
    return governor.device_refusal(f"{what}: {str(error).splitlines()[0]}") if governor.devices else error


def make_room(extension: Any) -> None:
    """Before another try of what memory refused: ends what holds some for a moment only, gives back what is on its way to a device
    before it is needed, and empties the caches of `extension`, plimsoll._torch, and of devices. Errors: of a commit that was being
    written."""
    if (governor := Governor.current()) is not None:
        governor._before_retry()
        for one in list(governor._on_their_way):
            one.give_back()
    extension.purge()
    empty_device_caches()


def parse_bytes(text: str, whole_bytes: int = 0) -> int:
    """Bytes from "512MiB", "6GB", "512M" or "25%" (of `whole_bytes`). Errors: ValueError."""
    return _core.parse_bytes(text, whole_bytes)


def format_bytes(size: int) -> str:
    """A size for readers: "768.0 MiB"."""
    return _core.format_bytes(size)
