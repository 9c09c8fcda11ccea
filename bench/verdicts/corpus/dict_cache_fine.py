# SPDX-License-Identifier: Apache-2.0
"""A cache by length, of which there are 40."""
# /// truth
# leaks = false
# ///
import numpy as np

from watched import steps

cache = {}


def mask(key):
    if key not in cache:
        cache[key] = np.ones(12_500)
    return cache[key]


for step in steps():
    mask(step % 40).sum()
