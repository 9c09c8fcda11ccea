# SPDX-License-Identifier: Apache-2.0
"""A function that has ended leaves a closure behind, which keeps its batch."""
# /// truth
# leaks = true
# owners = ["native"]
# bytes_per_step = 160000
# holder = "callbacks|closure"
# needs = ["numpy"]
# ///
import numpy

from watched import steps

callbacks = []


def train(step):
    batch = numpy.full(20000, float(step))  # site

    def report():
        return batch.mean()

    callbacks.append(report)
    return report()


for step in steps():
    train(step)
