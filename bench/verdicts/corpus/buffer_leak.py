# SPDX-License-Identifier: Apache-2.0
"""A buffer in memory that is written to and never emptied."""
# /// truth
# leaks = true
# owners = ["native"]
# bytes_per_step = 100000
# holder = "stream"
# ///
import io

from watched import steps

stream = io.BytesIO()
for step in steps():
    stream.write(bytes(100_000))  # site
