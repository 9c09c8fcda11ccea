# SPDX-License-Identifier: Apache-2.0
"""Numbers by the thousand in a list of lists."""
# /// truth
# leaks = true
# owners = ["python", "native"]
# bytes_per_step = 126000
# holder = "norms"
# ///
from watched import steps

norms = []
for step in steps():
    norms.append([[float(step + k) for k in range(40)] for _ in range(75)])  # site
