# SPDX-License-Identifier: Apache-2.0
"""Rows wait for a writer that is never flushed."""
# /// truth
# leaks = true
# owners = ["native"]
# bytes_per_step = 150000
# holder = "rows"
# ///
from watched import steps


class Writer:
    def __init__(self, batch):
        self.rows, self.batch = [], batch

    def write(self, row):
        self.rows.append(row)
        if len(self.rows) >= self.batch:
            self.rows.clear()


writer = Writer(batch=1000000)
for step in steps():
    writer.write(bytes(bytearray(150000)))  # site
