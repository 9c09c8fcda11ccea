# SPDX-License-Identifier: Apache-2.0
"""Random numbers as pure functions of a seed: first weights, dropout masks and Gumbel noise, the same on any device.

Source: Salmon et al., "Parallel Random Numbers: As Easy as 1, 2, 3" (SC'11), Philox-4x32-10.

Threads: pure functions.   Memory: the result; of weights, _AT_ONCE values beside it.
"""
from __future__ import annotations

import enum
import math

import torch

_LOW, _WHOLE = 0xFFFFFFFF, (1 << 64) - 1
_AT_ONCE = 1 << 16


class Purpose(enum.IntEnum):
    """Uses of a run's seed; no two share a random number."""

    MODEL, ROWS, ORDER, SPLIT, CLASSIFIER, NOISE = range(1, 7)


def mix(x: int) -> int:
    """Mixes 64 bits: the end of splitmix64."""
    x = (x + 0x9E3779B97F4A7C15) & _WHOLE
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & _WHOLE
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & _WHOLE
    return x ^ (x >> 31)


def seed_for(seed: int, purpose: int) -> int:
    """Returns the seed of one use of a run's seed."""
    return mix(seed ^ mix(purpose))


def philox(seed: int, stream: torch.Tensor, counter: torch.Tensor) -> torch.Tensor:
    """Makes four random words of 32 bits for each pair of a stream and a counter.

    Shape: int64 [...], int64 [...] → int64 [..., 4].
    """
    x = [counter & _LOW, counter >> 32 & _LOW, stream & _LOW, stream >> 32 & _LOW]
    first, second = seed & _LOW, seed >> 32
    for _ in range(10):
        p, q = x[0] * 0xD2511F53, x[2] * 0xCD9E8D57
        x = [(q >> 32 & _LOW) ^ x[1] ^ first, q & _LOW, (p >> 32 & _LOW) ^ x[3] ^ second, p & _LOW]
        first, second = first + 0x9E3779B9 & _LOW, second + 0xBB67AE85 & _LOW
    return torch.stack(torch.broadcast_tensors(*x), -1)


def uniform01(words: torch.Tensor) -> torch.Tensor:
    """Makes numbers in (0, 1) of words: float32, of 23 bits each."""
    return ((words >> 9).float() + 0.5) * 2.0**-23


def _filled(shape: tuple[int, ...], seed: int, stream: int, made: type | object) -> torch.Tensor:
    count = math.prod(shape)
    out = torch.empty(count)
    for begin in range(0, count, _AT_ONCE):
        end = min(count, begin + _AT_ONCE)
        words = philox(seed, torch.tensor(stream), torch.arange(begin // 4, (end + 3) // 4))
        out[begin:end] = made(words).reshape(-1)[:end - begin]  # type: ignore[operator]
    return out.view(shape)


def uniform(shape: tuple[int, ...], width: float, seed: int, stream: int) -> torch.Tensor:
    """Makes a tensor of numbers within ±width."""
    return _filled(shape, seed, stream, lambda words: width * (2 * uniform01(words) - 1))


def normal(shape: tuple[int, ...], width: float, seed: int, stream: int) -> torch.Tensor:
    """Makes a tensor of normal numbers times width (Box and Muller, 1958). Functions are of float64, rounded."""
    def made(words: torch.Tensor) -> torch.Tensor:
        radius = (-2 * uniform01(words[:, 0::2]).double().log().float()).sqrt()
        angle = (torch.tensor(2 * math.pi) * uniform01(words[:, 1::2])).double()
        return width * torch.stack([radius * angle.cos().float(), radius * angle.sin().float()], -1)

    return _filled(shape, seed, stream, made)
