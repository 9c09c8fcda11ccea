# SPDX-License-Identifier: Apache-2.0
"""Files that are opened, read and closed."""
# /// truth
# leaks = false
# ///
import pathlib
import tempfile

from watched import steps

with tempfile.TemporaryDirectory() as folder:
    path = pathlib.Path(folder) / "sample"
    path.write_bytes(bytes(1_000_000))
    for step in steps():
        with open(path, "rb", buffering=1 << 18) as file:
            file.read(1000)
