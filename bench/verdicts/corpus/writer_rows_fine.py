# SPDX-License-Identifier: Apache-2.0
"""Rows wait for a writer, which writes them by 60."""
# /// truth
# leaks = false
# ///
from watched import steps


class Writer:
    def __init__(self, batch):
        self.rows, self.batch = [], batch

    def write(self, row):
        self.rows.append(row)
        if len(self.rows) >= self.batch:
            self.rows.clear()


writer = Writer(batch=60)
for step in steps():
    writer.write(bytes(bytearray(150000)))
