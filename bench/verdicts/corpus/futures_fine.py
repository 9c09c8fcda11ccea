# SPDX-License-Identifier: Apache-2.0
"""Futures of a pool that are taken out once they are done."""
# /// truth
# leaks = false
# ///
import concurrent.futures

import numpy as np

from watched import steps


def load(number):
    return np.full(25_000, number)


futures = {}
with concurrent.futures.ThreadPoolExecutor(2) as pool:
    for step in steps():
        futures[step] = pool.submit(load, step)
        futures.pop(step).result()
