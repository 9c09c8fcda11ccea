# SPDX-License-Identifier: Apache-2.0
"""functools.lru_cache(maxsize=None) of features by an id that grows."""
# /// truth
# leaks = true
# owners = ["native"]
# bytes_per_step = 128000
# holder = "features"
# needs = ["numpy"]
# ///
import functools

import numpy

from watched import steps


@functools.lru_cache(maxsize=None)
def features(sample):
    return numpy.full(16000, float(sample))  # site


for step in steps():
    features(step)
