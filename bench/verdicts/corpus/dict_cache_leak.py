# SPDX-License-Identifier: Apache-2.0
"""A cache by step, which never sees a key twice."""
# /// truth
# leaks = true
# owners = ["native"]
# bytes_per_step = 100000
# holder = "cache"
# ///
import numpy as np

from watched import steps

cache = {}


def mask(key):
    if key not in cache:
        cache[key] = np.ones(12_500)  # site
    return cache[key]


for step in steps():
    mask(step).sum()
