# SPDX-License-Identifier: Apache-2.0
"""Futures of a pool that are kept with their results."""
# /// truth
# leaks = true
# owners = ["native"]
# bytes_per_step = 200000
# holder = "futures|Future"
# ///
import concurrent.futures

import numpy as np

from watched import steps


def load(number):
    return np.full(25_000, number)  # site


futures = {}
with concurrent.futures.ThreadPoolExecutor(2) as pool:
    for step in steps():
        futures[step] = pool.submit(load, step)
        futures[step].result()
