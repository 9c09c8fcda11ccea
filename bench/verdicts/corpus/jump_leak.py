# SPDX-License-Identifier: Apache-2.0
"""One large table in the middle of a leak."""
# /// truth
# leaks = true
# owners = ["native"]
# bytes_per_step = 200000
# holder = "kept"
# ///
import numpy as np

from watched import steps

kept, table = [], None
for step in steps():
    kept.append(np.full(25_000, step))  # site
    if step == 150:
        table = np.ones(2_000_000)
