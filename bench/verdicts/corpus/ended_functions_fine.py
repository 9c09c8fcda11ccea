# SPDX-License-Identifier: Apache-2.0
"""A function holds much in its local variables, and ends with each step; a log of numbers grows."""
# /// truth
# leaks = false
# needs = ["numpy"]
# ///
import numpy

from watched import steps

log = []


def train(step):
    kept = [numpy.full(20000, float(step + at)) for at in range(10)]

    def report():
        return sum(one.mean() for one in kept)

    return report()


for step in steps():
    log.append(train(step))
