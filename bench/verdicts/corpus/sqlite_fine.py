# SPDX-License-Identifier: Apache-2.0
"""A database in memory that holds the last ten rows."""
# /// truth
# leaks = false
# ///
import sqlite3

from watched import steps

database = sqlite3.connect(":memory:")
database.execute("create table metrics (step, picture)")
for step in steps():
    database.execute("insert into metrics values (?, ?)", (step, b"x" * 150_000))
    database.execute("delete from metrics where step < ?", (step - 10,))
