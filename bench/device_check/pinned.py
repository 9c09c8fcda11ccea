# SPDX-License-Identifier: Apache-2.0
"""Pinned memory of two kinds: our own mmap, registered; and what torch allocates.

Threads: one.   Memory: as asked, of the host.
"""
from __future__ import annotations

import mmap
from typing import Any

from bench.device_check.device import Device
from bench.device_check.result import CannotRun


class Registered:
    """A tensor of bytes over an anonymous mapping of this process, registered with the card's driver.

    The simulated device has nothing to register with: there the copies that do not block take torch's pinned memory.
    """

    def __init__(self, device: Device, size: int) -> None:
        import torch

        self._device = device
        self._mapping: Any = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        self.tensor = torch.frombuffer(self._mapping, dtype=torch.uint8)
        self.tensor.fill_(1)  # Every page is there.
        self.registered = False

    def register(self) -> None:
        """Registers it. Errors: CannotRun with the driver's number."""
        import torch

        if self._device.simulated:
            self.tensor, self._mapping = self.tensor.pin_memory(), None
            return
        status = int(torch.cuda.cudart().cudaHostRegister(self.tensor.data_ptr(), self.tensor.numel(), 0))
        if status != 0:
            raise CannotRun(f"cudaHostRegister gives {status}")
        self.registered = True

    def close(self) -> None:
        """Ends the registration. The memory goes with the tensor."""
        import torch

        if self.registered:
            torch.cuda.cudart().cudaHostUnregister(self.tensor.data_ptr())
            self.registered = False
        del self.tensor


def allocated(size: int) -> Any:
    """Returns a tensor of bytes in pinned memory that torch allocated, written once."""
    import torch

    return torch.empty(1, dtype=torch.uint8).fill_(1).repeat(size).pin_memory()
