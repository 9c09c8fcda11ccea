# SPDX-License-Identifier: Apache-2.0
"""Buffers that are filled in the first 60 steps."""
# /// truth
# leaks = false
# ///
import numpy as np

from watched import steps

buffers = []
for step in steps():
    one = np.full(25_000, step)
    if step < 60:
        buffers.append(one)
