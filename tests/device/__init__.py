# SPDX-License-Identifier: Apache-2.0
"""A device that is not there, for tests on machines without a GPU: a backend of torch, "sim", whose kernels are the CPU's.

    from tests import device
    device.configure(capacity=256 << 20)
    torch.ones(3, device="sim")

Same bits as the CPU; memory that ends, with CUDA's rules; streams, and every access to memory checked against their order.
Torch has one such device until the process ends, so tests that import this run in processes of their own: tests/device/check_*.py
are files of pytest, run by tests/python/test_device_checks.py.

Reading order: memory.h, streams.h, call_tensors.h, kernels.h, backend.h; README.md has what it cannot.
Threads: any.
Memory:  what tensors of the device take; it is the process's own, so foreign_bytes of a Governor covers it. The first Governor
         comes before the first tensor of the device: both stand before torch's allocator of the CPU, this one in front.
"""
from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from typing import Any

import torch

torch.utils.rename_privateuse1_backend("sim")

import plimsoll_simulated_device as _sim  # Built beside the package: PYTHONPATH=build/dev/python.

MIB, FOR_EVER = 1 << 20, 1 << 60
DEFAULTS = {"capacity": 1 << 30, "context": 0, "fraction": 1.0, "exact": False, "poison": True}
_settings: dict[int, dict[str, Any]] = {}


def configure(device: int = 0, **changed: Any) -> None:
    """Sets what a device has. Without a name it stays as it was.

    capacity, context: bytes, and those of them that nobody can have.
    fraction: the share of the capacity that may be reserved.
    exact: a segment of its own size for each block, instead of the rules of CUDA's caching allocator.
    poison: memory is NaN until it is written.
    """
    if unknown := set(changed) - set(DEFAULTS):
        raise TypeError(f"configure: {unknown}")
    now = _settings.setdefault(device, dict(DEFAULTS))
    now.update(changed)
    _sim.settings(device, *(now[name] for name in DEFAULTS))


def host_driver() -> tuple[int, int]:
    """Returns the addresses of C functions that make host memory pinned (data, size, flags), and no longer (data)."""
    return _sim.host_driver()


@contextlib.contextmanager
def refusing(allocation: int, count: int = 1) -> Iterator[None]:
    """Inside, device 0 refuses `count` allocations; the first of all is 0. count: FOR_EVER, all that follow."""
    _sim.refuse_after(0, allocation, count)
    try:
        yield
    finally:
        _sim.refuse_after(0, 0, 0)


@contextlib.contextmanager
def order_checked() -> Iterator[None]:
    """Inside, an access that nothing orders after what it must follow raises RuntimeError, which names both operators."""
    torch.accelerator.synchronize()
    _sim.check_order(True)
    try:
        yield
    finally:
        _sim.check_order(False)


@contextlib.contextmanager
def kernels_late() -> Iterator[None]:
    """Inside, kernels run in their stream's thread, where torch knows beforehand what they make."""
    _sim.run_ahead(True)
    try:
        yield
    finally:
        _sim.run_ahead(False)
        torch.accelerator.synchronize()


@contextlib.contextmanager
def copies_held() -> Iterator[None]:
    """Inside, copies that do not block wait for open_gates(), and for the end."""
    _sim.hold_copies(True)
    try:
        yield
    finally:
        let_copies_go()


def let_copies_go() -> None:
    """Ends copies_held()."""
    _sim.hold_copies(False)
    _sim.open_gates()


set_device_count, hold_stream, open_gates = _sim.set_device_count, _sim.hold_stream, _sim.open_gates
Rules = _sim.Rules  # Of src/plan/device_allocator.h: Rules(limit) with allocate(bytes), free(block), statistics().


# ---- torch.sim: what torch and libraries look for in a device's module ----

_initialized = True  # Else torch.utils.checkpoint does not put its random numbers back.


def is_available() -> bool:
    return True


def is_initialized() -> bool:
    return True


def _lazy_init() -> None:
    pass


def _is_in_bad_fork() -> bool:
    return False


def device_count() -> int:
    return int(_sim.device_count())


def current_device() -> int:
    return int(_sim.exchange_device(-1))


def get_device_name(device: Any = None) -> str:
    return "simulated"


def set_device(device: Any) -> None:
    _sim.exchange_device(_index(device))


def _index(device: Any = None) -> int:
    if isinstance(device, int):
        return device
    index = None if device is None else torch.device(device).index
    return current_device() if index is None else index


class device:
    """The device meanwhile."""

    def __init__(self, device: Any) -> None:
        self.idx = _index(device)

    def __enter__(self) -> None:
        self._before = _sim.exchange_device(self.idx)

    def __exit__(self, *_: object) -> None:
        _sim.exchange_device(self._before)


def _exchange_device(index: int) -> int:
    return int(_sim.exchange_device(index))


_maybe_exchange_device = _exchange_device


def get_rng_state(device: Any = None) -> torch.Tensor:
    return _sim.default_generator(_index(device)).get_state()


def set_rng_state(state: torch.Tensor, device: Any = None) -> None:
    _sim.default_generator(_index(device)).set_state(state)


def get_rng_state_all() -> list[torch.Tensor]:
    return [get_rng_state(index) for index in range(device_count())]


def set_rng_state_all(states: list[torch.Tensor]) -> None:
    for index, state in enumerate(states):
        set_rng_state(state, index)


def manual_seed_all(seed: int) -> None:
    for index in range(device_count()):
        _sim.default_generator(index).manual_seed(seed)


manual_seed = manual_seed_all


def get_amp_supported_dtype() -> list[torch.dtype]:
    return [torch.bfloat16, torch.float16, torch.float32]


def is_bf16_supported(including_emulation: bool = True) -> bool:
    return True


def mem_get_info(device: Any = None) -> tuple[int, int]:
    return torch.accelerator.get_memory_info(_index(device))


def set_per_process_memory_fraction(fraction: float, device: Any = None) -> None:
    configure(_index(device), fraction=fraction)


class cudart:
    """As torch.cuda.cudart() has it; 712 and 713 are CUDA's numbers for memory that is registered already, and that is not."""

    @staticmethod
    def cudaHostRegister(address: int, size: int, flags: int) -> int:
        return 0 if _sim.register_pinned(address, size) else 712

    @staticmethod
    def cudaHostUnregister(address: int) -> int:
        return 0 if _sim.unregister_pinned(address) else 713


Stream, Event = torch.Stream, torch.Event
synchronize, current_stream, set_stream = torch.accelerator.synchronize, torch.accelerator.current_stream, torch.accelerator.set_stream
empty_cache, memory_stats = torch.accelerator.empty_cache, torch.accelerator.memory_stats
memory_allocated, max_memory_allocated = torch.accelerator.memory_allocated, torch.accelerator.max_memory_allocated
memory_reserved, max_memory_reserved = torch.accelerator.memory_reserved, torch.accelerator.max_memory_reserved
reset_peak_memory_stats = torch.accelerator.reset_peak_memory_stats

torch._register_device_module("sim", sys.modules[__name__])
torch.utils.generate_methods_for_privateuse1_backend(for_tensor=True, for_module=True, for_storage=True)
