# SPDX-License-Identifier: Apache-2.0
"""DeviceMemory: a limit on the memory of one device, imposed by torch's allocator of that device.

Threads: as the device's allocator.   Memory: the device's context, and the workspace of its first matrix product.
"""
from __future__ import annotations

import gc
import os
from collections.abc import Iterable, Mapping
from typing import Any

from .._core import DeviceStatus, format_bytes
from ..core._arrays import byte_size
from ..core._devices import kind_of
from ..errors import BudgetExceeded
from ._cards import Card

_MIB = 1 << 20
_NEEDED = ("empty_cache", "max_memory_reserved", "mem_get_info", "memory_allocated", "memory_reserved", "reset_peak_memory_stats",
           "memory_stats", "set_per_process_memory_fraction")
_AROUND = "PLIMSOLL_DEVICE_MEMORY_LIMIT"  # Set by `plimsoll run --device-memory-limit`.
_OF_FREE = 0.95  # Default limit, as a share of the free memory.
_LEFT_OVER = 1.0 / 16  # Share of a step's peak added to it: the allocator's fragmentation varies.
_SMALL_SEGMENT, _LARGE_SEGMENT = 2 * _MIB, 20 * _MIB  # Bytes that torch's allocator reserves at once, for blocks up to 1 and 10 MiB.


_imposed: dict[Any, DeviceMemory] = {}  # The last one made for each device, which alone may lift the limit.


