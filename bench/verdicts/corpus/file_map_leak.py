# SPDX-License-Identifier: Apache-2.0
"""A mapped file read piece by piece, each piece kept as a copy."""
# /// truth
# leaks = true
# owners = ["native"]
# bytes_per_step = 524288
# holder = "pieces"
# ///
import mmap
import tempfile

from watched import steps

pieces = []
with tempfile.TemporaryFile() as file:
    file.truncate(160 << 20)
    with mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ) as mapped:
        for step in steps():
            at = step % 320 << 19
            pieces.append(mapped[at:at + (1 << 19)])  # site
