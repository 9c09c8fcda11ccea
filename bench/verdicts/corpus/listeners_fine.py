# SPDX-License-Identifier: Apache-2.0
"""Listeners that are held weakly."""
# /// truth
# leaks = false
# ///
import weakref

import numpy as np

from watched import steps


class Bus:
    def __init__(self):
        self.listeners = weakref.WeakSet()


class Preview:
    def __init__(self, bus):
        self.picture = np.zeros(15_000) + 1
        bus.listeners.add(self)


bus = Bus()
for step in steps():
    Preview(bus)
