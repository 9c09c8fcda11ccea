# SPDX-License-Identifier: Apache-2.0
"""Errors kept for a report as text."""
# /// truth
# leaks = false
# ///
import numpy as np

from watched import steps

errors = []


def decode(number):
    pixels = np.zeros(20_000) + number
    raise ValueError(f"sample {number}: {pixels.size} pixels are too many")


for step in steps():
    try:
        decode(step)
    except ValueError as error:
        errors.append(str(error))
