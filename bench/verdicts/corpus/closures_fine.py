# SPDX-License-Identifier: Apache-2.0
"""Functions that are called and forgotten."""
# /// truth
# leaks = false
# ///
import numpy as np

from watched import steps


def main():
    for step in steps():
        report(np.arange(20_000))()


def report(array):
    return lambda: array.mean()


main()
