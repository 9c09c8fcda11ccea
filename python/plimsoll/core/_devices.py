# SPDX-License-Identifier: Apache-2.0
"""The devices of torch that are in use, of any kind.

Threads: any.   Memory: none.
"""
from __future__ import annotations

from typing import Any


def devices_in_use() -> dict[str, Any]:
    """Returns torch's modules of the devices in use, by kind: "cuda", "xpu", "mps" or another backend's name.

    Takes 2 µs where no device is in use.
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
    """Returns the torch.device with its number, and None for the CPU or None. Errors: ValueError naming the option."""
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
    """Returns the kind of a torch.device: "cpu", "cuda (NVIDIA H100 PCIe)". Results may differ in bits between kinds."""
    import torch

    named = getattr(getattr(torch, device.type, None), "get_device_name", None)
    return f"{device.type} ({named(device)})" if named is not None else str(device.type)


def empty_device_caches() -> None:
    """Empties the cache of each device's allocator: memory that no tensor uses goes back to the device."""
    for module in devices_in_use().values():
        if hasattr(module, "empty_cache"):
            module.empty_cache()
