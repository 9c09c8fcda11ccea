# SPDX-License-Identifier: Apache-2.0
"""Functions to be called at the end; each keeps an array."""
# /// truth
# leaks = true
# owners = ["native"]
# bytes_per_step = 160000
# holder = "at_end|closure|cell|array"
# ///
import numpy as np

from watched import steps

at_end = []


def main():
    for step in steps():
        at_end.append(report(np.arange(20_000)))  # site


def report(array):
    return lambda: print(array.mean())


main()
