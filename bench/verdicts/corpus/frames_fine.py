# SPDX-License-Identifier: Apache-2.0
"""Frames of pandas joined and written away every 20 steps."""
# /// truth
# leaks = false
# needs = ["pandas"]
# ///
import numpy as np
import pandas as pd

from watched import steps

frames = []
for step in steps():
    frames.append(pd.DataFrame(np.ones((5_000, 4)), columns=list("abcd")))
    if len(frames) == 20:
        total = pd.concat(frames).sum()
        frames.clear()
