# SPDX-License-Identifier: Apache-2.0
"""Check 9: plimsoll.linear_cross_entropy() on the device beside torch's linear and cross_entropy: answer, time, memory.

Threads: autograd's.   Memory: torch's logits and their gradient, on the device.
"""
from __future__ import annotations

import statistics
import time
from typing import Any

from bench.device_check.device import Device, plimsoll_or_not
from bench.device_check.result import Result, mib

BAR_SPEED, BAR_MEMORY = 1.0, 1 / 8
PAIRS = 5
VARIANTS = ((32, 512), (128, 512), (128, 2048))  # MiB of a block, tokens of a chunk: what a card may want, beside a processor's 4 and 512.


def check(device: Device) -> Result:
    """Compares loss and gradients with float64's, then times both in turns."""
    result = Result(0.0, "x torch's speed", BAR_SPEED)
    ours, theirs = _errors(device, result)
    tokens, vocabulary, features = device.pick((8192, 128_256, 4096), (1024, 20_000, 16))
    given = _inputs(device, tokens, vocabulary, features, drawn_on=device.name)
    pairs = [(_measured(device, _chunked, *given), _measured(device, _plain, *given)) for _ in range(device.pick(PAIRS + 1, 1))][-PAIRS:]
    seconds = [statistics.median(pair[side][0] for pair in pairs) for side in (0, 1)]
    peaks = [max(pair[side][1] for pair in pairs) for side in (0, 1)]
    speed, memory = seconds[1] / seconds[0], peaks[0] / peaks[1]
    result.value = round(speed, 3)
    if device.simulated:
        result.value, result.unit, result.bar = round(memory, 4), "x torch's memory", BAR_MEMORY
    result.add("speed, forward and backward", device.pick(f"≥ {BAR_SPEED:.2f} of torch's", "not on this device"),
               f"{speed:.2f}: {seconds[0] * 1e3:.1f} ms, torch's {seconds[1] * 1e3:.1f}", device.pick(speed >= BAR_SPEED, None))
    result.add("memory beside inputs", "≤ 1/8 of torch's", f"1/{1 / memory:.1f}: {mib(peaks[0])}, torch's {mib(peaks[1])}", memory <= BAR_MEMORY)
    for block, chunk in VARIANTS:
        result.add(f"speed with blocks of {block} MiB, {chunk} tokens a chunk", "", _speed_of(device, given, seconds[1], block, chunk))
    result.peers = {"speed": round(speed, 3), "peak_ratio": round(memory, 4), "ms": round(seconds[0] * 1e3, 2), "plain_ms": round(seconds[1] * 1e3, 2),
                    "peak_mib": round(peaks[0] / 2**20, 1), "plain_peak_mib": round(peaks[1] / 2**20, 1), "tokens": tokens,
                    "vocabulary": vocabulary, "features": features, "error_of_gradient": float(f"{ours:.3g}"),
                    "plain_error_of_gradient": float(f"{theirs:.3g}")}
    return result


def _speed_of(device: Device, given: tuple[Any, Any, Any], plain_seconds: float, block: int, chunk: int) -> str:
    """Returns how fast our function would be with other sizes, as text. The block is a constant of its module."""
    from plimsoll.training import _cross_entropy

    before = _cross_entropy._BLOCK_BYTES
    _cross_entropy._BLOCK_BYTES = block << 20
    try:
        found = [_measured(device, lambda *one: plimsoll_or_not().linear_cross_entropy(*one, chunk=chunk), *given) for _ in range(device.pick(3, 1))]
    finally:
        _cross_entropy._BLOCK_BYTES = before
    seconds, peak = min(one[0] for one in found), max(one[1] for one in found)
    return f"{plain_seconds / seconds:.2f}: {seconds * 1e3:.1f} ms, {mib(peak)}"


def _chunked(hidden: Any, weight: Any, labels: Any) -> Any:
    return plimsoll_or_not().linear_cross_entropy(hidden, weight, labels)


def _plain(hidden: Any, weight: Any, labels: Any) -> Any:
    from torch.nn import functional

    return functional.cross_entropy(functional.linear(hidden, weight).float(), labels)


def _inputs(device: Device, tokens: int, vocabulary: int, features: int, where: str = "", drawn_on: str = "cpu") -> tuple[Any, Any, Any]:
    """Makes hidden states and a frozen head of bfloat16, and labels; drawn on the CPU they are the same everywhere."""
    import torch

    generator = torch.Generator(drawn_on).manual_seed(1)
    options: dict[str, Any] = {"generator": generator, "device": drawn_on}
    hidden = torch.randn(tokens, features, **options).to(torch.bfloat16)
    weight = (torch.randn(vocabulary, features, **options) * 0.03).to(torch.bfloat16)
    labels = torch.randint(vocabulary, (tokens,), **options)
    return hidden.to(where or device.name).requires_grad_(), weight.to(where or device.name), labels.to(where or device.name)


def _answer(loss_of: Any, given: tuple[Any, Any, Any]) -> tuple[Any, Any]:
    given[0].grad = None
    loss = loss_of(*given)
    loss.backward()
    return loss.detach().cpu(), given[0].grad.cpu()


def _errors(device: Device, result: Result) -> tuple[float, float]:
    """Adds lines about the answer; returns how far both gradients are off float64's, relative to it."""
    import torch

    sizes = 640, 20_000, 64
    given = _inputs(device, *sizes)
    exact = _answer(_plain_wide, tuple(one.detach().double().requires_grad_() if at == 0 else one.double() if at == 1 else one
                                       for at, one in enumerate(_inputs(device, *sizes, where="cpu"))))
    found = [_answer(one, given) for one in (_chunked, _plain)]
    off = [[float((got.double() - true).norm() / true.norm()) for got, true in zip(one, exact)] for one in found]
    for at, what in enumerate(("loss", "gradient")):
        result.add(f"{what}, off float64's", "≤ 1.5 of torch's error", f"{off[0][at]:.2g}, torch's {off[1][at]:.2g}",
                   off[0][at] <= 1.5 * off[1][at] + 1e-6)
    if device.simulated:
        same = all(map(torch.equal, found[0], _answer(_chunked, _inputs(device, *sizes, where="cpu"))))
        result.add("loss and gradient beside the CPU's", "the same bits", "the same bits" if same else "other bits", same)
    return off[0][1], off[1][1]


def _plain_wide(hidden: Any, weight: Any, labels: Any) -> Any:
    from torch.nn import functional

    return functional.cross_entropy(functional.linear(hidden, weight), labels)


def _measured(device: Device, loss_of: Any, hidden: Any, weight: Any, labels: Any) -> tuple[float, int]:
    """Returns the seconds of forward and backward, and the bytes that they took at their peak beside what was there."""
    hidden.grad = None
    device.module.synchronize()
    device.module.empty_cache()
    device.module.reset_peak_memory_stats()
    before, began = device.module.memory_allocated(), time.perf_counter()
    loss_of(hidden, weight, labels).backward()
    device.module.synchronize()
    return time.perf_counter() - began, device.module.max_memory_allocated() - before
