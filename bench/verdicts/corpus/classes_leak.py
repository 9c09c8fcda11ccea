# SPDX-License-Identifier: Apache-2.0
"""Classes made anew in each step and entered in a registry."""
# /// truth
# leaks = true
# owners = ["python", "native"]
# holder = "registry"
# ///
from watched import steps

registry = []


def config(number):
    return type(f"Config{number}", (), {f"option_{k}": f"value {number} {k}" for k in range(20)})  # site


for step in steps():
    registry.extend(config(step * 20 + k) for k in range(20))
