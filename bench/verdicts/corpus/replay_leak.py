# SPDX-License-Identifier: Apache-2.0
"""A replay buffer that forgets nothing."""
# /// truth
# leaks = true
# owners = ["native"]
# bytes_per_step = 250000
# holder = "memory|Replay"
# ///
import numpy as np

from watched import steps


class Replay:
    def __init__(self):
        self.memory = []

    def remember(self, frame, reward):
        self.memory.append((frame, reward))


replay = Replay()
for step in steps():
    frame = np.full((500, 500), step % 256, "uint8")  # site
    replay.remember(frame, 1.0)
