# SPDX-License-Identifier: Apache-2.0
"""DeviceMemory: the limit of one device's memory, imposed by torch's own allocator of the device.

Threads: as the device's allocator.   Memory: the device's context, and what its first product leaves.
"""
from __future__ import annotations

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
           "set_per_process_memory_fraction")
_AROUND = "PLIMSOLL_DEVICE_MEMORY_LIMIT"  # Of `plimsoll run --device-memory-limit`.
_OF_FREE = 0.95  # Where no limit is given.
_LEFT_OVER = 1.0 / 16  # Of a step's peak: blocks lie otherwise in the allocator from time to time.


_imposed: dict[Any, DeviceMemory] = {}  # By device: the last one made, which alone may lift the limit.


class DeviceMemory:
    """The limit of one device's memory, and how much of it is held.

    The limit covers the bytes that torch's allocator has reserved, and the context: kernels, and whatever libraries take beside
    the allocator. The context is measured when this is made; other processes on the device then count as part of it.

    Torch imposes the limit: at the limit it gives cached memory back first, then raises torch.OutOfMemoryError.
    """

    def __init__(self, name: str, limit: int | str, option: str = "devices") -> None:
        """Measures the context, and imposes the limit.

        option: what errors begin with.
        name:  a device of torch's, such as "cuda" or "cuda:1".
        limit: bytes or text, "80%" being of the device's memory; "": 95 % of what is free.
        Errors: ValueError for a device that is not there, or whose module of torch cannot impose a limit; BudgetExceeded when
                the context and what tensors hold already pass the limit.
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
        (square @ square).sum().item()  # The context is there, and the workspace of products.
        del square
        self._reset_peak()  # Nor does what torch has cached belong to anybody.
        self._peak = 0  # Of reserved bytes, before the last begin_peak().
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
        """Imposes another limit, after torch's cache was emptied. Errors: as DeviceMemory(); the limit is as before."""
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
        """The limit less the context: what torch's allocator may reserve."""
        return self.limit_bytes - self.context_bytes

    @property
    def reserved_bytes(self) -> int:
        """Bytes that torch's allocator has reserved, its cache among them."""
        return int(self._module.memory_reserved(self._index))

    @property
    def allocated_bytes(self) -> int:
        """Bytes of tensors."""
        return int(self._module.memory_allocated(self._index))

    @property
    def free_bytes(self) -> int:
        """Bytes of the limit that are not held."""
        return self.room_bytes - self.reserved_bytes

    def is_of(self, device: Any) -> bool:
        """Whether it is the memory of a torch.device that has a number."""
        return bool(device == self._device)

    def begin_peak(self) -> None:
        """Begins a measurement: peak_bytes() says what was reserved at most since."""
        self._peak = self._highest()
        self._reset_peak()

    def _reset_peak(self) -> None:
        self._module.empty_cache()
        self._module.reset_peak_memory_stats(self._index)

    def _highest(self) -> int:
        """Returns the most bytes that were reserved since the limit was imposed."""
        return max(self._peak, int(self._module.max_memory_reserved(self._index)))

    def peak_bytes(self) -> int:
        """Returns the most that was reserved since begin_peak(), with a sixteenth for blocks that lie otherwise another time."""
        peak = int(self._module.max_memory_reserved(self._index))
        return peak + int(peak * _LEFT_OVER)

    def held(self) -> dict[str, int]:
        """Returns what is held, by name. peak_bytes: the most that context and reserved memory were together."""
        return {"limit_bytes": self.limit_bytes, "context_bytes": self.context_bytes, "allocated_bytes": self.allocated_bytes,
                "reserved_bytes": self.reserved_bytes, "peak_bytes": self.context_bytes + self._highest()}

    def status(self) -> DeviceStatus:
        """Returns the line of status.json."""
        others = self._card.others()
        return DeviceStatus(self.name, self._kind, **self.held(), others_bytes=-1 if others is None else others.bytes,
                            others="" if others is None else others.text)

    def explain(self) -> str:
        """Names the holders, in a sentence; other processes, too, where the package nvidia-ml-py is installed."""
        reserved, allocated, others = self.reserved_bytes, self.allocated_bytes, self._card.others()
        return (f"{format_bytes(self.context_bytes + reserved)} of the {format_bytes(self.limit_bytes)} limit of {self.name} are held: tensors "
                f"{format_bytes(allocated)}, torch's cache {format_bytes(reserved - allocated)}, context {format_bytes(self.context_bytes)}"
                + (f"; {others.text}" if others is not None and others.text else ""))

    def refusal(self, text: str, needed_bytes: int | None = None) -> BudgetExceeded:
        """Makes the exception for something that the device refused; the caller raises it.

        needed_bytes: what has to be reserved for it, which names a limit that would do; None: the text names one to try.
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
        """Lifts the limit, if no other one was imposed since."""
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
            fits = 2 * _MIB if small else 20 * _MIB if size < 10 * _MIB else -(-size // (2 * _MIB)) * 2 * _MIB
            total += fits
        if fits - size > (0 if small else _MIB):
            free.append(fits - size)
    return total


def _whole_mib(size: int) -> int:
    return -(-size // _MIB) * _MIB


def limit_around() -> str:
    """Returns the limit of `plimsoll run --device-memory-limit` around this process; "": there is none."""
    return os.environ.get(_AROUND, "")


class OfRun(dict[str, int | str]):
    """Limits by device, as Run(device_memory_limit=…) has them: errors begin with that."""

    option = "device_memory_limit"


def of_accelerator(limit: int | str | Mapping[str, int | str] | None) -> OfRun:
    """Returns limits by device. limit: theirs; or one, which is of torch's accelerator; None: that of `plimsoll run`, or none.

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
        return OfRun()  # There is nothing that the limit of `plimsoll run` could be of.
    raise ValueError(f"device_memory_limit: {limit!r} is of no device: torch {torch.__version__} has no accelerator here")


def limited(devices: Mapping[str, int | str]) -> dict[str, DeviceMemory]:
    """Imposes the limits; lifts them again where one cannot be. Errors: those of DeviceMemory."""
    made: dict[str, DeviceMemory] = {}
    try:
        for name, limit in devices.items():
            made[name] = DeviceMemory(name, limit, getattr(devices, "option", "devices"))
    except BaseException:
        for one in made.values():
            one.close()
        raise
    return made
