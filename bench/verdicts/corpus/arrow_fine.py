# SPDX-License-Identifier: Apache-2.0
"""Batches of a mapped Arrow file: its resident pages grow, and the kernel takes them back (datasets#4883)."""
# /// truth
# leaks = false
# needs = ["pyarrow"]
# ///
import pathlib
import tempfile

import pyarrow as pa

from watched import steps

with tempfile.TemporaryDirectory() as folder:
    path = str(pathlib.Path(folder) / "texts.arrow")
    table = pa.table({"text": [f"{k} is a line of text of some length" for k in range(300_000)]})
    with pa.OSFile(path, "wb") as file, pa.ipc.new_file(file, table.schema) as writer:
        writer.write_table(table, max_chunksize=1_000)
    del table
    reader = pa.ipc.open_file(pa.memory_map(path))
    for step in steps():
        total = len(reader.get_batch(step % 300).to_pylist())
