# SPDX-License-Identifier: Apache-2.0
"""A buffer in memory that is emptied after each step."""
# /// truth
# leaks = false
# ///
import io

from watched import steps

stream = io.BytesIO()
for step in steps():
    stream.write(bytes(100_000))
    stream.seek(0)
    stream.truncate()
