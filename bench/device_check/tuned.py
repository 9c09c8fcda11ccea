# SPDX-License-Identifier: Apache-2.0
"""Check 7: adapters of a 7B-shaped model at 16,384 tokens, its frozen weights streamed under a limit, beside resident ones.

Both end in the same bits. Seconds are medians of steps; blocks are computed twice in both. The limit leaves room for the borders of 32
blocks (4 GiB) and one block's activations, so few blocks stay on the device.

Threads: those of the streamed weights.
Memory:  the weights once on the host, and once on disk; on the device as the limit says, and all of them for the resident run.
"""
from __future__ import annotations

import gc
import hashlib
import statistics
import tempfile
import time
from typing import Any

from bench.device_check.device import Device, plimsoll_or_not
from bench.device_check.model import SEVEN_B, TINY, Shape, block_bytes
from bench.device_check.result import CannotRun, Result, mib

SEED = 7
HOST_LIMIT, RESIDENT_LIMIT, STREAMED_LIMIT = "48GiB", "36GiB", "11GiB"
LEAST_CARD = 39 << 30
STEPS, WARM = 10, 3
BAR_RATIO, BAR_STALL = 0.9, 0.02
MIB = 1 << 20


def check(device: Device) -> Result:
    """Trains resident, then streamed."""
    return compared(device, sequences=8, length=2048, bar=BAR_RATIO)


def compared(device: Device, sequences: int, length: int, bar: float) -> Result:
    """Returns streamed beside resident training at sequences × length tokens. bar: least ratio of their speeds."""
    total = device.module.mem_get_info()[1]
    if not device.simulated and total < LEAST_CARD:
        raise CannotRun(f"the resident run takes {RESIDENT_LIMIT} of the card, which has {mib(total)}")
    shape = device.pick(SEVEN_B, TINY)
    sequences, length = device.pick((sequences, length), (2, 32))
    result = Result(0.0, "x the resident speed", bar)
    with tempfile.TemporaryDirectory() as folder:
        resident = _train(device, shape, "resident", folder, sequences, length, device.pick(RESIDENT_LIMIT, "1GiB"))
        gc.collect()  # A model is a circle.
        device.forget()
        streamed = _train(device, shape, "streamed", folder, sequences, length, device.pick(STREAMED_LIMIT, 112 * MIB))
    size = block_bytes(shape) * shape.blocks
    result.add("bits of adapters and losses, streamed and resident", "the same", "the same" if streamed["bits"] == resident["bits"] else "others",
               streamed["bits"] == resident["bits"])
    result.add("reserved at most, streamed", f"≤ {mib(streamed['limit'])}", mib(streamed["peak"]), streamed["peak"] <= streamed["limit"])
    most = 4 * size if device.simulated else size - 1  # The simulated device's pages are larger than such blocks.
    result.add("slots and blocks on the device at the end", "of some blocks", f"{mib(streamed['held'])} of {mib(size)}", 0 < streamed["held"] <= most)
    if device.simulated:
        result.value, result.unit, result.bar = float(streamed["bits"] != resident["bits"]), "runs of other bits", 0
        result.add("speed", "not on this device", "")
    else:
        ratio, stall = resident["seconds"] / streamed["seconds"], streamed["stall"] / streamed["seconds"]
        result.value = round(ratio, 3)
        result.add("steps, resident", "", f"{resident['seconds']:.3f} s")
        result.add("steps, streamed", f"≥ {bar:.2f} × resident", f"{streamed['seconds']:.3f} s: {ratio:.3f} ×", ratio >= bar)
        result.add("waits for copies to begin", f"< {BAR_STALL:.0%} of a step", f"{stall:.1%}", stall < BAR_STALL if bar >= BAR_RATIO else None)
    result.peers = {name: {key: one[key] for key in ("seconds", "stall", "peak", "held")} for name, one in
                    (("resident", resident), ("streamed", streamed))}
    return result


def _train(device: Device, shape: Shape, weights: str, folder: str, sequences: int, length: int, limit: str | int) -> dict[str, Any]:
    """Returns the digest, and figures of a run of steps in a governor of its own."""
    import torch

    from bench.device_check.model import Model

    plimsoll = plimsoll_or_not()
    host = device.pick(HOST_LIMIT, "3GiB")
    with plimsoll.Governor(host, foreign_bytes="1GiB", devices={device.name: limit}) as governor:
        torch.manual_seed(SEED)
        model = Model(shape, "cpu" if device.simulated else device.name)
        made = plimsoll.stream_frozen(model, weights=weights, directory=folder, device=device.name)
        optimizer = torch.optim.AdamW(model.trained(), lr=1e-3, fused=True)
        step = plimsoll.TrainingStep(model, optimizer)
        tokens = torch.randint(shape.vocabulary, (sequences, length)).to(device.name)
        losses, times, stalls = [], [], []
        for _ in range(WARM + STEPS):
            before, began = made.stall_seconds, time.perf_counter()
            losses.append(step(tokens, lambda ids: model(ids, recompute=weights == "resident")))
            device.module.synchronize()
            times.append(time.perf_counter() - began)
            stalls.append(made.stall_seconds - before)
        found = hashlib.sha256(repr(losses).encode())
        for one in model.trained():
            found.update(one.detach().cpu().numpy().tobytes())
        line = governor.devices[device.name]
        told = {"bits": found.hexdigest(), "seconds": statistics.median(times[WARM:]), "stall": statistics.median(stalls[WARM:]),
                "peak": line.held()["peak_bytes"], "limit": line.limit_bytes, "held": made.device_bytes}
        made.close()
        return told
