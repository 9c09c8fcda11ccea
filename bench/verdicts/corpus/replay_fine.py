# SPDX-License-Identifier: Apache-2.0
"""A replay buffer of 140 frames, full in the middle of the run."""
# /// truth
# leaks = false
# ///
import collections

import numpy as np

from watched import steps


class Replay:
    def __init__(self):
        self.memory = collections.deque(maxlen=140)

    def remember(self, frame, reward):
        self.memory.append((frame, reward))


replay = Replay()
for step in steps():
    replay.remember(np.full((500, 500), step % 256, "uint8"), 1.0)
