# SPDX-License-Identifier: Apache-2.0
"""Random numbers that are functions of (seed, stream, index): first weights of models, and seeds of steps.

Source: Salmon et al., "Parallel Random Numbers: As Easy as 1, 2, 3" (SC'11), Philox-4x32-10.
"""
from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

_WORD = (1 << 64) - 1
_PART = 1 << 18  # Blocks at once: a few megabytes of words.


def mix64(value: int) -> int:
    """Mixes the bits of a number from 0 to 2^64 − 1, to make one seed of another (splitmix64's finalizer)."""
    value = (value + 0x9E3779B97F4A7C15) & _WORD
    value = (value ^ (value >> 30)) * 0xBF58476D1CE4E5B9 & _WORD
    value = (value ^ (value >> 27)) * 0x94D049BB133111EB & _WORD
    return value ^ (value >> 31)


def philox(seed: int, stream: int, counters: np.ndarray) -> np.ndarray:
    """Computes four random words of 32 bits for each counter.

    seed, stream: numbers from 0 to 2^64 − 1. counters: uint64 [n].
    Returns: uint32 [n, 4]; a row is a function of (seed, stream, counter) alone.
    """
    low = np.uint64(0xFFFFFFFF)
    half = np.uint64(32)
    counters = np.asarray(counters, np.uint64)
    first, second = counters & low, counters >> half
    third, fourth = (np.full_like(counters, word) for word in (stream & 0xFFFFFFFF, stream >> 32))
    key, other = seed & 0xFFFFFFFF, seed >> 32
    for _ in range(10):
        one, two = first * np.uint64(0xD2511F53), third * np.uint64(0xCD9E8D57)
        first, third = (two >> half) ^ second ^ np.uint64(key), (one >> half) ^ fourth ^ np.uint64(other)
        second, fourth = two & low, one & low
        key, other = (key + 0x9E3779B9) & 0xFFFFFFFF, (other + 0xBB67AE85) & 0xFFFFFFFF
    return np.stack([first, second, third, fourth], 1).astype(np.uint32)


def random_uniform(shape: Sequence[int], width: float, seed: int, stream: int) -> torch.Tensor:
    """Draws float32 values between −width and width; each is a function of (seed, stream, index)."""
    values = np.empty(int(np.prod(shape, dtype=np.int64)), np.float32)
    for begin in range(0, len(values), 4 * _PART):
        end = min(begin + 4 * _PART, len(values))
        words = philox(seed, stream, np.arange(begin // 4, (end + 3) // 4, dtype=np.uint64)).reshape(-1)[:end - begin]
        halves = ((words >> np.uint32(9)).astype(np.float32) + np.float32(0.5)) * np.float32(2.0 ** -23)
        values[begin:end] = np.float32(width) * (np.float32(2) * halves - np.float32(1))
    return torch.from_numpy(values).reshape(tuple(shape))


def random_normal(shape: Sequence[int], deviation: float, seed: int, stream: int) -> torch.Tensor:
    """Draws float32 values from N(0, deviation²); each is a function of (seed, stream, index)."""
    zeros = torch.zeros(tuple(shape))
    signed = [one - (1 << 64) if one >> 63 else one for one in (seed, stream)]
    return torch.ops.plimsoll.sample_normal(zeros, zeros, *signed).mul_(deviation)
