# SPDX-License-Identifier: Apache-2.0
"""functools.lru_cache of 30 entries."""
# /// truth
# leaks = false
# ///
import functools

import numpy as np

from watched import steps


@functools.lru_cache(maxsize=30)
def mask(length):
    return np.tri(512, dtype="uint8")


for step in steps():
    mask(step).sum()
