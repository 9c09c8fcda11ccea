# SPDX-License-Identifier: Apache-2.0
"""Device: the card that is checked, or the simulated one (tests/device) where there is none.

Threads: one.
Memory:  the device's context; the simulated device's memory is this process's own.
"""
from __future__ import annotations

import contextlib
import dataclasses
import platform
from typing import Any

from bench.device_check.result import CannotRun

MIB = 1 << 20
SIMULATED = {"capacity": 2 << 30, "context": 96 * MIB, "fraction": 1.0}
HOST_LIMIT = {"cuda": "12GiB", "sim": "3GiB"}


@dataclasses.dataclass(frozen=True)
class Device:
    """A device of torch's, and its module."""

    name: str
    module: Any
    simulated: bool
    card: str

    def pick(self, card: Any, simulated: Any) -> Any:
        """Returns the size for this kind of device."""
        return simulated if self.simulated else card

    def governor(self, limit: int | str) -> Any:
        """Makes a plimsoll.Governor with this limit of the device."""
        return plimsoll_or_not().Governor(HOST_LIMIT[self.name], foreign_bytes="1GiB", devices={self.name: limit})

    def stream(self) -> Any:
        """Makes a stream."""
        return self.module.Stream(device=self.name)

    def on(self, stream: Any) -> contextlib.AbstractContextManager[Any]:
        """Inside, what is begun goes to `stream`."""
        return self.module.stream(stream) if hasattr(self.module, "stream") else stream

    def limit_reserved(self, size: int | None) -> None:
        """Lets torch's allocator reserve `size` bytes; None: all of the device's."""
        total = self.module.mem_get_info()[1]
        # Half a byte more: the share times the total is rounded down.
        self.module.set_per_process_memory_fraction(1.0 if size is None else min(1.0, (size + 0.5) / total))

    def forget(self) -> None:
        """Gives back what is cached, and the workspaces of products, whose caches torch keeps as tensors."""
        if not self.simulated:
            import torch

            torch._C._cuda_clearCublasWorkspaces()
        self.module.empty_cache()


def opened(name: str, needs_plimsoll: bool = True) -> Device:
    """Finds the device. Errors: CannotRun naming what is not there."""
    if name == "sim":
        plimsoll_or_not().Governor(HOST_LIMIT[name], foreign_bytes="1GiB").close()  # Before the first tensor of the device.
        from tests import device as simulated

        simulated.configure(**SIMULATED)
        import torch

        from plimsoll.memory import _pinned

        _pinned.DRIVERS[name] = simulated.host_driver
        return Device(name, torch.sim, True, f"simulated device (tests/device) on {platform.processor() or platform.machine()}")
    import torch

    if needs_plimsoll:
        plimsoll_or_not()
    if not torch.cuda.is_available():
        raise CannotRun("torch sees no card")
    return Device(name, torch.cuda, False, torch.cuda.get_device_name())


def closed(name: str) -> Device:
    """Returns the device for a check that leaves its use to processes that it forks. Errors: as opened()."""
    import torch

    try:
        import plimsoll  # Not its part for torch: that one refuses to be used in a fork of who loaded it.
    except ImportError as error:
        raise CannotRun(_not_built(error)) from error
    if not plimsoll._core.torch_version:
        raise CannotRun("plimsoll is built without torch")
    return Device(name, getattr(torch, name, None), name == "sim", name)


def plimsoll_or_not() -> Any:
    """Returns the package, with its part for torch. Errors: CannotRun saying why it is not there."""
    try:
        import torch  # noqa: F401

        import plimsoll
        from plimsoll.core import _torch_gate

        _torch_gate.load()
    except ImportError as error:
        raise CannotRun(_not_built(error)) from error
    return plimsoll


def _not_built(error: ImportError) -> str:
    return f"plimsoll is not built for this Python: {str(error).splitlines()[0]}"
