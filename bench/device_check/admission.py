# SPDX-License-Identifier: Apache-2.0
"""Check 6: what a step was admitted with before it ran covers the steps that follow, and not much more.

Threads: autograd's.   Memory: the largest of three steps, on the device.
"""
from __future__ import annotations

import gc
import tempfile
from typing import Any

from bench.device_check.device import Device, plimsoll_or_not
from bench.device_check.result import Result, mib
from bench.provenance import ROOT

STEPS = 4
SCRATCH = ROOT / "build" if (ROOT / "build").is_dir() else ROOT  # On a disk, where a step's state lies meanwhile.


def check(device: Device) -> Result:
    """Admits steps of three sizes, none of which ran before, and makes some of each."""
    result, shares = Result(0.0, "x of the promised margin", 1.0), []
    for rows in device.pick((2048, 16384, 65536), (64, 512, 2048)):
        admitted, peak, margin, refusals = _measured(device, rows)
        gc.collect()
        device.forget()
        shares.append((admitted - peak) / margin)
        holds = peak <= admitted <= peak + margin and refusals == 0
        result.add(f"a step of {rows:,} rows", "peak ≤ admitted ≤ peak + margin",
                   f"peak {mib(peak)}, admitted {mib(admitted)}, margin {mib(margin)}, {refusals} refused", holds)
    result.value = round(max(shares), 4)
    result.peers = {"least": round(min(shares), 4), "steps": STEPS}
    return result


def _measured(device: Device, rows: int) -> tuple[int, int, int, int]:
    """Returns the bytes admitted on the device, the most that the steps after it reserved, the margin of such a peak, and how many were refused."""
    with device.governor("90%") as governor, tempfile.TemporaryDirectory(prefix="plimsoll-", dir=SCRATCH) as folder:
        events: list[dict[str, Any]] = []
        step, batch, loss = _training(device, rows, folder, events)
        step.admit(batch, loss)
        line = governor.devices[device.name]
        line.begin_peak()
        for _ in range(STEPS):
            step(batch, loss)
        device.module.synchronize()
        admitted = next(one[f"{device.name}/peak_bytes"] for one in events if one["event"] == "admitted")
        peak = int(device.module.max_memory_reserved())
        return admitted, peak, line.margin_bytes(peak), step.refusals


def _training(device: Device, rows: int, folder: str, events: list[dict[str, Any]]) -> tuple[Any, Any, Any]:
    import torch
    from torch import nn

    width = device.pick(2048, 256)
    torch.manual_seed(1)
    model = nn.Sequential(*(nn.Sequential(nn.Linear(width, width), nn.GELU(), nn.Dropout(0.1)) for _ in range(4))).to(device.name)
    step = plimsoll_or_not().TrainingStep(model, torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True), directory=folder, events=events.append)
    return step, torch.randn(rows, width).to(device.name), lambda x: model(x).square().mean()
