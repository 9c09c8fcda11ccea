# SPDX-License-Identifier: Apache-2.0
"""Check 3: copies between registered memory and the device, each way, both at once, and beside a matrix product.

The size is that of a block of a 7B model in bfloat16 (hidden 4,096, feed-forward 11,008). On the simulated device the bytes count alone.

Threads: one; two streams.   Memory: two such blocks on the host, two and a product's matrices on the device.
"""
from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

from bench.device_check.device import Device
from bench.device_check.pinned import Registered
from bench.device_check.result import Result

BLOCK_BYTES = 404_750_336
BAR_ONE_WAY, BAR_BOTH, BAR_SLOWER = 50.0, 80.0, 0.03
COPIES, PRODUCTS, PAIRS = 20, 100, 5
PRODUCT = 8192  # Rows and columns.


def check(device: Device) -> Result:
    """Compares the bytes, then measures."""
    import torch

    size = device.pick(BLOCK_BYTES, 6 << 20)
    hosts = [Registered(device, size) for _ in range(2)]
    for one in hosts:
        one.register()
    result = Result(0.0, "GB/s from the host", BAR_ONE_WAY)
    try:
        ours = _Copies(device, hosts, torch.empty(size, dtype=torch.uint8, device=device.name), torch.empty(size, dtype=torch.uint8, device=device.name))
        wrong = _bytes_that_differ(ours, result)
        if device.simulated:
            result.value, result.unit, result.bar = wrong, "bytes that differ", 0
            result.add("speed", "not on this device", "")
        else:
            _measure(ours, result, size)
        result.peers["bytes"] = size
        del ours
    finally:
        device.module.synchronize()
        for one in hosts:
            one.close()
    return result


class _Copies:
    """Two host buffers, two buffers of the device, two streams: one goes up, one comes down."""

    def __init__(self, device: Device, hosts: list[Registered], above: Any, below: Any) -> None:
        self.device, self._hosts, self._above, self._below = device, hosts, above, below
        self.streams = device.stream(), device.stream()

    def up(self) -> None:
        """Begins a copy to the device."""
        with self.device.on(self.streams[0]):
            self._above.copy_(self._hosts[0].tensor, non_blocking=True)

    def down(self) -> None:
        """Begins a copy from the device."""
        with self.device.on(self.streams[1]):
            self._hosts[1].tensor.copy_(self._below, non_blocking=True)

    def seconds(self, *calls: Callable[[], None]) -> float:
        """Returns the seconds of the calls together, each made as often as the others."""
        self.device.module.synchronize()
        began = time.perf_counter()
        for _ in range(COPIES):
            for call in calls:
                call()
        self.device.module.synchronize()
        return (time.perf_counter() - began) / COPIES

    def round_trip(self) -> tuple[Any, Any]:
        """Copies random bytes up, across and down; returns both ends."""
        import torch

        first, last = (one.tensor for one in self._hosts)
        first.copy_(torch.randint(0, 256, first.shape, dtype=torch.uint8, generator=torch.Generator().manual_seed(3)))
        compute = self.device.module.current_stream()
        for one in self.streams:  # The device's buffers were made on the stream that computes.
            one.wait_event(compute.record_event())
        self.up()
        self.streams[1].wait_event(self.streams[0].record_event())
        with self.device.on(self.streams[1]):
            self._below.copy_(self._above)
        self.down()
        self.device.module.synchronize()
        return first, last


def _bytes_that_differ(ours: _Copies, result: Result) -> int:
    first, last = ours.round_trip()
    wrong = int((first != last).sum())
    result.add("bytes that differ after a copy there and back", "0", f"{wrong:,} of {len(first):,}", wrong == 0)
    return wrong


def _measure(ours: _Copies, result: Result, size: int) -> None:
    ours.seconds(ours.up, ours.down)  # Both engines have run.
    up, down, both = (max(size * len(calls) / ours.seconds(*calls) / 1e9 for _ in range(3))
                      for calls in ((ours.up,), (ours.down,), (ours.up, ours.down)))
    slower, product = _slower(ours)
    result.value = round(up, 2)
    result.add("host to device", f"≥ {BAR_ONE_WAY:.0f} GB/s", f"{up:.1f} GB/s", up >= BAR_ONE_WAY)
    result.add("device to host", f"≥ {BAR_ONE_WAY:.0f} GB/s", f"{down:.1f} GB/s", down >= BAR_ONE_WAY)
    result.add("both at once", f"≥ {BAR_BOTH:.0f} GB/s", f"{both:.1f} GB/s", both >= BAR_BOTH)
    result.add("a matrix product beside copies", f"≤ {BAR_SLOWER:.0%} slower", f"{slower:+.1%}", slower <= BAR_SLOWER)
    result.peers.update({"up_gb_s": round(up, 2), "down_gb_s": round(down, 2), "both_gb_s": round(both, 2), "product_slower": round(slower, 4),
                         "product_tflops": round(2 * ours.device.pick(PRODUCT, 64)**3 / product / 1e12, 1)})


def _slower(ours: _Copies) -> tuple[float, float]:
    """Returns by how much a matrix product is slower while blocks are copied up, and its seconds alone."""
    import torch

    device, size = ours.device, ours.device.pick(PRODUCT, 64)
    a, b = (torch.randn(size, size, device=device.name).to(torch.bfloat16) for _ in range(2))
    out = torch.empty_like(a)

    def seconds(copies: int) -> float:
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        device.module.synchronize()
        for _ in range(copies):
            ours.up()
        begin.record()
        for _ in range(PRODUCTS):
            torch.mm(a, b, out=out)
        end.record()
        device.module.synchronize()
        return begin.elapsed_time(end) / 1e3 / PRODUCTS

    alone = seconds(0)
    # As many copies as last longer than the products, or the last products would be alone.
    enough = 1 + int(1.5 * alone * PRODUCTS / ours.seconds(ours.up))
    pairs = [(seconds(0), seconds(enough)) for _ in range(PAIRS)]
    return statistics.median(beside / one for one, beside in pairs) - 1, statistics.median(one for one, _ in pairs)
