# SPDX-License-Identifier: Apache-2.0
"""A cache that is emptied after each epoch of 30 steps, but for a third of it."""
# /// truth
# leaks = true
# owners = ["native"]
# bytes_per_step = 133333
# holder = "kept|cache"
# ///
import numpy as np

from watched import steps

cache, kept = [], []
for step in steps():
    if step % 30 == 0:
        kept.extend(cache[:10])
        cache.clear()
    cache.append(np.ones(50_000))  # site
