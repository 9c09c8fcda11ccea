# SPDX-License-Identifier: Apache-2.0
"""Files that are opened, read and left open, each with its buffer."""
# /// truth
# leaks = true
# owners = ["native"]
# holder = "files"
# ///
import pathlib
import tempfile

from watched import steps

files = []
with tempfile.TemporaryDirectory() as folder:
    path = pathlib.Path(folder) / "sample"
    path.write_bytes(bytes(1_000_000))
    for step in steps():
        files.append(open(path, "rb", buffering=1 << 18))  # site
        files[-1].read(1000)  # site: the buffer
