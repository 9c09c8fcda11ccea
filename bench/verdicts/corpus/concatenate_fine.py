# SPDX-License-Identifier: Apache-2.0
"""One array to which each step appends, begun anew every 20 steps."""
# /// truth
# leaks = false
# ///
import numpy as np

from watched import steps

for step in steps():
    if step % 20 == 0:
        scores = np.zeros(0)
    scores = np.concatenate([scores, np.ones(12_500)])
