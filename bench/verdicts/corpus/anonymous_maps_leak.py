# SPDX-License-Identifier: Apache-2.0
"""Anonymous maps as buffers, kept open."""
# /// truth
# leaks = true
# owners = ["shared"]
# bytes_per_step = 262144
# holder = "buffers"
# ///
import mmap

from watched import steps

buffers = []
for step in steps():
    buffers.append(mmap.mmap(-1, 262_144))  # site
    buffers[-1].write(b"1" * 262_144)
