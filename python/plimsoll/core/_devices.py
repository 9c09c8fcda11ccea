# SPDX-License-Identifier: Apache-2.0
"""Torch's devices that are in use, whatever their kind.

Threads: any.   Memory: none.
"""
from __future__ import annotations

from typing import Any


def devices_in_use() -> dict[str, Any]:
    """The modules of torch's devices that are in use, by their kinds: "cuda", "xpu", "mps", a backend of others.

    2 µs where there is none.
    """
    import torch

    accelerator = torch.accelerator.current_accelerator()
    kinds = {"cuda", torch._C._get_privateuse1_backend_name()} | ({accelerator.type} if accelerator is not None else set())
    found = {}
    for kind in sorted(kinds - {"cpu", "meta"}):
        module = getattr(torch, kind, None)
        used: Any = getattr(module, "is_initialized", None) or getattr(module, "is_available", lambda: True)
        if module is not None and used():
            found[kind] = module
    return found


def numbered(device: Any, option: str) -> Any:
    """Returns the torch.device with its number; None for None and the CPU, which are no other place. Errors: ValueError naming the option."""
    import torch

    try:
        found = torch.device("cpu" if device is None else device)
    except RuntimeError as error:
        raise ValueError(f"{option}: {device!r} is no device of torch's: {str(error).splitlines()[0]}") from None
    if found.type == "cpu":
        return None
    module: Any = getattr(torch, found.type, None)
    if found.type == "meta" or module is None:
        raise ValueError(f"{option}: nothing is computed on {device!r}")
    if not module.is_available() or (found.index or 0) >= module.device_count():
        raise ValueError(f"{option}: {device!r} is not there")
    return torch.device(found.type, module.current_device() if found.index is None else found.index)


def kind_of(device: Any) -> str:
    """Returns the kind of a torch.device, on which bits depend: "cpu", "cuda (NVIDIA H100 PCIe)"."""
    import torch

    named = getattr(getattr(torch, device.type, None), "get_device_name", None)
    return f"{device.type} ({named(device)})" if named is not None else str(device.type)


def empty_device_caches() -> None:
    """Has each device in use give back the memory that its allocator keeps and no tensor has."""
    for module in devices_in_use().values():
        if hasattr(module, "empty_cache"):
            module.empty_cache()
