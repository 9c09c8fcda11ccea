# SPDX-License-Identifier: Apache-2.0
"""functools.lru_cache without a bound."""
# /// truth
# leaks = true
# owners = ["native"]
# bytes_per_step = 262144
# holder = "lru_cache|mask"
# ///
import functools

import numpy as np

from watched import steps


@functools.lru_cache(maxsize=None)
def mask(length):
    return np.tri(512, dtype="uint8")  # site


for step in steps():
    mask(step).sum()
