# SPDX-License-Identifier: Apache-2.0
"""Random numbers that are functions of (seed, stream, index): first weights of models, masks, and seeds of steps.

Source: Salmon et al., "Parallel Random Numbers: As Easy as 1, 2, 3" (SC'11), Philox-4x32-10.
"""
from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

_LOW, _WORD = 0xFFFFFFFF, (1 << 64) - 1
_PART = 1 << 18  # Blocks at once: some tens of megabytes of words.


def mix64(value: int) -> int:
    """Mixes the bits of a number from 0 to 2^64 − 1, to make one seed of another (splitmix64's finalizer)."""
    value = (value + 0x9E3779B97F4A7C15) & _WORD
    value = (value ^ (value >> 30)) * 0xBF58476D1CE4E5B9 & _WORD
    value = (value ^ (value >> 27)) * 0x94D049BB133111EB & _WORD
    return value ^ (value >> 31)


def philox(seed: int, streams: torch.Tensor | int, counters: torch.Tensor | int) -> torch.Tensor:
    """Computes four random words of 32 bits for each pair of a stream and a counter.

    seed: from 0 to 2^64 − 1. streams, counters: int64 tensors on one device, which broadcast, or numbers from 0 to 2^64 − 1.
    A tensor's negative numbers count as 2^64 more.
    Returns: int64 [..., 4]; four words are a function of (seed, stream, counter) alone.
    """
    device = next((one.device for one in (streams, counters) if isinstance(one, torch.Tensor)), None)
    stream, counter = (one if isinstance(one, torch.Tensor) else torch.tensor(_signed(one), device=device) for one in (streams, counters))
    x = [counter & _LOW, counter >> 32 & _LOW, stream & _LOW, stream >> 32 & _LOW]
    key, other = seed & _LOW, seed >> 32
    for _ in range(10):
        one, two = x[0] * 0xD2511F53, x[2] * 0xCD9E8D57
        x = [(two >> 32 & _LOW) ^ x[1] ^ key, two & _LOW, (one >> 32 & _LOW) ^ x[3] ^ other, one & _LOW]
        key, other = (key + 0x9E3779B9) & _LOW, (other + 0xBB67AE85) & _LOW
    return torch.stack(torch.broadcast_tensors(*x), -1)


def _signed(value: int) -> int:
    return value - (1 << 64) if value >> 63 else value


def uniform_of(words: torch.Tensor) -> torch.Tensor:
    """Turns random words of 32 bits into float32 values between 0 and 1, without these, of 23 bits each."""
    return ((words >> 9).float() + 0.5) * 2.0**-23


def random_uniform(shape: Sequence[int], width: float, seed: int, stream: int) -> torch.Tensor:
    """Draws float32 values between −width and width; each is a function of (seed, stream, index)."""
    values = torch.empty(int(np.prod(shape, dtype=np.int64)))
    for begin in range(0, len(values), 4 * _PART):
        end = min(begin + 4 * _PART, len(values))
        words = philox(seed, stream, torch.arange(begin // 4, (end + 3) // 4)).flatten()[:end - begin]
        values[begin:end] = width * (2 * uniform_of(words) - 1)
    return values.reshape(tuple(shape))


def random_normal(shape: Sequence[int], deviation: float, seed: int, stream: int) -> torch.Tensor:
    """Draws float32 values from N(0, deviation²); each is a function of (seed, stream, index)."""
    zeros = torch.zeros(tuple(shape))
    return torch.ops.plimsoll.sample_normal(zeros, zeros, _signed(seed), _signed(stream)).mul_(deviation)
