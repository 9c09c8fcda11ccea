# SPDX-License-Identifier: Apache-2.0
"""An attribute that collects the last ten arrays."""
# /// truth
# leaks = false
# ///
import collections

import numpy as np

from watched import steps


class Trainer:
    def __init__(self):
        self.history = collections.deque(maxlen=10)

    def step(self, number):
        self.history.append(np.full(25_000, float(number)))


trainer = Trainer()
for step in steps():
    trainer.step(step)
