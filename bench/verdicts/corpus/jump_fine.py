# SPDX-License-Identifier: Apache-2.0
"""One large table in the middle."""
# /// truth
# leaks = false
# ///
import numpy as np

from watched import steps

table = None
for step in steps():
    one = np.full(25_000, step)
    if step == 150:
        table = np.ones(10_000_000)
