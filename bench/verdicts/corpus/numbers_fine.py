# SPDX-License-Identifier: Apache-2.0
"""A history of two numbers a step: some ten kilobytes in all."""
# /// truth
# leaks = false
# ///
from watched import steps

norms = []
for step in steps():
    norms.append((step, float(step)))
    total = sum(float(step + k) for k in range(3_000))
