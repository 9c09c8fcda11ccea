# SPDX-License-Identifier: Apache-2.0
"""Errors kept for a report; their tracebacks hold the frames and what stood in them."""
# /// truth
# leaks = true
# owners = ["native"]
# bytes_per_step = 160000
# holder = "errors|[Tt]raceback|frame|ValueError"
# ///
import numpy as np

from watched import steps

errors = []


def decode(number):
    pixels = np.zeros(20_000) + number  # site
    raise ValueError(f"sample {number}: {pixels.size} pixels are too many")


for step in steps():
    try:
        decode(step)
    except ValueError as error:
        errors.append(error)
