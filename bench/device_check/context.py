# SPDX-License-Identifier: Apache-2.0
"""Check 2: the bytes of a context and of workspaces, on the device and on the host, and which pinned memory our meter sees.

Threads: two, one after another.   Memory: the context; some hundred MiB of the host.
"""
from __future__ import annotations

import concurrent.futures
import gc
from typing import Any

from bench.device_check.device import MIB, SIMULATED, Device, plimsoll_or_not
from bench.device_check.pinned import Registered, allocated
from bench.device_check.result import Result, mib

CONTEXT_LEAST, CONTEXT_MOST = 450 * MIB, 650 * MIB
WORKSPACE_MOST = 64 * MIB


def check(device: Device) -> Result:
    """Measures a context, workspaces of two threads, and pinned memory of two kinds."""
    before = _host()
    governor = device.governor("90%")
    context = governor.devices[device.name].context_bytes
    after = _host()
    result = Result(round(context / MIB, 1), "MiB of context", round(CONTEXT_MOST / MIB))
    if device.simulated:
        result.add("context", mib(SIMULATED["context"]), mib(context), context == SIMULATED["context"])
    else:
        result.add("context", f"{CONTEXT_LEAST // MIB} to {CONTEXT_MOST // MIB} MiB", mib(context), CONTEXT_LEAST <= context <= CONTEXT_MOST)
    result.add("the host's bytes of it", "", f"{mib(after['meter'] - before['meter'])} by the meter, {mib(after['Rss'] - before['Rss'])} by smaps_rollup")
    workspaces = _workspaces(device)
    for at, size in enumerate(workspaces):
        result.add(f"workspace of a product, thread {at + 1}", device.pick("32 MiB, at most 64", "0.0 MiB"), mib(size),
                   size <= device.pick(WORKSPACE_MOST, 0))
    governor.close()
    device.forget()
    size = device.pick(256, 32) * MIB
    mapped, own = _seen_of(size, lambda: _registered(device, size))
    given = _seen_of(size, lambda: allocated(size))[0]
    result.add("mapped and registered memory in our meter", "seen", _told(mapped, size), mapped["meter"] >= 0.95 * size)
    result.add("torch's pinned memory in our meter", "to be found out", _told(given, size))
    own.close()
    result.peers = {"context_mib": round(context / MIB, 1), "host_mib": round((after["meter"] - before["meter"]) / MIB, 1),
                    "workspace_mib": [round(one / MIB, 1) for one in workspaces], "registered_seen": round(mapped["meter"] / size, 3),
                    "allocated_seen": round(given["meter"] / size, 3)}
    return result


def _host() -> dict[str, int]:
    """Returns this process's resident bytes, by plimsoll's meter and by the kernel's."""
    with open("/proc/self/smaps_rollup", encoding="ascii") as lines:
        rss = next(int(line.split()[1]) << 10 for line in lines if line.startswith("Rss:"))
    return {"meter": plimsoll_or_not()._core.resident().total, "Rss": rss}


def _seen_of(size: int, make: Any) -> tuple[dict[str, int], Any]:
    """Returns how many bytes more the meters see, and what was made."""
    gc.collect()
    before = _host()
    made = make()
    after = _host()
    return {name: after[name] - before[name] for name in before}, made


def _registered(device: Device, size: int) -> Registered:
    made = Registered(device, size)
    made.register()
    return made


def _told(more: dict[str, int], size: int) -> str:
    return f"{'seen' if more['meter'] >= 0.95 * size else 'not seen'}: {mib(more['meter'])} of {mib(size)}, smaps_rollup {mib(more['Rss'])}"


def _workspaces(device: Device) -> list[int]:
    """Returns what torch's allocator reserves for the first product of this thread, and of a second one."""
    import torch

    a, b, out = (torch.ones(512, 512, dtype=torch.float32, device=device.name) for _ in range(3))

    def product() -> int:
        torch.mm(a, b, out=out)
        device.module.synchronize()
        return int(device.module.memory_reserved())

    device.forget()
    reserved = [int(device.module.memory_reserved()), product()]
    with concurrent.futures.ThreadPoolExecutor(1) as other:
        reserved.append(other.submit(product).result())
    return [after - before for before, after in zip(reserved, reserved[1:])]
