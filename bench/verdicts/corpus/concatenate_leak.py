# SPDX-License-Identifier: Apache-2.0
"""One array to which each step appends: a copy of all, and longer."""
# /// truth
# leaks = true
# owners = ["native"]
# bytes_per_step = 100000
# holder = "scores"
# ///
import numpy as np

from watched import steps

scores = np.zeros(0)
for step in steps():
    scores = np.concatenate([scores, np.ones(12_500)])  # site
