# SPDX-License-Identifier: Apache-2.0
"""Anonymous maps as buffers, closed."""
# /// truth
# leaks = false
# ///
import mmap

from watched import steps

for step in steps():
    with mmap.mmap(-1, 262_144) as buffer:
        buffer.write(b"1" * 262_144)
