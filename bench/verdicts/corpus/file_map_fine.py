# SPDX-License-Identifier: Apache-2.0
"""A mapped file read piece by piece: its pages stay in the page cache, and the kernel takes them back."""
# /// truth
# leaks = false
# ///
import mmap
import tempfile

from watched import steps

with tempfile.TemporaryFile() as file:
    file.write(bytes(160 << 20))
    with mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ) as mapped:
        for step in steps():
            at = step % 320 << 19
            total = sum(mapped[at:at + (1 << 19):4096])
