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
from collections.abc import Callable, Iterator
from typing import Any

from bench.device_check.device import Device, plimsoll_or_not
from bench.device_check.model import TINY
from bench.device_check.result import Result

SEED, STEPS = 4, 4


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
        for missing in ("", "the copy's wait for the memory", "the computing stream's wait for the copy"):
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
    with _left_out(device, missing), _watched(device, missing) as found:
        try:
            _bits(device, folder, "streamed", 2, steps=2)
            device.module.synchronize()
        except Exception as error:
            return f"{type(error).__name__}: {str(error).splitlines()[0][:60]}"
    return found[0] if found else ""


def _copies_end(device: Device) -> Callable[[], None]:
    """Returns what ends _watched()'s holding of copies."""
    if not device.simulated:
        return lambda: None
    from tests import device as simulated

    return simulated.let_copies_go


@contextlib.contextmanager
def _left_out(device: Device, missing: str) -> Iterator[None]:
    """Inside, streamed weights go without a wait. A ring that is closed waits for its copies, so they are let go."""
    from plimsoll.memory._pinned import CopyStream
    from plimsoll.training._device_ring import DeviceRing

    before, compute, close = CopyStream.__init__, CopyStream.compute, DeviceRing.close

    let_go = _copies_end(device)

    def made(self: Any, *arguments: Any) -> None:
        before(self, *arguments)
        self._stream = _Unordered(self._stream)

    if missing.startswith("the copy"):
        CopyStream.__init__ = made  # type: ignore[method-assign]
    elif missing:
        CopyStream.compute = lambda self: _Unordered(compute(self))  # type: ignore[method-assign, assignment, return-value]
        DeviceRing.close = lambda self: (let_go(), close(self))[1]  # type: ignore[method-assign, assignment]
    try:
        yield
    finally:
        CopyStream.__init__, CopyStream.compute, DeviceRing.close = before, compute, close  # type: ignore[method-assign]


class _Unordered:
    """A stream that does not wait where it is told to."""

    def __init__(self, stream: Any) -> None:
        self._stream = stream

    def wait_event(self, event: Any) -> None:
        pass

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def __enter__(self) -> Any:
        return self._stream.__enter__()

    def __exit__(self, *what: object) -> Any:
        return self._stream.__exit__(*what)


@contextlib.contextmanager
def _watched(device: Device, missing: str) -> Iterator[list[str]]:
    """Yields a list of what was found without an error being raised."""
    if device.simulated:
        from tests import device as simulated

        # Copies end when the step has: one that is not waited for is not there in time.
        with simulated.order_checked(), simulated.copies_held() if missing.startswith("the computing") else contextlib.nullcontext():
            yield []
        return
    from torch.cuda import _sanitizer

    _sanitizer.enable_cuda_sanitizer()  # Until this process ends; it raises where it finds a race.
    yield []
