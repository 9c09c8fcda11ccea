# SPDX-License-Identifier: Apache-2.0
"""functools.lru_cache of 180 features: full within the run."""
# /// truth
# leaks = false
# needs = ["numpy"]
# ///
import functools

import numpy

from watched import steps


@functools.lru_cache(maxsize=180)
def features(sample):
    return numpy.full(6000, float(sample))


for step in steps():
    features(step)
