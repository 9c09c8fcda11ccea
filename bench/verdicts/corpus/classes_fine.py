# SPDX-License-Identifier: Apache-2.0
"""Classes made anew in each step: cycles that the collector frees now and then."""
# /// truth
# leaks = false
# ///
from watched import steps


def config(number):
    return type(f"Config{number}", (), {f"option_{k}": f"value {number} {k}" for k in range(20)})


for step in steps():
    latest = [config(step * 20 + k) for k in range(20)]
