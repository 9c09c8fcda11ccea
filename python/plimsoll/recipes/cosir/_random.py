# SPDX-License-Identifier: Apache-2.0
"""Seeds of a run's uses of chance, of which no two share a random number."""
from __future__ import annotations

import enum

from ...kernels import mix64


class Purpose(enum.IntEnum):
    """Uses of a run's seed."""

    MODEL, ROWS, ORDER, SPLIT, CLASSIFIER, NOISE = range(1, 7)


def seed_for(seed: int, purpose: int) -> int:
    """Returns the seed of one use of a run's seed."""
    return mix64(seed ^ mix64(purpose))
