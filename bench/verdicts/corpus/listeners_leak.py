# SPDX-License-Identifier: Apache-2.0
"""Listeners that are never unsubscribed: bound methods of objects that are otherwise gone."""
# /// truth
# leaks = true
# owners = ["native"]
# bytes_per_step = 120000
# holder = "listeners|Bus|Preview"
# ///
import numpy as np

from watched import steps


class Bus:
    def __init__(self):
        self.listeners = []


class Preview:
    def __init__(self, bus):
        self.picture = np.zeros(15_000) + 1  # site
        bus.listeners.append(self.show)

    def show(self):
        return self.picture.sum()


bus = Bus()
for step in steps():
    Preview(bus)