class DeviceMemory:
    """The limit on one device's memory, and the bytes held of it.

    The limit covers the bytes that torch's allocator has reserved, and the context: kernels, and memory that libraries take beside
    the allocator. The context is measured at construction, and includes other processes on the device then.

    Torch imposes the limit: at the limit it first frees cached memory, then raises torch.OutOfMemoryError.
    """

    def __init__(self, name: str, limit: int | str, option: str = "devices") -> None:
        """Measures the context and imposes the limit.

        name:   a device of torch, such as "cuda" or "cuda:1".
        limit:  bytes or text; "80%" is a share of the device's memory, "" is 95 % of what is free.
        option: the option's name, with which errors begin.
        Errors: ValueError for a device that is missing, or whose torch module cannot impose a limit; BudgetExceeded when
                the context and live tensors already pass the limit.
        """
        import torch

        try:
            device = torch.device(name)
        except RuntimeError as error:
            raise ValueError(f"{option}: {name!r} is no device of torch's: {str(error).splitlines()[0]}") from None
        module: Any = getattr(torch, device.type, None)
        missing = [one for one in _NEEDED if not hasattr(module, one)]
        if device.type in ("cpu", "meta") or missing:
            raise ValueError(f"{option}: no limit of {name!r} can be imposed" + (f": torch.{device.type} has no {missing[0]}()" if missing else ""))
        if not module.is_available() or (device.index or 0) >= module.device_count():
            raise ValueError(f"{option}: {name!r} is not there")
        self.name, self._option = name, option
        """The device's name, as it was given."""
        self._module = module
        self._index: int = module.current_device() if device.index is None else device.index
        self._device = torch.device(device.type, self._index)
        self._kind, self._card = kind_of(self._device), Card(module, self._index)
        square = torch.ones(8, 8, device=self._device)
        (square @ square).sum().item()  # Makes the context, and the workspace of matrix products.
        del square
        if int(module.memory_allocated(self._index)):
            gc.collect()  # Of an earlier run, whose objects may refer to each other.
        self._reset_peak()  # Cached memory is not counted.
        self._peak = 0  # Most reserved bytes before the last begin_peak().
        free, total = module.mem_get_info(self._index)
        self.context_bytes = max(0, total - free - self.reserved_bytes)
        """Bytes of the context, and of other processes."""
        self.total_bytes = total
        """Bytes of the device."""
        self.limit_bytes = (byte_size(limit, f"{option}: {name}", total) if limit != "" else
                            self.context_bytes + self.reserved_bytes + int(free * _OF_FREE))
        """The limit, in bytes."""
        self.set_limit(self.limit_bytes)
        _imposed[self._device] = self

    def set_limit(self, limit: int | str) -> None:
        """Empties torch's cache and imposes another limit. Errors: as DeviceMemory(); the limit is then unchanged."""
        size = byte_size(limit, f"{self._option}: {self.name}", self.total_bytes)
        self.begin_peak()
        if size - self.context_bytes < max(self.reserved_bytes, 1):
            least = _whole_mib(self.context_bytes + self.reserved_bytes + 2 * _MIB)
            raise self._exceeded(f"{self._option}: a limit of {format_bytes(size)} for {self.name} is less than its context of "
                                 f"{format_bytes(self.context_bytes)} and tensors that are there take: {format_bytes(least)} would do", 0, least)
        self._module.set_per_process_memory_fraction(min(1.0, (size - self.context_bytes) / self.total_bytes), self._index)
        self.limit_bytes = size

    @property
    def room_bytes(self) -> int:
        """The limit less the context: the bytes that torch's allocator may reserve."""
        return self.limit_bytes - self.context_bytes

    @property
    def reserved_bytes(self) -> int:
        """Bytes that torch's allocator has reserved, its cache included."""
        return int(self._module.memory_reserved(self._index))

    @property
    def allocated_bytes(self) -> int:
        """Bytes that live tensors take."""
        return int(self._module.memory_allocated(self._index))

    @property
    def free_bytes(self) -> int:
        """Bytes of the limit that are not held."""
        return self.room_bytes - self.reserved_bytes

    def is_of(self, device: Any) -> bool:
        """Whether `device`, a torch.device with a number, is the one limited here."""
        return bool(device == self._device)

    def begin_peak(self) -> None:
        """Empties torch's cache and begins to measure the peak that peak_bytes() returns."""
        self._peak = self._highest()
        self._reset_peak()

    def _reset_peak(self) -> None:
        self._module.empty_cache()
        self._module.reset_peak_memory_stats(self._index)

    def _highest(self) -> int:
        """Returns the most bytes that were reserved since the limit was imposed."""
        return max(self._peak, int(self._module.max_memory_reserved(self._index)))

    def peak_bytes(self) -> int:
        """Returns the most bytes reserved since begin_peak(), plus margin_bytes() for the allocator's fragmentation."""
        peak = int(self._module.max_memory_reserved(self._index))
        return peak + self.margin_bytes(peak)

    def margin_bytes(self, peak: int) -> int:
        """Returns the bytes that are promised beside a step's peak: a sixteenth of it, and at least one of the allocator's segments.

        The allocator reserves whole segments, so blocks that lie otherwise at the next step may take one more.
        """
        large = self._module.memory_stats(self._index).get("segment.large_pool.peak", 0) > 0
        return max(int(peak * _LEFT_OVER), _LARGE_SEGMENT if large else _SMALL_SEGMENT)

    def held(self) -> dict[str, int]:
        """Returns the bytes held, by name. peak_bytes is the most that context and reserved memory were together."""
        return {"limit_bytes": self.limit_bytes, "context_bytes": self.context_bytes, "allocated_bytes": self.allocated_bytes,
                "reserved_bytes": self.reserved_bytes, "peak_bytes": self.context_bytes + self._highest()}

    def status(self) -> DeviceStatus:
        """Returns the device's entry of status.json."""
        others = self._card.others()
        return DeviceStatus(self.name, self._kind, **self.held(), others_bytes=-1 if others is None else others.bytes,
                            others="" if others is None else others.text)

    def explain(self) -> str:
        """Names the holders in a sentence; other processes are named if the package nvidia-ml-py is installed."""
        reserved, allocated, others = self.reserved_bytes, self.allocated_bytes, self._card.others()
        return (f"{format_bytes(self.context_bytes + reserved)} of the {format_bytes(self.limit_bytes)} limit of {self.name} are held: tensors "
                f"{format_bytes(allocated)}, torch's cache {format_bytes(reserved - allocated)}, context {format_bytes(self.context_bytes)}"
                + (f"; {others.text}" if others is not None and others.text else ""))

    def refusal(self, text: str, needed_bytes: int | None = None) -> BudgetExceeded:
        """Makes the exception for a request that the device refused; the caller raises it.

        needed_bytes: bytes that have to be reserved for the request, from which the message names a sufficient limit. None: unknown; the
                      message names a limit to try.
        """
        limit = _whole_mib(self.limit_bytes + max(self.limit_bytes // 4, 64 * _MIB) if needed_bytes is None
                           else self.context_bytes + needed_bytes)
        text += f"; {self.explain()}; " + (f"try a limit of {limit // _MIB} MiB for {self.name}" if needed_bytes is None
                                           else f"a limit of {limit // _MIB} MiB for {self.name} would do")
        return self._exceeded(text, needed_bytes or 0, limit)

    def _exceeded(self, text: str, needed: int, least: int) -> BudgetExceeded:
        held = {"tensors": self.allocated_bytes, "cache": self.reserved_bytes - self.allocated_bytes, "context": self.context_bytes}
        return BudgetExceeded(text, self.name, needed, max(0, self.free_bytes), self.limit_bytes, held,
                              f"raise the limit of {self.name}, or make batches smaller", least)

    def close(self) -> None:
        """Lifts the limit, unless another one was imposed since."""
        if _imposed.get(self._device) is self:
            del _imposed[self._device]
            self._module.set_per_process_memory_fraction(1.0, self._index)

    def __repr__(self) -> str:
        return f"<DeviceMemory: {self.explain()}>"


def reserved_for(sizes: Iterable[int]) -> int:
    """Returns the bytes that torch's allocator reserves for blocks of these sizes, made in this order and none let go: by CUDA's rules."""
    total, left = 0, ([0], [0])  # What is left of segments: of those of small blocks, and of others.
    for size in sizes:
        size, small = max(1, -(-size // 512)) * 512, size <= _MIB
        free = left[0 if small else 1]
        fits = min((one for one in free if one >= size), default=0)
        if fits:
            free.remove(fits)
        else:
            fits = _SMALL_SEGMENT if small else _LARGE_SEGMENT if size < 10 * _MIB else -(-size // (2 * _MIB)) * 2 * _MIB
            total += fits
        if fits - size > (0 if small else _MIB):
            free.append(fits - size)
    return total


def _whole_mib(size: int) -> int:
    return -(-size // _MIB) * _MIB


def limit_around() -> str:
    """Returns the limit set by `plimsoll run --device-memory-limit` around this process; "": none."""
    return os.environ.get(_AROUND, "")


class OfRun(dict[str, int | str]):
    """The limits of Run(device_memory_limit=…), by device; errors begin with that option's name."""

    option = "device_memory_limit"


def of_accelerator(limit: int | str | Mapping[str, int | str] | None) -> OfRun:
    """Returns limits by device. limit: by device, or one for torch's accelerator; None: that of `plimsoll run`, or none.

    Errors: ValueError where torch has no accelerator.
    """
    if isinstance(limit, Mapping):
        return OfRun(limit)
    around = limit_around()
    if limit is None and not around:
        return OfRun()
    import torch

    accelerator = torch.accelerator.current_accelerator()
    if accelerator is not None:
        return OfRun({accelerator.type: around if limit is None else limit})
    if limit is None:
        return OfRun()  # The limit of `plimsoll run` has no device to apply to.
    raise ValueError(f"device_memory_limit: {limit!r} is of no device: torch {torch.__version__} has no accelerator here")


def limited(devices: Mapping[str, int | str]) -> dict[str, DeviceMemory]:
    """Imposes the limits; if one fails, lifts those already imposed. Errors: those of DeviceMemory()."""
    made: dict[str, DeviceMemory] = {}
    try:
        for name, limit in devices.items():
            made[name] = DeviceMemory(name, limit, getattr(devices, "option", "devices"))
    except BaseException:
        for one in made.values():
            one.close()
        raise
    return made
