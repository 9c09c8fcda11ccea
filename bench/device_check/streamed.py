# SPDX-License-Identifier: Apache-2.0
"""Check 4: streamed weights have the bits of resident ones through 2 and 3 slots; copies and kernels are in order.

On the simulated device its order check looks at steps, and at some with each wait left out, which it has to find. On a card torch's
sanitizer does; it sees one thread, and copies are begun by another, so what it finds there is told and no bar.

Threads: those of the streamed weights.   Memory: a tiny model.
"""
from __future__ import annotations

import contextlib
import gc
import tempfile
from collections.abc import Iterator
from typing import Any

from bench.device_check.device import Device, plimsoll_or_not
from bench.device_check.model import TINY
from bench.device_check.result import Result

SEED, STEPS = 4, 4
WAITS = {"": "", "the copy's wait for the memory": "copies wait", "the computing stream's wait for the copy": "compute waits"}


def check(device: Device) -> Result:
    """Compares bits, then leaves each wait out."""
    import torch

    torch.use_deterministic_algorithms(True)
    result = Result(0.0, "runs of other bits", 0)
    with tempfile.TemporaryDirectory() as folder:
        resident = _bits(device, folder, "resident", 2)
        for slots in (2, 3):
            same = _bits(device, folder, "streamed", slots) == resident
            result.value += not same
            result.add(f"bits through {slots} slots", "those of resident weights", "the same" if same else "others", same)
        for missing in WAITS:
            found = _found(device, folder, missing)
            holds = bool(found) == bool(missing) if device.simulated or not missing else None
            result.add(f"order, {missing} left out" if missing else "order", "found" if missing else "nothing found",
                       found or "nothing found", holds)
    return result


def _bits(device: Device, folder: str, weights: str, slots: int, steps: int = STEPS) -> list[bytes]:
    import torch

    from bench.device_check.model import Model

    plimsoll = plimsoll_or_not()
    with device.governor(device.pick("4GiB", "1GiB")):
        torch.manual_seed(SEED)
        model = Model(TINY, "cpu" if device.simulated else device.name)
        made = plimsoll.stream_frozen(model, weights=weights, slots=slots, directory=folder, device=device.name)
        optimizer = torch.optim.AdamW(model.trained(), lr=1e-3, fused=True)
        tokens = torch.randint(TINY.vocabulary, (2, 64)).to(device.name)
        losses = []
        try:
            for _ in range(steps):
                loss = model(tokens, recompute=weights == "resident")
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
                losses.append(loss.detach())
            return [one.detach().cpu().numpy().tobytes() for one in [*losses, *model.trained()]]
        finally:
            made.close()
            del model, optimizer, made
            gc.collect()
            device.forget()


def _found(device: Device, folder: str, missing: str) -> str:
    """Returns what is found in a step with a wait left out; "": nothing."""
    from tests.support.waits import left_out

    with left_out(WAITS[missing]), _watched(device, missing):
        try:
            _bits(device, folder, "streamed", 2, steps=2)
            device.module.synchronize()
        except Exception as error:
            return f"{type(error).__name__}: {str(error).splitlines()[0][:60]}"
    return ""


@contextlib.contextmanager
def _watched(device: Device, missing: str) -> Iterator[None]:
    """Inside, what nothing orders raises an error."""
    if not device.simulated:
        from torch.cuda import _sanitizer

        _sanitizer.enable_cuda_sanitizer()  # Until this process ends.
        yield
        return
    from plimsoll.training._device_ring import DeviceRing
    from tests import device as simulated

    close = DeviceRing.close

    def closed(self: Any) -> None:
        simulated.let_copies_go()  # It waits for them.
        close(self)

    # Copies end when the step has: one that is not waited for is not there in time.
    held = simulated.copies_held() if WAITS[missing] == "compute waits" else contextlib.nullcontext()
    with simulated.order_checked(), held:
        DeviceRing.close = closed  # type: ignore[method-assign]
        try:
            yield
        finally:
            DeviceRing.close = close  # type: ignore[method-assign]
