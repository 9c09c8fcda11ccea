# SPDX-License-Identifier: Apache-2.0
"""Governor: the one memory limit of the process and its children, and the list of holders.

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
_BOUNDARY_EVERY = 0.01  # Seconds between the boundaries that TrainingStep makes; one takes 50 µs.

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
        """The pool that the bytes belong to: "other", …"""
        return self._core.tag

    def grow(self, size: int | str) -> None:
        """Raises the lease to `size`, never lowering it. Errors: BudgetExceeded; the lease is then unchanged."""
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
    """Wraps `function`: a call without `governor` gets a Governor for its duration."""
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

    Leaving the block closes every store and loader opened from it. If plimsoll._torch was built, tensors are leased as
    well: from construction, or from the program's import of torch.

    Memory without a lease is measured by a thread: NumPy's arrays, worker processes, shared memory, weights mapped from
    a file. Near the limit, caches are given back, then a PressureWarning is issued. When nothing else is left,
    MemoryPressure is raised: by TrainingStep between two steps, in any other loop as `on_pressure` says. A single
    allocation larger than the remaining memory escapes all this; under `plimsoll run` the kernel enforces the limit.

    A device's memory has a limit of its own, which torch imposes (DeviceMemory):

        with plimsoll.Governor("24GiB", devices={"cuda": "20GiB"}) as governor:
            print(governor.devices["cuda"].explain())

    Units:    `memory_limit`, `disk_limit`, `foreign_bytes` are bytes (an int) or text: "6GiB", "512MB", "25%" (of the
              machine's memory; for disk_limit, of the free space).
    Requires: one governor at a time. A governor that holds nothing is replaced, so that a notebook
              cell may run twice.
    Forks:    a forked child makes its own governor. In the inherited one, calls that would change something raise
              ValueError, properties and ledger() are as at the fork, and close() does nothing.
    Errors:   ValueError for a bad size, or while another governor holds leases (the message names the holders);
              BudgetExceeded when the resident memory already passes the limit.
    """

    def __init__(self, memory_limit: int | str = "", *, disk_limit: int | str = "",
                 directory: str = ".", foreign_bytes: int | str = "64MiB", pressure_fraction: float = 0.85,
                 on_pressure: str | Callable[[PressureReport], Any] = "raise",
                 devices: Mapping[str, int | str] | None = None) -> None:
        """Finds the limit and measures the baseline: the memory resident now.

        memory_limit: the limit; "" is 80 % of what cgroups, SLURM and the machine leave.
        disk_limit: most bytes that a table, or a run with its checkpoints, may hold on disk. Opening something that could
                   exceed it is refused. "" for no bound.
        directory: a path on the file system to which the disk limit applies.
        foreign_bytes: bytes set aside for memory that cannot be leased: Python objects, NumPy, code. Each worker process
                   holds about as much; ledger() shows them as "children". Modules imported later count too: torch's
                   first optimizer imports 70 MiB of them, so make it before the governor, or set "128MiB".
        on_pressure: for a loop that calls neither step_boundary() nor TrainingStep, or waits while memory grows; in a
                   plimsoll.Run, its loop decides (docs/guide/resume.md). "raise": the main thread gets MemoryPressure as it
                   would get KeyboardInterrupt, woken by SIGURG if it waits. "warn": only PressureWarning. A function is
                   called in the main thread with the PressureReport: once as a warning, once with `.stop`.
        devices: limits of devices by torch's names: {"cuda": "20GiB"}; "80%" is a share of the device's memory, "" is 95 % of
                   what is free there. Imports torch, and makes the contexts before the baseline is measured.
        """
        global _newest
        if not (callable(on_pressure) or on_pressure in ("raise", "warn")):
            raise ValueError(f'on_pressure: {on_pressure!r} is neither "raise", "warn" nor a function')
        self.directory = str(directory)
        """A path on the file system to which the disk limit applies."""
        self._on_pressure = on_pressure
        self._next_boundary = 0.0
        self._row_ways: dict[Any, Any] = {}  # By device; filled by rows/_device_rows.py.
        self._growth, self._steps, self._steps_told = Growth(), 0, False
        self._before_retry: Callable[[], None] = lambda: None  # Frees short-lived memory before a retry.
        self._hears: Callable[[bool, PressureReport], None] | None = None  # Set by a Run: handles the watcher's stop.
        self._arena: Any = None
        self._parts: weakref.WeakSet[_Closes] = weakref.WeakSet()
        self._on_their_way: weakref.WeakSet[_GivesBack] = weakref.WeakSet()  # Transfers to a device ahead of their use.
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
            self._core.close()  # The caller never gets this governor.
            self._lift_limits()
            raise
        if extension is None:
            _torch_gate.when_torch_comes(_attach_to_torch)

    @staticmethod
    def current() -> Governor | None:
        """Returns the process's governor; None before one is made, after it was closed and in a forked child."""
        one = _newest()
        return one if one is not None and _core.Governor.current().valid else None

    def _attach(self, extension: Any) -> None:
        global _attached_in, _attached_to
        if _attached_in not in (0, os.getpid()):
            return  # A forked worker: the arena belongs to its parent, so new tensors here have no lease.
        extension.attach(self._core)
        self._arena = extension
        _attached_in = os.getpid()
        _attached_to = weakref.ref(self)

    def _torch_came(self) -> None:
        """Attaches to the torch that was just imported, and adds torch's libraries to the baseline."""
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
        """The limit, its origin and the other bounds considered; str() is one line."""
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
        """Returns a consistent copy of all holders and their bytes; str() is a table.

        `.measured` is the memory without a lease, as last measured: children, shared memory, mapped weights.
        """
        return self._core.ledger()

    def reserve(self, size: int | str, tag: str = "other") -> Lease:
        """Leases bytes for memory of your own. Errors: BudgetExceeded; ValueError."""
        if tag not in _TAGS:
            raise ValueError(f"tag: {tag!r} is none of {', '.join(_TAGS)}")
        return Lease(self._core.reserve(_TAGS[tag], byte_size(size, "size")))

    def promise(self, size: int | str, tag: str = "tensors") -> None:
        """Reserves so many more bytes of the limit for a tag, to be leased later. Other tags cannot take them.

        Errors: BudgetExceeded when they are not free; ValueError.
        """
        if tag not in _TAGS:
            raise ValueError(f"tag: {tag!r} is none of {', '.join(_TAGS)}")
        self._core.admit(_TAGS[tag], byte_size(size, "size"))

    def step_boundary(self) -> PressureReport:
        """Measures the resident memory and, under pressure, gives some back; if `.stop` is set, end the loop.

        Resident is the memory of this process and its children, shared memory included.
        TrainingStep calls this by itself. The watcher does not interrupt a loop that has called this within ten
        seconds, unless the limit itself is about to be passed.
        Requires: call it between steps, from the thread that trains.
        """
        self._steps += not self._steps_told
        return self._boundary()

    def _boundary(self) -> PressureReport:
        report = self._core.step_boundary()
        self._growth.add(self._steps, report.resident.total)
        return report

    def _at_step(self, step: int) -> None:
        """Sets the step number. A run, which counts its steps itself, calls this."""
        self._steps, self._steps_told = step, True

    def set_limit(self, memory_limit: int | str) -> LimitChange:
        """Changes the limit while everything is in use; no computed value changes.

        Lower: caches and queues have shrunk when this returns. Memory in use shrinks at the next step_boundary() calls. If it
        cannot, `.settled` is False and the limit in force stays at what is needed; one second later step_boundary()
        sets `.stop`, with `.needed_bytes`. Higher: caches and queues grow back to the sizes admitted at first.

        Threads:  any, such as a monitoring thread while another one trains.
        Errors:   ValueError (bad size, closed governor); then nothing has changed.
        """
        text = _size_text(memory_limit, "memory_limit")
        if not text.strip():
            raise ValueError("memory_limit: a size is wanted, such as '6GiB'")
        return self._core.set_limit(text, "set_limit")

    def log_memory_state(self, label: str = "") -> str:
        """Prints one line, and returns it: the used share of the limit, and the bytes left.

            Memory usage after epoch 3: 61.2% of 6.0 GiB (2.3 GiB available; peak 4.1 GiB; leased
            rows 2.0 GiB, tensors 1.1 GiB)

        Used are the bytes that the operating system charges to this process; available is the rest of the limit.
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
        """Frees unused memory: objects in reference cycles, free pages of the arena and of the heap. Changes no result.

        Returns the result of plimsoll.clean_up(), which does the same without a Governor. Pressure frees pages by itself;
        call this after an evaluation, so that training goes on with its former memory.
        Requires: tensors are leased from this governor (arena_attached).
        """
        if not self.arena_attached:
            raise ValueError("clean_up: no tensors are leased from this governor; import torch first, and "
                             "none are in a forked process")
        return clean_up()

    def rebaseline(self) -> int:
        """Measures the baseline again and returns its bytes. Requires: nothing is leased."""
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
        """Lifts the limits of devices, and forgets them."""
        devices, self.devices = self.devices, {}
        for one in devices.values():
            one.close()

    def device_memory(self, device: Any) -> DeviceMemory | None:
        """Returns the limit of a torch.device that has a number; None: it has none of this governor's."""
        return next((one for one in self.devices.values() if one.is_of(device)), None)

    def device_refusal(self, text: str, needed_bytes: int | None = None) -> BudgetExceeded:
        """Makes the exception for a request that a device refused, which is taken to be the fullest one; the caller raises it. It names a
        limit to try.

        needed_bytes: bytes that have to be reserved for the request; None: unknown. Requires: a device is limited.
        """
        return min(self.devices.values(), key=lambda one: one.free_bytes).refusal(text, needed_bytes)

    def _adopt(self, part: _Closes) -> None:
        """Registers `part` to be closed with the governor, by a weak reference."""
        self._parts.add(part)

    def tensor_room(self) -> int:
        """Returns the bytes that tensors hold or may still take under the limit, promised bytes included.

        Memory of workers and arrays beyond their allowance is subtracted.
        """
        ledger = self.ledger()
        pool = ledger.pools["tensors"]
        return max(0, ledger.free_bytes - ledger.crowded_bytes
                   + max(pool.floor_bytes, pool.leased_bytes))

    def _look(self) -> PressureReport | None:
        """Returns step_boundary(), or None if the last call was less than 10 ms ago."""
        now = time.monotonic()
        self._steps += not self._steps_told
        if now < self._next_boundary:
            return None
        self._next_boundary = now + _BOUNDARY_EVERY
        return self._boundary()

    def _pressure(self, report: PressureReport) -> MemoryPressure:
        """Makes the exception that ends a loop, from a report with `.stop` set."""
        needed = -(-max(report.needed_bytes, self.limit_bytes + _MIB) // _MIB) * _MIB
        return MemoryPressure(
            f"memory is short, and nothing is left to give back: {self.ledger().explain()}. A limit of "
            f"{needed // _MIB} MiB would do just now{self._lasting(needed - report.resident.total)}; or hold less: "
            f"{what_helps() or 'fewer workers, fewer batches in flight, smaller caches'}", report.resident.total, self.limit_bytes, needed)

    def _lasting(self, room_bytes: int) -> str:
        """Says for how many steps `room_bytes` more suffices, if the memory held grows from step to step; "" otherwise."""
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
            pressure = self._pressure(report)  # Before the workers end, as the text names them.
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
        return report  # Memory grows fast, and nothing was given back.

    def _refusal(self, tag: str, requested_bytes: int, text: str) -> BudgetExceeded:
        """Makes a BudgetExceeded from a refusal by torch's allocator in one of our own calls."""
        ledger = self.ledger()
        held = {name: pool.leased_bytes for name, pool in ledger.pools.items()}
        return BudgetExceeded(text, tag, requested_bytes, ledger.free_bytes, ledger.limit_bytes,
                              held, "raise the limit or make batches smaller")

    def _room_to_try(self) -> int:
        """Returns the bytes to add to the limit in advice, where the need is unknown."""
        return max(self.limit_bytes // 8, 16 * _MIB)

    def refusal(self, tag: str, requested_bytes: int, text: str, *, limit_bytes: int = 0,
                whole: Callable[[int], int] = int) -> BudgetExceeded:
        """Makes the exception for a request that does not fit; the caller raises it.

        tag:             the pool that refused, a name in `ledger().pools`.
        requested_bytes: the size of the request; 0: unknown.
        text:            the message, which names what did not fit.
        limit_bytes:     a sufficient limit, which `text` names; 0: the message gets one to try, with some room.
        whole:           converts a limit of this rank to the limit of all ranks.
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
    """Returns the core's governor. Collects garbage and tries again if an unreachable one still holds leases."""
    try:
        return _core.Governor.create(*options)
    except ValueError:
        # Stores of an earlier cell may be alive in a reference cycle only.
        if not _core.Governor.current().valid or gc.collect() == 0:
            raise
        return _core.Governor.create(*options)


def _deliver() -> None:
    """Hands the watcher's report to the governor; called by the interpreter in the main thread."""
    governor = Governor.current()
    if governor is not None:
        governor._hear()


def _wake_signal() -> int:
    """Returns the signal by which the watcher wakes a main thread that waits in a system call; 0: none.

    The signal is SIGURG, which the system ignores by default. A program that handles SIGURG keeps it, and outside the main
    thread no handler can be set; there a stop waits for the next Python instruction.
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
    """Makes a step boundary, at most every 10 ms. Returns the exception to raise if the loop must end, else None."""
    governor = Governor.current()
    if governor is None:
        return None
    report = governor._look()
    return governor._pressure(report) if report is not None and report.stop else None


def _no_governor() -> Governor | None:
    return None


# Returns the governor that leases new tensors; written by Governor._attach() only.
_attached_to: Any = _no_governor
# The process in which tensors were first leased; 0: none yet. Written by Governor._attach() only.
_attached_in = 0
# Returns the governor made last; written by Governor.__init__() only.
_newest: Any = _no_governor


def _size_text(size: int | str, option: str) -> str:
    """Returns the text that the core parses; it knows the machine's memory, of which percentages are."""
    if isinstance(size, str):
        return size
    return str(byte_size(size, option))


def limits(memory_limit: int | str = "") -> LimitReport:
    """Returns every bound on this process's memory, and the one that applies. Errors: ValueError."""
    return _core.limits(_size_text(memory_limit, "memory_limit"))


def refused_by_device(governor: Governor, what: str, error: RuntimeError) -> Exception:
    """Returns the exception to raise for torch's refusal; for a limited device it names a limit to try."""
    return governor.device_refusal(f"{what}: {str(error).splitlines()[0]}") if governor.devices else error


def make_room(extension: Any) -> None:
    """Frees memory before a refused request is tried again: short-lived memory, transfers to a device ahead of their use, the
    cache of `extension` (plimsoll._torch) and those of devices.

    Errors: those of a commit that was being written.
    """
    if (governor := Governor.current()) is not None:
        governor._before_retry()
        for one in list(governor._on_their_way):
            one.give_back()
    extension.purge()
    empty_device_caches()


def parse_bytes(text: str, whole_bytes: int = 0) -> int:
    """Returns the bytes of "512MiB", "6GB", "512M" or "25%" (of `whole_bytes`). Errors: ValueError."""
    return _core.parse_bytes(text, whole_bytes)


def format_bytes(size: int) -> str:
    """Returns a size as text for readers: "768.0 MiB"."""
    return _core.format_bytes(size)
