# SPDX-License-Identifier: Apache-2.0
"""A database in memory that grows by a row a step."""
# /// truth
# leaks = true
# owners = ["native"]
# ///
import sqlite3

from watched import steps

database = sqlite3.connect(":memory:")
database.execute("create table metrics (step, picture)")
for step in steps():
    database.execute("insert into metrics values (?, ?)", (step, b"x" * 150_000))  # site
