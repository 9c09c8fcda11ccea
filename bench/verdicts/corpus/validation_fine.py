# SPDX-License-Identifier: Apache-2.0
"""A validation every 15 steps that needs much for a moment."""
# /// truth
# leaks = false
# ///
import numpy as np

from watched import phase, steps

for step in steps():
    np.ones(10_000).sum()
    if step % 15 == 14:
        with phase("validation"):
            everything = [np.full(375_000, step) for k in range(20)]
            del everything
