# SPDX-License-Identifier: Apache-2.0
"""A validation every 15 steps that needs much for a moment, and keeps a part of it."""
# /// truth
# leaks = true
# owners = ["native"]
# bytes_per_step = 200000
# phase = "validation"
# holder = "worst"
# ///
import numpy as np

from watched import phase, steps

worst = []
for step in steps():
    np.ones(10_000).sum()
    if step % 15 == 14:
        with phase("validation"):
            everything = [np.full(375_000, step) for k in range(20)]  # site
            worst.append(everything[7])
            del everything
