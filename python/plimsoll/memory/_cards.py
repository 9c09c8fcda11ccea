# SPDX-License-Identifier: Apache-2.0
"""Other processes that hold memory of a GPU, as NVIDIA's driver reports them through the package nvidia-ml-py (pynvml).

Without that package nothing is imported, and no process is named.

Threads: any.   Memory: none.
"""
from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterator
from typing import Any, NamedTuple

from .._core import format_bytes

_EVERY = 2.0  # Seconds: status.json is written more often, and asking takes the driver a millisecond.
_NAMED = 3


class Others(NamedTuple):
    """Other processes that hold memory of a GPU."""

    bytes: int
    text: str
    """"2 other processes hold 5.0 GiB: python (PID 4711) 4.0 GiB, Xorg (PID 12) 1.0 GiB"; "" for none."""


class Card:
    """A GPU as NVIDIA's driver knows it."""

    def __init__(self, module: Any, index: int) -> None:
        """Identifies the GPU by its UUID. module, index: those of torch's device."""
        self._uuid = str(getattr(getattr(module, "get_device_properties", lambda _: None)(index), "uuid", ""))
        self._asked_at = -_EVERY
        self._said: Others | None = None

    def others(self) -> Others | None:
        """Returns the other processes that hold memory; the answer is at most two seconds old.

        None: unknown. The package or the driver is missing, or the driver lists this process under another PID, as in some containers.
        """
        now = time.monotonic()
        if self._uuid and now - self._asked_at >= _EVERY:
            self._said, self._asked_at = self._asked(), now
        return self._said

    def _asked(self) -> Others | None:
        try:
            import pynvml
        except ImportError:
            self._uuid = ""  # Do not try the import again.
            return None
        try:
            with _driver(pynvml):
                return self._told(pynvml)
        except pynvml.NVMLError:
            return None

    def _told(self, nvml: Any) -> Others | None:
        handle = nvml.nvmlDeviceGetHandleByUUID(self._uuid if self._uuid.startswith("GPU-") else f"GPU-{self._uuid}")
        held: dict[int, int] = {}
        for one in [*nvml.nvmlDeviceGetComputeRunningProcesses(handle), *nvml.nvmlDeviceGetGraphicsRunningProcesses(handle)]:
            held[one.pid] = max(held.get(one.pid, 0), one.usedGpuMemory or 0)  # None: the driver does not tell.
        if held.pop(os.getpid(), None) is None:
            return None
        if not held:
            return Others(0, "")
        most = sorted(held, key=lambda pid: (-held[pid], pid))[:_NAMED]
        names = ", ".join(f"{_name_of(nvml, pid)} (PID {pid}) {format_bytes(held[pid])}" for pid in most)
        count, total = len(held), sum(held.values())
        return Others(total, f"{'1 other process holds' if count == 1 else f'{count} other processes hold'} {format_bytes(total)}: {names}"
                      + (" and others" if count > len(most) else ""))


@contextlib.contextmanager
def _driver(nvml: Any) -> Iterator[None]:
    nvml.nvmlInit()
    try:
        yield
    finally:
        nvml.nvmlShutdown()


def _name_of(nvml: Any, pid: int) -> str:
    try:
        name = nvml.nvmlSystemGetProcessName(pid)
    except nvml.NVMLError:  # The process has ended, or belongs to another user.
        return "a process"
    return os.path.basename(name.decode(errors="replace") if isinstance(name, bytes) else str(name)) or "a process"
