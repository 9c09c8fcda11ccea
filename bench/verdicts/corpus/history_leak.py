# SPDX-License-Identifier: Apache-2.0
"""An attribute that collects arrays."""
# /// truth
# leaks = true
# owners = ["native"]
# bytes_per_step = 200000
# holder = "history|Trainer"
# ///
import numpy as np

from watched import steps


class Trainer:
    def __init__(self):
        self.history = []

    def step(self, number):
        gradient = np.full(25_000, float(number))  # site
        self.history.append(gradient)


trainer = Trainer()
for step in steps():
    trainer.step(step)
