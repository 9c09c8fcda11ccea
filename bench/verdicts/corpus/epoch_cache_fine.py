# SPDX-License-Identifier: Apache-2.0
"""A cache that is emptied after each epoch of 60 steps."""
# /// truth
# leaks = false
# ///
import numpy as np

from watched import steps

cache = []
for step in steps():
    if step % 60 == 0:
        cache.clear()
    cache.append(np.ones(50_000))
