# SPDX-License-Identifier: Apache-2.0
"""Frames of pandas collected for a table at the end."""
# /// truth
# leaks = true
# needs = ["pandas"]
# owners = ["native", "unexplained"]
# bytes_per_step = 160000
# holder = "frames"
# ///
import numpy as np
import pandas as pd

from watched import steps

frames = []
for step in steps():
    frames.append(pd.DataFrame(np.ones((5_000, 4)), columns=list("abcd")))  # site
