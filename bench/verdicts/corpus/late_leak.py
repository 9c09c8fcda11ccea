# SPDX-License-Identifier: Apache-2.0
"""A leak that begins after 80 steps."""
# /// truth
# leaks = true
# owners = ["native"]
# bytes_per_step = 200000
# holder = "late"
# ///
import numpy as np

from watched import steps

late = []
for step in steps():
    one = np.full(25_000, step)  # site
    if step >= 80:
        late.append(one)
